"""Notebook 07: what goes from rank to rank: shards that rank 0 sends, and a disagreement that no rank sees alone."""

import torch

from course.judge.attempt import Attempt, NotYet, for_each, on_ranks, one_number, saying, with_its_own
from course.judge.compare import agree
from course.judge.cuts import dealt, judge_part, owns, read_once
from course.judge.toy_checkpoint import ToySource
from course.judge.verdict import Setting, exercise
from tplab.pool import shared_pool
from tplab.ranks import rank
from tplab.shard import ShardPlan, split_evenly

_ALONE = "one rank has no other to talk to, so it was judged on 2 and 3 logical ranks"


@exercise("my_send_shards", "07", takes="source, ranges", alone=_ALONE,
          agreed="rank 0 reads, and every rank gets its slice, in messages no larger than a slice")
def my_send_shards(attempt: Attempt, setting: Setting):
    """11 rows over 2 ranks, a bias over 3 of which one has none of it, rows that two ranks hold, 5 ranks, in
    bfloat16; then as many rows as the vocabulary has, on the real ranks."""
    def check(case, ranks=None, dtype=torch.bfloat16):
        ranges, shape = case
        sources = [ToySource(shape, dtype) for _ in ranges]
        with saying(f"ranges {ranges}: "):
            ran = on_ranks(ranks or len(ranges), lambda: (attempt(sources[rank()], ranges), sources[rank()].taken),
                           timeout=20, waits="Every rank takes part in every broadcast")
            _examine_sent(ran, sources[0], ranges)

    for_each(((dealt(11, 2), (11, 4)), ([range(4), range(4, 4), range(4, 9)], (9,)),
              ([range(2), range(2), range(2, 4)], (4, 3)),
              ([*split_evenly(15, 5)], (15, 2))),  # as many ranks as it takes to see what rank 0 keeps
             check, lambda case: f"ranges {case[0]}")
    if (size := setting.tensor_parallel_size) > 1:
        ranges = [shard.vocab for shard in ShardPlan.from_config(setting.checkpoint.config, size).ranks]
        check((ranges, (ranges[-1].stop, 3)), shared_pool(size), torch.float32)


def _examine_sent(answers: list, source: ToySource, ranges) -> None:
    """``answers``: of each rank, what it got and how many bytes it read, and its collectives."""
    whole, largest = source.whole, max(map(len, ranges)) * source.whole[0].nbytes
    for number, ((_, read), _) in enumerate(answers):
        if number and read:
            raise NotYet(f"rank {number} reads {read} bytes itself; only rank 0 has the files")
    for number, ((got, _), ops) in enumerate(answers):
        if others := sorted({op.detail for op in ops if op.op == "broadcast" and op.detail}):
            raise NotYet(f"rank {others[0]} is asked to send (src={others[0]}), and only rank 0 has the rows")
        judge_part(got, whole, ranges[number], f"rank {number}: ", ways={
            f"these are rank {r}'s": other
            for r, other in enumerate(ranges) if r != number})
    for number, (_, ops) in enumerate(answers):
        sent = {str(op): torch.Size(op.shape).numel() * whole.element_size() for op in ops}
        if big := [op for op, nbytes in sent.items() if nbytes > largest]:
            raise NotYet(f"right everywhere, but rank {number} takes part in {big[0]}: a message of {sent[big[0]]} "
                         f"bytes, and the largest slice has {largest}")
    read_once(answers[0][0][1], sum(map(len, ranges)) * whole[0].nbytes, "rank 0: ", "no slice is needed twice")
    if source.most > 3 * largest:  # its own, the last one sent and the next one
        raise NotYet(f"the messages are right, but rank 0 has {source.most} of the tensor's {whole.nbytes} bytes in "
                     f"memory at the same time, and a slice has {largest}: when is which of them read, and kept?")
    for number, ((got, _), _) in enumerate(answers):
        owns(got, f"rank {number}: ")


@exercise("my_spread", "07", takes="x", alone=_ALONE, agreed="every rank knows the largest difference between any two")
def my_spread(attempt: Attempt, setting: Setting):
    """Tensors whose differences cancel, hide behind equal maxima, or sit on the last rank."""
    equal, low = torch.tensor([[4.0, -9.0], [2.0, 0.5]]), torch.tensor([[4.0, -9.0], [0.25, 2.0]])
    high = torch.tensor([[4.0, -9.0], [2.5, -2.1]])
    for versions, why in (
        ([equal, equal], "both hold the same"), ([equal, low], "they differ at two places, in both directions"),
        ([0 * low, low], "rank 0 holds zeros"),
        ([equal, equal, low], "only rank 2 differs"), ([equal, low, high], "rank 1 is below rank 0, rank 2 above"),
        ([low, equal, high], "rank 0 is below rank 1, rank 2 above")):
        stacked = torch.stack(versions)
        apart, of_rows = (stacked.amax(dims) - stacked.amin(dims) for dims in ((0,), (0, 1)))
        steps = {"the numbers of all ranks": stacked, "their maxima": stacked.amax(0), "their minima": stacked.amin(0),
                 "the differences at each place": apart} if apart.any() else None
        for rank_, (found, ops) in enumerate(on_ranks(len(versions), with_its_own, attempt, versions, waits=(
                f"Here {why}: every rank comes, whatever its tensor holds"))):
            with saying(head := f"{len(versions)} ranks, {why}: on rank {rank_} "):
                found = one_number(found)
                if not ops:
                    raise NotYet(f"it says {found:g} without a word to the others; how could it know?")
            with saying(f"{head}it says {found:.7g}; the largest difference between two ranks is {apart.max():g}\n"):
                agree(found, apart.max().item(), {
                    "So much do rows differ, also those of one rank: where is the dimension of the ranks?":
                        of_rows.max()}, within=1e-5, made=attempt.made[rank_], steps=steps)

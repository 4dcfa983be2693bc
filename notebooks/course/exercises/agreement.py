"""Notebook 08: ranks that decide together: a mean, a failure that all hear of, a barrier where it belongs."""

import tempfile
from itertools import product
from pathlib import Path

from course.judge.attempt import Attempt, Uncopied, kind, on_ranks, one_number, ranks_in_words, saying, whole_numbers
from course.judge.compare import agree
from course.judge.verdict import Setting, exercise
from course.judge.words import NotYet
from tplab.checkpoint import CheckpointError
from tplab.checks import counted
from tplab.pool import shared_pool
from tplab.ranks import rank
from tplab.ranks.context import current

_TIMEOUT = 10  # seconds on real ranks; on logical ones a rank that is left alone is seen at once


@exercise("my_mean", "08", takes="shares", agreed="the same mean on all ranks, also where one has no request")
def my_mean(attempt: Attempt, setting: Setting):
    """Lists of lengths, some of them empty, one long, on 2 and 3 ranks."""
    cases = [[[3, 5], [10]], [[3, 5], []], [[], [4, 9]], [[], [2], []], [[70001, 5, 12, 8, 31], [1], [999]]]
    pool = shared_pool(max(2, setting.tensor_parallel_size))
    for ranks, shares in [*((len(case), case) for case in cases), (pool, [[3, 5]] + [[]] * (pool.size - 1))]:
        ran = on_ranks(ranks, attempt, _Shares(shares), timeout=_TIMEOUT,
                       waits=f"The requests are {shares}: every rank comes, also one that has none")
        pairs, size = [(sum(one), len(one)) for one in shares], len(shares)
        means, (total, count) = [length / requests for length, requests in pairs if requests], map(sum, zip(*pairs))
        mean = total / count
        mixed = [[sum(pair[way != at] for pair, way in zip(pairs, ways)) for at in (0, 1)]
                 for ways in product((0, 1), repeat=size)]
        for rank_, (found, _) in enumerate(ran):
            head, own = f"requests {shares}: on rank {rank_} ", shares[rank_]
            with saying(head):
                found = one_number(found, "a number, on every rank,")
            with saying(f"{head}it says {found:.8g}; the mean of all requests is {total} / {count} = {mean:.8g}\n"):
                agree(found, mean, {
                    "That is the mean of its own requests": sum(own) / len(own) if own else mean,
                    "That is the mean of the ranks' means: how much does a rank with many requests count?":
                        (sum(means) / size, sum(means) / len(means)),
                    "Those are the ranks' means, added up: how much does a rank with many requests count?": sum(means),
                    f"That is the mean divided by {size}, the number of ranks": mean / size,
                    "Lengths of some ranks are added to numbers of requests of others: do all ranks make their sums in "
                    "the same order?": tuple(a / b for a, b in mixed if b)}, within=1e-6)


class _Shares:
    """``shares[rank()]``: a rank's own list. Those of the others are not there."""

    def __init__(self, lists: list[list[int]]):
        self._lists = lists

    def __len__(self) -> int:
        return len(self._lists)

    def __getitem__(self, number):
        if number != rank():
            raise LookupError(f"shares[{number}] is on another rank; here is shares[rank()], shares[{rank()}]. What "
                              "tells a rank about the others?")
        return list(self._lists[number])

    def __repr__(self) -> str:
        return f"[{', '.join(str(one) if number == rank() else '…' for number, one in enumerate(self._lists))}]"


class _Work(Uncopied):
    """A rank's own work: says how often it was called, and fails on some ranks."""

    def __init__(self, failing):
        self.failing, self.calls = failing, 0

    def __call__(self):
        self.calls += 1
        if rank() in self.failing:
            raise CheckpointError(f"shard {rank()} cannot be read")


@exercise("my_agree", "08", takes="work", agreed="every rank hears which ranks failed, and none waits for them")
def my_agree(attempt: Attempt, setting: Setting):
    """Work that fails on no rank, on some, on all."""
    waits = "Every rank has to come, whether its work has failed or not"
    left = "Uncaught, or raised again, it leaves this rank, and the others wait for it in their next collective"
    size = max(2, setting.tensor_parallel_size)
    cases = ((5, [1, 4]), (2, []), (2, [0]), (2, [0, 1]), (3, [0, 2]), (3, [1, 2]), (shared_pool(size), [1]))
    for ranks, failing in cases:
        works = [_Work(failing) for _ in range(ranks if isinstance(ranks, int) else size)]
        who = ranks_in_words(failing, len(works)) if failing else "none"
        have = f"of {len(works)} ranks, {who} failed: "
        answers = on_ranks(ranks, lambda works=works: (attempt(works[rank()]), works[rank()].calls), waits=waits,
                           asks={"cannot be read": left}, timeout=_TIMEOUT)
        for number, ((found, calls), ops) in enumerate(answers):
            if calls != 1:
                raise NotYet(f"{have}rank {number} does its work {calls} times; once is asked")
            with saying(f"{have}on rank {number} "):
                found = whole_numbers(found, f"the failed ranks, which are {failing}")
            if found == failing:
                continue
            said = f"{have}rank {number} says {found} where it must say {failing}"
            ways = {"that is how many ranks failed, and not which": [len(failing)],
                    "their numbers are added up, where each rank needs a place of its own": [sum(failing)],
                    "on those it worked": [r for r in range(len(works)) if r not in failing]}
            sent = {op.op for op in ops}
            raise NotYet(said + next((f": {says}" for says, way in ways.items() if found == [*way]),
                                     f", after {', '.join(sent) or 'no collective'}: what tells it about all others?"
                                     if not sent & {"all_reduce", "all_gather"} else
                                     f": what is in place {failing[0]} on each rank, before the sum and after it?"
                                     if not found else ""))


@exercise("my_rounds", "08", takes="write, read, rounds",
          agreed="no rank reads before the file is written, and it is written again when all have read")
def my_rounds(attempt: Attempt, setting: Setting):
    """Some rounds on 2 and 3 logical ranks and on real ones. What counts is which rank waits for which."""
    asks = {"is still at": "What ends it if the number that it waits for is not there yet, or not any more?"}
    for ranks, rounds in ((2, 3), (3, 1), (shared_pool(max(2, setting.tensor_parallel_size)), 4)):
        with tempfile.TemporaryDirectory() as folder:
            answers = on_ranks(ranks, _rounds, attempt, Path(folder, "slot"), rounds, asks=asks, timeout=_TIMEOUT,
                               waits="Which rank has not come? A barrier is for all")
        _examine_rounds([answer for answer, _ in answers], rounds)


def _rounds(attempt: Attempt, slot: Path, rounds: int):
    """On a rank: what it saw, and after how many collectives it wrote and read."""
    writes, reads = [], []

    def write(number):
        writes.append(current().log.seq)
        slot.write_text(str(number))

    def read():
        reads.append(current().log.seq)
        return int(slot.read_text() or -1) if slot.exists() else None

    before = current().log.seq
    seen = attempt(write, read, rounds)
    return seen, writes, reads, current().log.seq - before


def _examine_rounds(answers: list, rounds: int) -> None:
    size = len(answers)
    for number, (_, writes, reads, _) in enumerate(answers):
        if number and writes:
            raise NotYet(f"{size} ranks: rank {number} writes too; the file has one writer, rank 0")
        for does, times, must in (("writes", len(writes), 0 if number else rounds), ("reads", len(reads), rounds)):
            if times != must:
                raise NotYet(f"{size} ranks: rank {number} {does} {counted(times, 'time')} in "
                             f"{counted(rounds, 'round')}")
    written = answers[0][1]
    for number, (_, _, reads, calls) in enumerate(answers[1:], 1):
        for at in range(rounds):
            if reads[at] <= written[at]:
                raise NotYet(f"round {at}: nothing makes rank {number} wait: it may read before rank 0 has written. "
                             "What must lie between the two?" + " None of your lines calls a collective" * (not calls))
            if at + 1 < rounds and written[at + 1] <= reads[at]:
                raise NotYet(f"round {at}: nothing makes rank 0 wait: it may write round {at + 1} while rank {number} "
                             f"still has to read round {at}")
    for number, (seen, _, _, collectives) in enumerate(answers):
        if not isinstance(seen, list) or seen != list(range(rounds)):
            raise NotYet(f"{size} ranks: rank {number} returns {seen if isinstance(seen, list) else kind(seen)}; what "
                         f"it read must come back, {list(range(rounds))}" + ", in a list that begins empty in each "
                         "call" * (isinstance(seen, list) and len(seen) > rounds))
        if collectives > 2 * rounds:
            raise NotYet(f"{size} ranks: {collectives} collectives in {counted(rounds, 'round')}; each one is a "
                         f"meeting that costs time, and {2 * rounds} are enough")

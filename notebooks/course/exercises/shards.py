"""Notebook 02: which rows of a weight a rank keeps, of one matrix and of several in one."""

from itertools import groupby

import torch

from course.judge.attempt import Attempt, NotYet, for_each, on_ranks, with_its_own
from course.judge.cuts import dealt, judge_part, read_once, span
from course.judge.toy_checkpoint import ToySource
from course.judge.verdict import Setting, at, exercise
from tplab.align import reassemble
from tplab.shard import ShardPlan

_HALF, _FULL = torch.float16, torch.float32
_COMMON = {"agreed": "on {ranks}, the shards are the checkpoint bit for bit, and every trace point agrees with Hugging "
                     "Face",
           "alone": "one rank keeps everything, so two and three logical ranks have judged the cut"}


@exercise("my_column_shard", "02", takes="source, rows", **_COMMON, place="cuts rows out of weights",
          patches=at("tplab.shard.linear.column_shard", "tplab.shard.embedding.column_shard"))
def column_shard(attempt: Attempt, setting: Setting):
    """Weights and biases on 2 and 3 logical ranks, even and uneven; then in the engine, weights and numbers."""
    def check(case):
        size, shape, dtype = case
        rows, sources = dealt(shape[0], size), [ToySource(shape, dtype) for _ in range(size)]
        what = f"a {'weight' if len(shape) > 1 else 'bias'} {list(shape)} over {size} ranks"
        for number, ((found, _), own) in enumerate(zip(on_ranks(size, with_its_own, attempt, sources, rows), rows)):
            head = f"{what}, rank {number}: "
            judge_part(found, sources[0].whole, own, head)
            read_once(sources[number].taken, found.nbytes, head)

    for_each(((2, (12, 14), _FULL), (2, (12, 5), _FULL), (3, (11, 4), _FULL), (2, (7, 6), _FULL), (3, (11,), _FULL),
              (2, (12,), _HALF)), check,
             lambda case: f"{'weights' if case[1][1:] else 'biases'} over {case[0]} ranks")
    _in_the_engine(setting)


@exercise("my_merged", "02", takes="sources, ranges", **_COMMON, place="stacks q, k and v, gate and up",
          patches=at("tplab.shard.linear.merged_shard"))
def merged(attempt: Attempt, setting: Setting):
    """``q|k|v`` of three layouts and ``gate|up``, weights and biases, apart and fused on disk; then in the engine."""
    def check(case):
        parts, columns, dtype = case
        totals, size = [total for _, _, total in parts], len(parts[0][1])
        fused = ToySource((sum(totals), *columns), dtype).whole
        ranges = [tuple(held[number] for _, held, _ in parts) for number in range(size)]
        sources = [[ToySource(one) for one in fused.split(totals)] for _ in range(size)]
        shape = ", ".join(f"{name} {[total, *columns]}" for name, _, total in parts)
        for number, (found, _) in enumerate(on_ranks(size, with_its_own, attempt, sources, ranges)):
            head = f"{shape} over {size} ranks, rank {number}: "
            _judge_merged(found, fused, ranges, number, [(name, total) for name, _, total in parts], head)
            read_once(sum(source.taken for source in sources[number]), found.nbytes, head)

    for_each(((_qkv(8, 2, 2), (6,), _FULL), (_qkv(9, 3, 2), (5,), _FULL), (_qkv(8, 2, 3), (), _FULL),
              ([(name, dealt(7, 2), 7) for name in ("gate", "up")], (4,), _FULL),
              ([(name, dealt(total, 2), total) for name, total in (("a", 7), ("b", 5), ("c", 6))], (), _HALF)), check,
             lambda case: f"{'weights' if case[1] else 'biases'} over {len(case[0][0][1])} ranks")
    _in_the_engine(setting)


def _in_the_engine(setting: Setting) -> None:
    wrong = reassemble(setting.model, tensor_parallel_size=setting.tensor_parallel_size, patches=setting.patches)
    if wrong:
        name, what = next(iter(wrong.items()))
        raise NotYet(f"in the engine, {len(wrong)} tensors are not the checkpoint's; {name}: {what}")
    setting.align()


def _qkv(heads: int, kv_heads: int, size: int) -> list[tuple]:
    """``(name, rows of each rank, rows)`` of q, k and v; heads have 2 rows."""
    plan = ShardPlan.make(tensor_parallel_size=size, num_heads=heads, num_kv_heads=kv_heads, head_dim=2, hidden_size=6,
                          intermediate_size=size, vocab_size=size)
    q, kv = ([range(2 * held.start, 2 * held.stop) for held in (getattr(shard, which) for shard in plan.ranks)]
             for which in ("q_heads", "kv_heads"))
    return [("q", q, 2 * heads), ("k", kv, 2 * kv_heads), ("v", kv, 2 * kv_heads)]


def _judge_merged(found, fused: torch.Tensor, ranges, number: int, parts: list[tuple[str, int]], head: str) -> None:
    held, size, names = ranges[number], len(ranges), "|".join(name for name, _ in parts)
    first = [sum(total for _, total in parts[:n]) for n in range(len(parts))]  # row of each in the fused matrix
    own = [[first[n] + row for row in rows] for n, rows in enumerate(held)]
    count, every = sum(map(len, held)), range(len(fused))
    blocks = {tuple(every[start:start + length]) for start in every for length in (count, len(every) // size)}
    begins = " and ".join(f"{name} begins at row {at}" for (name, _), at in zip(parts, first) if at)
    ways = {f"a range counts the rows of its own source, and here all of them are taken from {names} as one":
                [row for rows in held for row in rows],
            f"in {names}, {begins}; a rank has a piece of each": blocks}

    def label(places):
        runs = groupby(places, lambda place: max(n for n, row in enumerate(first) if row <= place))
        return "[" + "|".join(f"{parts[n][0]} {span([row - first[n] for row in run], '')[1:]}" for n, run in runs) + "]"
    judge_part(found, fused, sum(own, []), head, ways=ways, label=label)

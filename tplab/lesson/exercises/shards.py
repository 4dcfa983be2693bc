"""Notebook 02: which rows of a weight a rank keeps, of one matrix and of several in one."""

from collections.abc import Sequence
from itertools import groupby, permutations

import torch

from tplab.align import reassemble
from tplab.lesson.mine import Mine, NotYet, for_each, kind, on_ranks, ranks_in_words
from tplab.lesson.toy_checkpoint import ToySource
from tplab.lesson.verdict import Setting, exercise
from tplab.patch import Patch
from tplab.ranks import rank
from tplab.shard import ShardPlan, split_evenly

_ALONE = "one rank keeps everything, so two and three logical ranks have judged the cut"
_NO_ROW = "rows are copied as they stand in the file, and what is here stands nowhere in it"
_AGREED = "on {ranks}, the shards are the checkpoint bit for bit, and every trace point agrees with Hugging Face"


@exercise("my_column_shard", "02", takes="source, rows", agreed=_AGREED)
def column_shard(mine: Mine, setting: Setting):
    """Weights and biases on 2 and 3 logical ranks, even and uneven; then in the engine, weights and numbers."""
    def check(case):
        size, total, columns, dtype = case
        data = _numbered(total, columns).to(dtype)
        rows, sources = split_evenly(total, size), [ToySource(data) for _ in range(size)]
        what = f"a weight [{total}, {columns}] over {size} ranks" if columns else f"a bias [{total}] over {size} ranks"
        answers = [value for value, _ in on_ranks(size, _on_rank, mine, sources, rows)]
        _judge_rows(answers, data, rows, what)
        _judge_reading(answers, [[source] for source in sources], what)

    full, half = torch.float32, torch.float16
    for_each(((2, 12, 14, full), (2, 12, 5, full), (3, 11, 4, full), (2, 7, 6, full), (3, 11, 0, full),
              (2, 12, 0, half)), check, lambda case: f"{case[0]} ranks")
    return _in_the_engine(setting, Patch("tplab.shard.linear.column_shard", mine.function))


@exercise("my_merged", "02", takes="sources, ranges", agreed=_AGREED)
def merged(mine: Mine, setting: Setting):
    """``q|k|v`` of three layouts and ``gate|up``, weights and biases, apart and fused on disk; then in the engine."""
    def check(case):
        parts, columns, dtype = case
        size = len(parts[0][1])
        names, sources = "|".join(name for name, _, _ in parts), []
        for _ in range(size):
            sources.append([ToySource(_numbered(total, columns, 1000 * number).to(dtype))
                            for number, (_, _, total) in enumerate(parts)])
        ranges = [tuple(held[number] for _, held, _ in parts) for number in range(size)]
        shape = ", ".join(f"{name} [{total}{f', {columns}' * bool(columns)}]" for name, _, total in parts)
        what = f"{shape} over {size} ranks"
        answers = [value for value, _ in on_ranks(size, _on_rank, mine, sources, ranges)]
        _judge_merged(answers, [(name, total) for name, _, total in parts], ranges, columns, what, names, dtype)
        _judge_reading(answers, sources, what)

    full, half = torch.float32, torch.float16
    for_each(((_qkv(8, 2, 2), 6, full), (_qkv(9, 3, 2), 5, full), (_qkv(8, 2, 3), 0, full), (_gate_up(7, 2), 4, full),
              (_qkv(9, 3, 2), 0, half)), check, lambda case: f"{len(case[0][0][1])} ranks")
    return _in_the_engine(setting, Patch("tplab.shard.linear.merged_shard", mine.function))


def _on_rank(mine: Mine, *args):
    """On a rank: what it gives back for this rank's own arguments."""
    return mine(*(each[rank()] for each in args))


def _in_the_engine(setting: Setting, patch: Patch) -> str | None:
    wrong = reassemble(setting.model, tensor_parallel_size=setting.tensor_parallel_size, patches=[patch])
    if wrong:
        name, what = next(iter(wrong.items()))
        raise NotYet(f"in the engine, {len(wrong)} tensors are not the checkpoint's; {name}: {what}")
    setting.align(patch)
    return _ALONE if setting.tensor_parallel_size == 1 else None


def _numbered(rows: int, columns: int, first: int = 0) -> torch.Tensor:
    """A weight, or with no columns a bias, whose numbers say where they stand: row 7, column 2 is 7.02."""
    of_row = first + torch.arange(float(rows))
    return of_row[:, None] + torch.arange(columns) / 100 if columns else of_row


def _qkv(heads: int, kv_heads: int, size: int) -> list[tuple]:
    """``(name, rows of each rank, rows)`` of q, k and v; heads have 2 rows."""
    plan = ShardPlan.make(tensor_parallel_size=size, num_heads=heads, num_kv_heads=kv_heads, head_dim=2, hidden_size=6,
                          intermediate_size=size, vocab_size=size)
    q, kv = ([range(2 * held.start, 2 * held.stop) for held in (getattr(shard, which) for shard in plan.ranks)]
             for which in ("q_heads", "kv_heads"))
    return [("q", q, 2 * heads), ("k", kv, 2 * kv_heads), ("v", kv, 2 * kv_heads)]


def _gate_up(rows: int, size: int) -> list[tuple]:
    return [(name, split_evenly(rows, size), rows) for name in ("gate", "up")]


def _judge_rows(answers: list, data: torch.Tensor, rows: Sequence[range], what: str) -> None:
    size, found, wrong = len(answers), [], []
    for number, (value, own) in enumerate(zip(answers, rows)):
        turned = data.T[own.start:own.stop] if data.dim() == 2 else None
        if turned is not None and isinstance(value, torch.Tensor) and torch.equal(value, turned):
            raise NotYet(f"{what}: on rank {number} each row of your shard is a column of the weight: it is cut along "
                         "dim 1 and turned. Outputs are rows, dim 0")
        _shaped(value, data, len(own), number, what)
        found.append(_places(value))
        wrong += [number] * (found[-1] != [*own])
    if not wrong:
        return
    starts = [places[0] for places in found]
    if any(-1 in places for places in found):
        why = _NO_ROW
    elif starts == [0] * size:
        why = f"{ranks_in_words(range(size), size)} takes the first rows there are; where do a rank's own begin?"
    elif starts == [own.start // size for own in rows]:
        why = f"that is the offset divided by {size} once more; whose offset is rows.start already?"
    elif starts == [number * len(own) for number, own in enumerate(rows)]:
        why = "rank × len(rows) is the offset only where all ranks keep equally many rows"
    else:
        why = "which rows does `rows` name?"
    raise NotYet(f"{what}: " + _each_wrong(wrong, lambda r: (_span(found[r]), _span([*rows[r]]))) + f"\n{why}")


def _shaped(value, data: torch.Tensor, count: int, number: int, what: str) -> None:
    shape = [count, *data.shape[1:]]
    if not isinstance(value, torch.Tensor):
        raise NotYet(f"{what}: on rank {number} it returns {kind(value)}; a tensor {shape} must come back")
    if list(value.shape) == [len(data), count]:
        raise NotYet(f"{what}: on rank {number}, {list(value.shape)} comes back, a slice through every output: columns "
                     f"(dim 1) where rows (dim 0) are its own, {shape}")
    if list(value.shape) != shape or value.dtype != data.dtype:
        came, must = (list(value.shape), shape) if list(value.shape) != shape else (value.dtype, data.dtype)
        more = len(value) - count if value.dim() == data.dim() and value.shape[1:] == data.shape[1:] else 0
        says = {1: ", one row fewer: does a slice a:b, or a range, hold its end?",
                -1: ", one row more: a slice a:b ends before b"}
        raise NotYet(f"{what}: on rank {number}, {came} comes back; {must} must{says.get(more, '')}")


def _judge_merged(answers: list, parts: list[tuple[str, int]], ranges, columns: int, what: str, names: str,
                  dtype: torch.dtype) -> None:
    every = torch.cat([_numbered(total, columns, 1000 * number).to(dtype) for number, (_, total) in enumerate(parts)])
    found, wanted, wrong = [], [], []
    for number, (value, held) in enumerate(zip(answers, ranges)):
        _shaped(value, every, sum(map(len, held)), number, what)
        found.append(_places(value))
        wanted.append([1000 * n + row for n, rows in enumerate(held) for row in rows])
        wrong += [number] * (found[-1] != wanted[-1])
    if not wrong:
        return
    fused = [1000 * n + row for n, (_, total) in enumerate(parts) for row in range(total)]
    first = [[1000 * n + row for n, rows in enumerate(held) for row in range(len(rows))] for held in ranges]
    orders = [[[1000 * n + row for n in order for row in held[n]] for held in ranges]
              for order in permutations(range(len(parts)))]
    divided = [[1000 * n + row - rows.start + rows.start // len(ranges) for n, rows in enumerate(held) for row in rows]
               for held in ranges]
    if any(-1 in places for places in found):
        why = _NO_ROW
    elif found == first:
        why = f"every rank takes the first rows of each of {names}; which rows are its own?"
    elif found in orders:
        order = "|".join(parts[n][0] for n in [*permutations(range(len(parts)))][orders.index(found)])
        why = f"the right rows in the order {order}; the layer splits its output as {names}"
    elif found == [[fused[row] for rows in held for row in rows] for held in ranges]:
        why = f"a range counts the rows of its own source, and here all of them are taken from {names} as one"
    elif found == divided:
        why = f"the offsets are divided by {len(ranges)} once more; whose offset is rows.start already?"
    elif all(len(places) < 2 or _one_block(places, fused) for places in found):
        why = f"{names} is cut through as one block; which of them must each rank get a piece of?"
    else:
        why = f"each of {names} has rows of its own for each rank"

    def both(number):
        return tuple(_labelled(places[number], parts) for places in (found, wanted))
    raise NotYet(f"{what}: " + _each_wrong(wrong, both) + f"\n{why}")


def _one_block(places: list[int], fused: list[int]) -> bool:
    """Whether these rows follow each other in the fused matrix."""
    at = [fused.index(place) if place in fused else -1 for place in places]
    return all(a + 1 == b for a, b in zip(at, at[1:]))


def _judge_reading(answers: list, sources: Sequence[Sequence[ToySource]], what: str) -> None:
    for number, (value, given) in enumerate(zip(answers, sources)):
        read = sum(source.taken for source in given) // value.element_size()
        if read > value.numel():
            raise NotYet(f"{what}: the right rows, but rank {number} reads {read} numbers from the file to keep "
                         f"{value.numel()}: slice the source itself")


def _places(value: torch.Tensor) -> list[int]:
    """The numbers of the rows that a shard of `_numbered` holds; -1 for what is no such row."""
    first = value if value.dim() == 1 else value[:, 0]
    whole = first.round()
    rest = torch.zeros_like(value) if value.dim() == 1 else torch.arange(value.shape[1]) / 100
    good = ((value - (whole if value.dim() == 1 else whole[:, None] + rest)).abs() < 4e-3)
    good = good if value.dim() == 1 else good.all(1)
    return [int(place) if fine else -1 for place, fine in zip(whole.tolist(), good.tolist())]


def _each_wrong(wrong: list[int], both) -> str:
    return "; ".join(f"rank {number} has {' and should have '.join(both(number))}" for number in wrong)


def _span(rows: list[int]) -> str:
    if -1 in rows:
        return "what is no row of it"
    runs = [[row for _, row in run] for _, run in groupby(enumerate(rows), lambda pair: pair[1] - pair[0])]
    return "rows " + ", ".join(
        f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs[:4]) + " …" * (len(runs) > 4)


def _labelled(places: list[int], parts: list[tuple[str, int]]) -> str:
    runs = [(number, [place % 1000 for place in run]) for number, run in groupby(places, lambda place: place // 1000)]
    return "[" + "|".join(f"{parts[number][0]} {_span(run).removeprefix('rows ')}"
                          if 0 <= number < len(parts) else "?" for number, run in runs) + "]"

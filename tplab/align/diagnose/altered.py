"""What would each rank hold if an operation of the forward pass were altered?

A change says how: the parameters of the right operation that are others, or what comes out instead. The operation need
not be the guilty point's own: where the points between were not recorded, every one on the way may be the wrong one.
"""

import copy
import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from tplab.align.diagnose.case import Case
from tplab.align.local import LocalFrame
from tplab.align.points import POINTS, inputs, layout
from tplab.model.rope import Rotary

_TOGETHER = (("q", "k", "v"), ("k", "v"), ("q", "k"), ("q_norm", "k_norm"), ("q_rope", "k_rope"), ("gate", "up"))

IMPOSSIBLE = float("inf")  # in the place of what a mistake cannot give; NaN is what it does give
Change = Callable[["At"], "torch.Tensor | dict"]


@dataclass(frozen=True)
class At:
    """What one rank's operation sees: ``at("q")`` is this rank's q, as recorded, or by the operations before it."""

    case: Case
    rank: int
    frame: LocalFrame
    op: str

    @property
    def layer(self) -> str:
        """The layer as :class:`tplab.align.operations.Operations` wants it."""
        return f"{self.case.layer}." if self.case.layer else ""

    def full(self, point: str) -> str:
        """The canonical name of a point of the layer, or of ``"before"``."""
        return self.frame.before(self.layer) if point == "before" else self.layer + point

    def __call__(self, point: str) -> torch.Tensor:
        """``[rows, heads here, head_dim]`` at heads, ``[rows, columns here]`` otherwise; ``"before"`` is what went into
        the layer. The case's own point is what it should be by its operations."""
        of = self.frame.expected if point == self.case.point else self.frame.value
        return of(self.full(point), self.rank)

    def expected(self, point: str | None = None) -> torch.Tensor:
        """What a point's own operation, a right one, makes of what this rank had before it."""
        if point:
            return self.frame.make(self.full(point), self.rank)
        return self.case.expected(self.rank) if self.op == self.case.point else self.held()

    def make(self, point: str | None = None, **changed) -> torch.Tensor:
        """The same with some of its parameters changed."""
        return self.frame.make(self.full(point or self.op), self.rank, **changed)

    def given(self) -> torch.Tensor:
        """What goes into the operation."""
        return self.frame.given(self.layer, self.op, self.rank)

    def held(self) -> torch.Tensor:
        """What the rank holds at the operation's point."""
        return self.case.shard(self.op, self.rank)

    def nearest(self, ways: Iterable[dict]) -> torch.Tensor:
        """Of the operation with each of these parameters changed, what comes nearest to what the rank holds, row by
        row."""
        made = torch.stack([self.make(**way) for way in ways])
        far = (made - self.held()).abs().flatten(2).amax(2).nan_to_num(nan=IMPOSSIBLE)
        return made[far.argmin(0), torch.arange(made.shape[1])]

    def weight(self) -> torch.Tensor:
        """The norm's weight."""
        return self.frame.norm_weight(self.layer, self.op, self.rank)

    def matrix(self, point: str | None = None) -> torch.Tensor:
        """The weight behind a point, ``[out, in]``."""
        return self.frame.matrix(self.layer, point or self.op)

    def vector(self, point: str | None = None) -> torch.Tensor:
        """The bias behind a point; zeros where the model has none."""
        found = self.frame.vector(self.layer, point or self.op)
        return torch.zeros(len(self.matrix(point)), dtype=self.frame.dtype) if found is None else found

    def indices(self, point: str) -> Sequence[int]:
        """The global heads, columns or vocabulary rows that this rank holds at a point."""
        return self.frame.indices(self.full(point), self.rank)

    def features(self, point: str | None = None) -> torch.Tensor:
        """The rows of the weight (of a row-parallel one, the columns) that make this rank's part of a point."""
        return torch.tensor(self.frame.features(self.layer, point or self.op, self.rank), dtype=torch.long)

    def rotary(self, positions: torch.Tensor | None = None, **changed) -> dict[str, torch.Tensor]:
        """cos and sin, ``[1, rows, head_dim]``, of the checkpoint's RoPE with some of its parameters changed; at the
        positions of the case's rows if no others are given."""
        if not changed and positions is None:
            return dict(zip(("cos", "sin"), self.frame.cos_sin(self.layer)))
        config, kind = copy.copy(self.case.config.hf), self.frame.rope_type(self.layer)
        own = {**self.case.rope, **changed}
        config.rope_parameters = {**config.rope_parameters, kind[0]: own} if kind else own
        cos, sin = self.frame.tables(config, self.frame.positions, *kind) if positions is None else Rotary(config)(
            torch.empty(0, dtype=self.frame.dtype), positions, [len(positions)], *kind)
        return {"cos": cos, "sin": sin}


class AlteredFrame(LocalFrame):
    """A local frame in which some operations of one layer are others. What was recorded, and what is made of other
    values, stays as it is."""

    def __init__(self, case: Case, change: Change):
        vars(self).update(vars(case.frame))
        self.case, self.change = case, change
        others = {(f"{case.layer}.{op}".lstrip("."), rank) for op in case.ops if op != case.point
                  for rank in case.on or self.ranks}
        for key, made_of in self._made_of.items() if others else ():  # in the order in which they were made
            if not others.isdisjoint(made_of):
                others.add(key)
        self._values = {key: x for key, x in self._values.items() if key not in others}
        self._once, self._made_of, self._asked = ChainMap({}, self._once), {}, set()

    def expected(self, name: str, rank: int) -> torch.Tensor:
        layer, _, point = name.rpartition(".")
        case = self.case
        if layer != case.layer or point not in case.ops or rank not in (case.on or self.ranks):
            return super().expected(name, rank)
        at = At(case, rank, self, point)
        guess = self.change(at)
        guess = at.make(**guess) if isinstance(guess, dict) else guess
        if case.scope is None:
            return guess
        should = at.expected()
        if guess.shape != should.shape:
            return torch.full_like(should, IMPOSSIBLE)
        return torch.where(case.scope.view(-1, *[1] * (should.dim() - 1)), guess, should)


class OneRow(LocalFrame):
    """One row of an altered frame from attention on, which computes the row's sequence alone: where that is far off, no
    other row need be made."""

    def __init__(self, whole: AlteredFrame, row: int):
        vars(self).update(vars(whole))
        self.whole, self.row, self._values, self._made_of, self._once = whole, slice(row, row + 1), {}, {}, {}
        own = whole.rows_of[self.recording.places[row][0]]
        self.rows_of, self.among = [rows if rows == own else slice(0, 0) for rows in whole.rows_of], row - own.start

    def _value(self, name: str, rank: int) -> torch.Tensor:
        layer, _, point = name.rpartition(".")
        if point in POINTS["attn"].made_from:
            return self.whole.value(name, rank)
        if layer != self.case.layer or self.seen(name) or (name, rank) in self.whole._values:
            return self.whole.value(name, rank)[self.row]
        return self.expected(name, rank)

    def expected(self, name: str, rank: int) -> torch.Tensor:
        point, made = name.rpartition(".")[2], {}
        if point in self.case.ops and rank in (self.case.on or self.ranks):
            made = self.change(At(self.case, rank, self.whole, point)) if point == "attn" else None
        if not isinstance(made, dict):
            return self.whole.expected(name, rank)[self.row]
        return self.make(name, rank, **made)[self.among:][:1] if point == "attn" else self.make(name, rank)


def in_calls(case: Case, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], apart: bool = False
             ) -> torch.Tensor:
    """``change`` of the rows of each call, as the engine had them; ``apart``: of each sequence's."""
    out, sequences = x.clone(), torch.tensor([sequence for sequence, _ in case.places])
    for rows in case.calls:
        own = sequences[rows]
        for part in [rows[own == sequence] for sequence in own.unique()] if apart else [rows]:
            out[part] = change(x[part])
    return out


def unaltered(case: Case, rank: int) -> At:
    """What a rank's operations see where none of them is wrong."""
    return At(case, rank, case.frame, case.op)


def compound(case: Case) -> Iterator[tuple[str, ...]]:
    """The operations that may be wrong where the case's point is: each alone, then those together that one mistake
    would touch."""
    yield from ((op,) for op in case.way)
    yield from (some for some in _TOGETHER if set(some) <= set(case.way))


def sources(case: Case) -> list[str]:
    """The recorded points (or the input of the layer) from which the case's point is computed."""
    ops = {f"{case.layer}.{op}".lstrip(".") for op in case.way}
    found = (name for op in ops for name in inputs(op, case.config))
    return sorted({*found} - ops)


def explains(case: Case, change: Change) -> bool:
    """Whether every rank that is wrong holds at the case's point what ``change`` of ``case.ops`` gives."""
    return misfit(case, change) <= case.tolerance


def misfit(case: Case, change: Change, ranks: Sequence[int] | None = None) -> float:
    """How far what these ranks (those that are wrong) hold is from what a wrong operation gives, relative to its scale;
    infinite for NaN. What is further off than rounding is not measured to the end."""
    gaps = []
    for rank in case.wrong_ranks if ranks is None else ranks:
        gaps.append(gap(case, change, rank, roughly=True))
        if gaps[-1] > case.tolerance:
            break
    return max(gaps, default=IMPOSSIBLE)


def gap(case: Case, change: Change, rank: int, roughly: bool = False) -> float:
    """The same for one rank; ``roughly``: infinite where one row is further off than rounding."""
    key, apart = (change, case.ops, case.on, rank), case.scope is None or not _mixes_rows(case)
    known = case.known if apart else {}
    if roughly and (far := known.get((key, "far"))) is not None and case.shown[far]:
        return IMPOSSIBLE
    if key not in known:
        about = case.with_(scope=None) if apart and case.scope is not None else case
        frame = AlteredFrame(about, change)
        if roughly and (far := _far_off(case, frame, rank)) is not None:
            known[key, "far"] = far
            return IMPOSSIBLE
        known[key] = by_row(case.shard(case.point, rank), At(about, rank, frame, case.op)(case.point))
    found = torch.where(case.scope, known[key], right_by_row(case, rank)) if apart and case.scope is not None else (
        known[key])
    return _worst(found[:, case.rows])


def _far_off(case: Case, frame: AlteredFrame, rank: int) -> int | None:
    """The row that is most wrong, if what comes of a mistake is further from it than rounding; None also where a look
    at it would save nothing."""
    if layout(case.point) in ("partial", "vocab") or case.op == case.point != "attn" or not case.shown.any():
        return None
    held, row = case.shard(case.point, rank), int(right_by_row(case, rank)[0].masked_fill(~case.shown, -1).argmax())
    off, _ = by_row(held[row:row + 1], OneRow(frame, row).expected(case.first.name, rank))
    # The largest value of a guess that fits is the held tensor's but for rounding.
    return row if off[0] * (1 - case.tolerance) > case.tolerance * held[~case.lost].abs().max() else None


def _mixes_rows(case: Case) -> bool:
    """Whether a row of the case's point is made of other rows of ``case.ops``: as attention's are, of keys and values
    that were not recorded. (What the bias of a row-parallel product is taken for depends on all rows, too.)"""
    return case.op != case.point and (layout(case.point) == "partial" or "attn" in case.way and any(
        op == "input_norm" or layout(op) == "kv_heads" for op in case.ops))


def right_by_row(case: Case, rank: int) -> torch.Tensor:
    """The same as :func:`by_row`, of what a rank holds and should hold."""
    return case.once(("right", rank), lambda: by_row(case.shard(case.point, rank), case.expected(rank)))


def by_row(held: torch.Tensor, guess: torch.Tensor) -> torch.Tensor:
    """For each row the largest difference and the guess's largest value, ``[2, rows]``. The difference is NaN in rows
    that are NaN in both, and infinite where the two have other shapes or anything else is not finite."""
    if held.shape != guess.shape or not guess.numel():
        return torch.tensor([[float("inf")], [0.0]]).expand(2, len(held)).double()
    held, guess = held.double().flatten(1), guess.double().flatten(1)
    found = torch.stack([(held - guess).abs().amax(1), guess.abs().amax(1)])
    if not found.isfinite().all():
        odd, silent = ~found.isfinite().all(0), held.isnan().all(1) & guess.isnan().all(1)
        found[0, odd], found[1, odd] = float("inf"), 0
        found[0, silent] = float("nan")
    return found


def _worst(found: torch.Tensor) -> float:
    """The largest difference relative to the guess's scale, of :func:`by_row`'s rows; infinite if none says anything.
    """
    off, scale = found.amax(1).tolist() if found.numel() else (IMPOSSIBLE, 1.0)
    return off / max(scale, 1e-30) if off == off else _worst(found[:, ~found[0].isnan()])


def distance(held: torch.Tensor, guess: torch.Tensor) -> float:
    """The largest difference relative to the guess's scale. Rows that are NaN in both say nothing. Infinite where the
    two have other shapes or no other row is left, or where anything else is not finite."""
    return _worst(by_row(held, guess))


def fitted(case: Case, family: Callable[[float], Change], low: float, high: float) -> float | None:
    """The number between ``low`` and ``high`` for which ``family(number)`` explains the point; None if none does."""
    @cache
    def far(log: float) -> float:
        return gap(case, family(10 ** log), case.wrong_ranks[0])

    grid = torch.linspace(math.log10(low), math.log10(high), 49, dtype=torch.float64).tolist()
    best, step = min(grid, key=far), grid[1] - grid[0]
    # Near the right number the gap falls in proportion to the distance; where it does not, there is none.
    slope = 4 * max(far(best - step), far(best + step)) / step
    while step > 1e-7 and far(best) <= case.tolerance + slope * step:
        step /= 2
        best = min((best - step, best, best + step), key=far)
    return 10 ** best if misfit(case, family(10 ** best)) <= case.tolerance else None


def coarser(case: Case) -> dict[torch.dtype, str]:
    """The dtypes that have clearly fewer digits than the run's, and their names."""
    return {dtype: str(dtype).removeprefix("torch.") for dtype in (torch.bfloat16, torch.float16)
            if torch.finfo(dtype).eps > 1000 * torch.finfo(case.report.dtype).eps}


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor with the digits of a smaller dtype."""
    return tensor.to(dtype).to(tensor.dtype)


def ratio(ours: torch.Tensor, right: torch.Tensor) -> float:
    """The number that makes ``right`` times it come nearest to ``ours``."""
    ours, right = ours.double(), right.double()
    return ((ours * right).sum() / (right * right).sum().clamp(min=1e-30)).item()


def multiple(case: Case) -> float:
    """By how much the first wrong rank's tensor is the right one."""
    at = unaltered(case, case.wrong_ranks[0])
    return ratio(*map(case.looked_at, (at.held(), at.expected())))


def likeness(a: torch.Tensor, b: torch.Tensor) -> float:
    """How alike two tensors are, whatever their sizes: their correlation, if their means are 0."""
    return ((a * b).sum() / (a.norm() * b.norm()).clamp(min=1e-30)).item()


def module(case: Case) -> str:
    """The checkpoint's modules behind the ops that are taken for wrong."""
    return " and ".join(POINTS[op].module for op in case.ops)


def has_bias(case: Case, op: str) -> bool:
    """Whether the checkpoint has a bias behind a point."""
    return unaltered(case, 0).frame.vector(unaltered(case, 0).layer, op) is not None


def several_ranks(case: Case) -> bool:
    """Whether there is more than one."""
    return case.recording.world_size > 1

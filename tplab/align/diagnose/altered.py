"""What would each rank hold if an operation of the forward pass were altered?

A change says how: the parameters of the right operation that are others, or what comes out instead. The operation need
not be the guilty point's own: where the points between were not recorded, every one on the way may be the wrong one.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from tplab.align.diagnose.case import Case
from tplab.align.local import LocalFrame
from tplab.align.points import POINTS, inputs
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
        return self.frame.make(self.full(point or self.op), self.rank)

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
        """Of the operation with each of these parameters changed, what comes nearest to what the rank holds."""
        held = self.case.looked_at(self.held())
        return min((self.make(**way) for way in ways), key=lambda made: distance(held, self.case.looked_at(made)))

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
        config, kind = copy.deepcopy(self.case.config.hf), self.frame.rope_type(self.layer)
        own = {**self.case.rope, **changed}
        config.rope_parameters = {**config.rope_parameters, kind[0]: own} if kind else own
        cos, sin = self.frame.tables(config, self.frame.positions, *kind) if positions is None else Rotary(config)(
            torch.empty(0, dtype=self.frame.dtype), positions, [len(positions)], *kind)
        return {"cos": cos, "sin": sin}


class AlteredFrame(LocalFrame):
    """A local frame in which some operations of one layer are others. What was recorded stays as it is."""

    def __init__(self, case: Case, change: Change):
        vars(self).update(vars(case.frame))
        self.case, self.change, self._once = case, change, {}
        self._values = {key: x for key, x in self._values.items() if key[0] in self.recording.points
                        or not key[0].startswith(f"{case.layer}.")}

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
        should = super().expected(name, rank)
        if guess.shape != should.shape:
            return torch.full_like(should, IMPOSSIBLE)
        rows = case.scope if point != "logits" or len(case.scope) == len(should) else case.scope[self.logit_rows]
        return torch.where(rows.view(-1, *[1] * (should.dim() - 1)), guess, should)


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
    """The operations that may be wrong where the case's point is: its own, and those whose points were not recorded;
    each alone, then those together that one mistake would touch."""
    ops, unseen = [case.point], [case.first.name]
    while unseen:
        for name in inputs(unseen.pop(), case.config):
            layer, _, point = name.rpartition(".")
            if layer == case.layer and point not in ops and not case.has(point):
                ops.append(point)
                unseen.append(name)
    yield from ((op,) for op in ops)
    yield from (some for some in _TOGETHER if set(some) <= set(ops))


def sources(case: Case) -> list[str]:
    """The recorded points (or the input of the layer) from which the case's point is computed."""
    ops = {f"{case.layer}.{op}".lstrip(".") for op, *more in compound(case) if not more}
    found = (name for op in ops for name in inputs(op, case.config))
    return sorted({*found} - ops)


def explains(case: Case, change: Change) -> bool:
    """Whether every rank that is wrong holds at the case's point what ``change`` of ``case.ops`` gives."""
    return misfit(case, change) <= case.tolerance


def misfit(case: Case, change: Change, ranks: Sequence[int] | None = None) -> float:
    """How far what these ranks (those that are wrong) hold is from what a wrong operation gives, relative to its scale;
    infinite for NaN."""
    frame, gaps = AlteredFrame(case, change), []
    for rank in case.wrong_ranks if ranks is None else ranks:
        held, guess = case.shard(case.point, rank), At(case, rank, frame, case.op)(case.point)
        rows = case.all_or(case.compared) & ~case.lost
        if len(held) == len(guess) == len(rows) and not rows.all():
            held, guess = held[rows], guess[rows]
        gaps.append(distance(held, guess))
        if gaps[-1] > 1:
            break  # far off: the other ranks cannot make it better
    return max(gaps, default=float("inf"))


def distance(held: torch.Tensor, guess: torch.Tensor) -> float:
    """The largest difference relative to the guess's scale. Rows that are NaN in both say nothing. Infinite where the
    two have other shapes or no other row is left, or where anything else is not finite."""
    lost = guess.flatten(1).isnan().all(1)
    if held.shape != guess.shape or lost.all() or not held[lost].isnan().all():
        return float("inf")
    held, guess = (x.double() if not lost.any() else x[~lost].double() for x in (held, guess))
    if not (torch.isfinite(held).all() and torch.isfinite(guess).all()):
        return float("inf")
    return (held - guess).abs().max().item() / max(guess.abs().max().item(), 1e-30)


def fitted(case: Case, family: Callable[[float], Change], low: float, high: float) -> float | None:
    """The number between ``low`` and ``high`` for which ``family(number)`` explains the point; None if none does."""
    @cache
    def gap(log: float) -> float:
        return misfit(case, family(10 ** log), case.wrong_ranks[:1])

    grid = torch.linspace(math.log10(low), math.log10(high), 49, dtype=torch.float64).tolist()
    best, step = min(grid, key=gap), grid[1] - grid[0]
    # Near the right number the gap falls in proportion to the distance; where it does not, there is none.
    slope = 4 * max(gap(best - step), gap(best + step)) / step
    while step > 1e-7 and gap(best) <= case.tolerance + slope * step:
        step /= 2
        best = min((best - step, best, best + step), key=gap)
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

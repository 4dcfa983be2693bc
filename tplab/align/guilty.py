"""Tells wrong modules from modules with wrong inputs: every recorded point against a replay."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tplab.align.floors import LOCAL, SHORT, TIMES
from tplab.align.points import inputs, point_names
from tplab.align.recording import Recording
from tplab.align.replay import Replay
from tplab.checkpoint import Checkpoint
from tplab.shard import ShardPlan


@dataclass(frozen=True)
class LocalDiff:
    """One recorded point against its expected value from the engine's values before it."""

    name: str
    relative: float  # on the worst rank: the largest difference, relative to the row's largest value
    rank: int  # the worst one
    tolerance: float  # there
    guilty: tuple[int, ...]  # the ranks on which rounding does not explain the difference
    unknown: bool = False  # all expected values are NaN or infinity
    perhaps_from: str = ""  # a guilty point before it that was computed from the same unrecorded points

    @property
    def inside(self) -> bool:
        return not self.guilty


def by_row(held: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The difference of each row relative to the row's largest value in ``right``, ``[rows]``. NaN says nothing where
    ``right`` has it; where ``held`` alone has it, the row is infinitely far."""
    held, right = held.to(right.dtype).flatten(1), right.flatten(1)
    known = right.isfinite()
    gap = (held - right).abs().masked_fill(~known, 0).nan_to_num(nan=float("inf"), posinf=float("inf"))
    scale = right.abs().masked_fill(~known, 0).amax(1)
    return gap.amax(1) / scale.clamp(min=max(1e-4 * scale.max().item(), 1e-30))


class Judge(Replay):
    """Every recorded point's :class:`LocalDiff`, in the order of the forward pass."""

    def __init__(self, recording: Recording, ckpt: Checkpoint, plan: ShardPlan):
        super().__init__(recording, ckpt, plan)
        self.unexplained: set[str] = set()  # short names of points that nothing explained
        self.rights: dict[tuple[str, int], torch.Tensor] = {}  # what ranks should hold at guilty points
        self._suspects: dict[str, str] = {}  # unrecorded points → the first guilty one computed from them

    def expected(self, name: str, of: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What a rank should hold at a point."""
        if dtype is None and (name, of) in self.rights:
            return self.rights[name, of]
        return self.made(name, (), dtype)[of][name]

    def tolerance(self, name: str, of: int) -> float:
        """The difference that rounding explains at a point, relative to the row's scale."""
        if self.recording.dtype not in SHORT:
            return LOCAL[self.recording.dtype]
        off = by_row(self.expected(name, of, self.recording.dtype), self.expected(name, of))
        return max(LOCAL[self.recording.dtype], TIMES * off.max().item())

    def diffs(self) -> dict[str, LocalDiff]:
        """All verdicts. Raises CheckpointError if the checkpoint's files are no longer those that were opened."""
        self.ckpt.check_unchanged()
        return {name: self.diff(name) for name in recorded_points(self.recording, self.ckpt)}

    @torch.inference_mode()
    def diff(self, name: str) -> LocalDiff:
        """The verdict on one recorded point."""
        found, says = [], False
        for of in self.ranks:
            if self.recording.points[name][of] is not None and (held := self.held(name, of)) is not None:
                right = self.expected(name, of)
                off = by_row(held, right).max().item() if right.numel() else 0.0
                least = LOCAL[self.recording.dtype]
                found.append((off, of, least if off <= least else self.tolerance(name, of)))
                says = says or bool(right.isfinite().any())
        if not found:
            return LocalDiff(name, 0.0, 0, 1.0, ())
        off, of, tolerance = max(found, key=lambda one: one[0] / one[2])
        diff = LocalDiff(name, off, of, tolerance, tuple(r for o, r, t in found if not o <= t), not says)
        if diff.guilty:
            self.rights |= {(name, of): self.expected(name, of) for _, of, _ in found}
            unseen = unseen_before(name, self.recording, self.ckpt)
            diff = replace(diff, perhaps_from=next((self._suspects[p] for p in unseen if p in self._suspects), ""))
            self._suspects.update(dict.fromkeys(unseen, diff.perhaps_from or name))
        return diff


def recorded_points(recording: Recording, ckpt: Checkpoint) -> Iterator[str]:
    """The points that any rank recorded, in the order of the forward pass; each is read when its turn comes."""
    names = point_names(ckpt.config, gate_up=True)
    return (name for name in names if any(recording.points.get(name, ())))


def unseen_before(name: str, recording: Recording, ckpt: Checkpoint) -> set[str]:
    """The points that were not recorded and from which ``name`` was computed nevertheless."""
    found, todo = set(), [name]
    while todo:
        for point in inputs(todo.pop(), ckpt.config):
            if point not in found and not any(recording.points.get(point, ())):
                found.add(point)
                todo.append(point)
    return found

"""Tells wrong modules from modules with wrong inputs: every recorded point against a replay."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tplab.align.floors import LOCAL, SHORT, TIMES
from tplab.align.points import inputs, layout, point_names
from tplab.align.recording import Recording
from tplab.align.replay import Replay
from tplab.checkpoint import Checkpoint
from tplab.faults import MUSEUM, Fault
from tplab.faults.probes import Probe, probes
from tplab.shard import ShardPlan

NO_NUMBERS = ("load", "steps", "blocks", "drawn", "error")  # first points of faults that no tensor shows


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
    """The difference of each row relative to the row's largest value in ``right``, ``[rows]``. NaN and infinity in
    ``right`` say nothing; where ``held`` alone has them, the row is infinitely far."""
    held, right = held.to(right.dtype).flatten(1), right.flatten(1)
    known = right.isfinite()
    gap = (held - right).abs().masked_fill(~known, 0).nan_to_num(nan=float("inf"), posinf=float("inf"))
    scale = right.abs().masked_fill(~known, 0).amax(1)
    return gap.amax(1) / scale.clamp(min=max(1e-4 * scale.max().item(), 1e-30))


class Judge(Replay):
    """Every recorded point's :class:`LocalDiff`, in the order of the forward pass; one for all questions about a run.
    """

    def __init__(self, recording: Recording, ckpt: Checkpoint, plan: ShardPlan):
        super().__init__(recording, ckpt, plan)
        self.unexplained: set[str] = set()  # short names of points that nothing explained
        self._expected: dict[tuple[str, int], torch.Tensor] = {}  # of guilty points
        self._suspects: dict[str, str] = {}  # unrecorded points → the first guilty one computed from them

    @cached_property
    def bugs(self) -> list[Fault | Probe]:
        """Every bug that can show in this model's numbers: the museum's, then the probes."""
        faults = [fault for fault in MUSEUM.values() if fault.first_point not in NO_NUMBERS
                  and fault.applies_to(self.config, len(self.ranks))]
        return [*faults, *probes(self.config)]

    def expected(self, name: str, rank: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What a rank should hold at a point, ``[rows, …]``."""
        if dtype is None and (name, rank) in self._expected:
            return self._expected[name, rank]
        return self.made(name, dtype)[rank][name]

    def tolerance(self, name: str, rank: int) -> float:
        """The difference that rounding explains at a point, relative to the row's scale."""
        if self.recording.dtype not in SHORT:
            return LOCAL[self.recording.dtype]
        rounded = by_row(self.expected(name, rank, self.recording.dtype), self.expected(name, rank))
        return max(LOCAL[self.recording.dtype], TIMES * rounded.max().item())

    def diffs(self) -> dict[str, LocalDiff]:
        """All verdicts."""
        return {name: self.diff(name) for name in recorded_points(self.recording, self.ckpt)}

    def judged_ranks(self, name: str) -> list[int]:
        """The ranks that recorded their share of a point."""
        shards = self.recording.points[name]
        return [rank for rank in self.stage(name) if shards[rank] is not None and self.held(name, rank) is not None]

    @torch.inference_mode()
    def diff(self, name: str) -> LocalDiff:
        """The verdict on one recorded point."""
        gaps, known, least = [], False, LOCAL[self.recording.dtype]
        for rank in self.judged_ranks(name):
            right = self.expected(name, rank)
            gap = by_row(self.held(name, rank), right).max().item() if right.numel() else 0.0
            gaps.append((gap, rank, least if gap <= least else self.tolerance(name, rank)))
            known = known or bool(right.isfinite().any())
        if not gaps:
            return LocalDiff(name, 0.0, 0, 1.0, ())
        gap, worst, tolerance = max(gaps, key=lambda each: each[0] / each[2])
        guilty = tuple(r for g, r, t in gaps if not g <= t)
        if guilty and layout(name) == "partial" and self._whole_is_right(name):
            guilty = ()
        diff = LocalDiff(name, gap, worst, tolerance, guilty, not known)
        if guilty:
            self._expected |= {(name, rank): self.expected(name, rank) for _, rank, _ in gaps}
            unseen = unseen_before(name, self.recording, self.ckpt)
            diff = replace(diff, perhaps_from=next((self._suspects[p] for p in unseen if p in self._suspects), ""))
            self._suspects.update(dict.fromkeys(unseen, diff.perhaps_from or name))
        return diff

    def _whole_is_right(self, name: str) -> bool:
        """Whether the summands of all ranks, which differ by what each adds to every row (a share of the bias), add up
        to the right sum."""
        stage = self.stage(name)
        if not len(self.judged_ranks(name)) == len(stage) > 1:
            return False
        off = [self.held(name, rank).to(self.exact) - self.expected(name, rank) for rank in stage]
        right = sum(self.expected(name, rank) for rank in stage)
        limit = self.tolerance(name, stage[0])
        return bool((by_row(right + sum(off), right) <= limit).all()) and all(
            bool((by_row(each - each[:1] + right, right) <= limit).all()) for each in off)


def recorded_points(recording: Recording, ckpt: Checkpoint) -> Iterator[str]:
    """The points that any rank recorded, in the order of the forward pass; each is read when its turn comes."""
    names = point_names(ckpt.config, gate_up=True)
    return (name for name in names if any(recording.points.get(name, ())))


def unseen_before(name: str, recording: Recording, ckpt: Checkpoint) -> set[str]:
    """The points that were not recorded and from which ``name`` was computed nevertheless."""
    unseen, todo = set(), [name]
    while todo:
        for point in inputs(todo.pop(), ckpt.config):
            if point not in unseen and not any(recording.points.get(point, ())):
                unseen.add(point)
                todo.append(point)
    return unseen

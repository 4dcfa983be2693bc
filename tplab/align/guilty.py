"""Tells wrong modules from modules with wrong inputs: every recorded point against the local frame."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tplab.align.arithmetic import distance
from tplab.align.floors import LOCAL, SHORT, TIMES
from tplab.align.local import LocalFrame
from tplab.align.points import inputs, point_names
from tplab.align.recording import Recording
from tplab.checkpoint import Checkpoint
from tplab.shard import ShardPlan

CLEAR = 0.25  # of the tolerance: below it, an expected value in float32 decides


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


class Judge:
    """Every recorded point's :class:`LocalDiff`, in the order of the forward pass.

    It has the local frame of a recording in several precisions, each made on demand. Points of a float32 run are judged
    in float32, and near the tolerance again in float64; those of bfloat16 and float16 runs in float32. The frame in the
    run's own dtype shows the size of its rounding.
    """

    def __init__(self, recording: Recording, ckpt: Checkpoint, plan: ShardPlan):
        self.recording, self.ckpt, self.plan = recording, ckpt, plan
        self.exact = torch.float32 if recording.dtype in SHORT else torch.float64
        self.layer, self._frames = 0, {}
        self._suspects: dict[str, str] = {}  # unrecorded points → the first guilty one computed from them

    def frame_in(self, dtype: torch.dtype) -> LocalFrame:
        """The frame in this precision, at the layer that was entered last."""
        frame, layer = self._frames.get(dtype, (None, None))
        if layer != self.layer:
            frame = frame or LocalFrame(self.recording, self.ckpt, self.plan, dtype)
            frame.enter(self.layer)
            self._frames[dtype] = frame, self.layer
        return frame

    @property
    def frame(self) -> LocalFrame:
        """The most exact one."""
        return self.frame_in(self.exact)

    def enter(self, name: str) -> None:
        """Go on to the layer of a point; the embedding belongs to the first, the end of the model is one more."""
        at, _, point = name.rpartition(".")
        self.layer = int(at.split(".")[1]) if at else 0 if point == "embed" else self.ckpt.config.num_layers

    def tolerance(self, name: str, rank: int, needed: float = float("inf")) -> float:
        """The difference that rounding explains at a point, relative to the row's scale. The module's rounding is
        measured only where ``needed`` is more than what is always allowed."""
        least = LOCAL[self.recording.dtype]
        if needed <= least:
            return least
        rounded = self.frame_in(self.recording.dtype).expected(name, rank)
        return max(least, TIMES * distance(rounded, self.frame.expected(name, rank)))

    def _off(self, name: str, rank: int, tensor: torch.Tensor, known: list) -> tuple[float, bool]:
        """A point's difference on a rank, and whether any expected value is a number. ``known``: the same for earlier
        pairs of tensors, since ranks may share an object."""
        for dtype in dict.fromkeys((self.recording.dtype, self.exact)):
            if dtype is self.exact or dtype is torch.float32:
                right = self.frame_in(dtype).expected(name, rank)
                found = next((found for *pair, found in known if pair[0] is tensor and pair[1] is right), None)
                if found is None:
                    found = distance(tensor, right), _says_something(right)
                    known.append((tensor, right, found))
                if found[0] <= CLEAR * LOCAL[self.recording.dtype]:
                    break
        return found

    @torch.inference_mode()
    def diff(self, name: str) -> LocalDiff:
        """The verdict on one recorded point."""
        diff = self._measured(name)
        if diff.guilty:
            unseen = unseen_before(name, self.recording, self.ckpt)
            diff = replace(diff, perhaps_from=next((self._suspects[p] for p in unseen if p in self._suspects), ""))
            self._suspects.update(dict.fromkeys(unseen, diff.perhaps_from or name))
        return diff

    def _measured(self, name: str) -> LocalDiff:
        self.enter(name)
        found, seen, known = [], False, []
        for rank, shard in enumerate(self.recording.points[name]):
            if shard is not None:
                off, says = self._off(name, rank, shard.tensor, known)
                found.append((off, rank, self.tolerance(name, rank, off)))
                seen = seen or says
        off, rank, tolerance = max(found, key=lambda one: one[0] / one[2])
        return LocalDiff(name, off, rank, tolerance, tuple(r for o, r, t in found if not o <= t), not seen)


def _says_something(right: torch.Tensor) -> bool:
    """Whether any value is a number; mostly the first row has one, which saves a look at the others."""
    return bool(torch.isfinite(right[:1]).any() or torch.isfinite(right).any())


def local_diffs(recording: Recording, ckpt: Checkpoint, plan: ShardPlan) -> dict[str, LocalDiff]:
    """Every recorded point's :class:`LocalDiff`, in the order of the forward pass."""
    judge = Judge(recording, ckpt, plan)
    return {name: judge.diff(name) for name in recorded_points(recording, ckpt)}


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

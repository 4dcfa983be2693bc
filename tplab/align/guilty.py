"""Which modules are wrong, and which only got wrong inputs? Every recorded point against the local frame."""

from dataclasses import dataclass
from functools import cached_property

import torch

from tplab.align.arithmetic import distance
from tplab.align.floors import LOCAL, SHORT, TIMES
from tplab.align.local import LocalFrame
from tplab.align.points import point_names
from tplab.align.recording import Recording
from tplab.checkpoint import Checkpoint
from tplab.shard import ShardPlan


@dataclass(frozen=True)
class LocalDiff:
    """One point, as recorded, against what it should be given what the engine had before it."""

    name: str
    relative: float  # on the worst rank: the largest difference, relative to the row's largest value
    rank: int  # the worst one
    tolerance: float  # there
    guilty: tuple[int, ...]  # the ranks on which rounding does not explain the difference
    unknown: bool = False  # nothing to compare with: NaN or infinity came in everywhere

    @property
    def inside(self) -> bool:
        return not self.guilty


class Judge:
    """The local frame of a recording, and beside it the same in the run's own dtype, for the size of its rounding."""

    def __init__(self, recording: Recording, ckpt: Checkpoint, plan: ShardPlan):
        self.recording, self.ckpt, self.plan = recording, ckpt, plan
        exact = torch.float32 if recording.dtype in SHORT else torch.float64
        self.frame = LocalFrame(recording, ckpt, plan, exact)
        self.layer = -1

    @cached_property
    def rounded(self) -> LocalFrame:
        """Hugging Face's own rounding, from the same inputs."""
        return LocalFrame(self.recording, self.ckpt, self.plan, self.recording.dtype)

    def enter(self, name: str) -> None:
        """Go on to the layer of a point."""
        layer = self.layer_of(name)
        if layer != self.layer:
            self.frame.enter(layer)
            if "rounded" in vars(self):
                del self.rounded
            self.layer = layer

    def layer_of(self, name: str) -> int:
        """The number of a point's layer; the embedding counts to the first, the end of the model is one more."""
        at, _, point = name.rpartition(".")
        return int(at.split(".")[1]) if at else 0 if point == "embed" else self.ckpt.config.num_layers

    def tolerance(self, name: str, rank: int, needed: float = float("inf")) -> float:
        """How much of a difference rounding explains at a point, relative to the row's scale. The module's rounding is
        measured only where ``needed`` is more than what is always allowed."""
        least = LOCAL[self.recording.dtype]
        if needed <= least:
            return least
        if "rounded" not in vars(self):
            self.rounded.enter(self.layer)
        measured = distance(self.rounded.expected(name, rank), self.frame.expected(name, rank))
        return max(least, TIMES * measured)

    def diff(self, name: str) -> LocalDiff:
        """The verdict on one recorded point."""
        self.enter(name)
        found, seen = [], False
        for rank, shard in enumerate(self.recording.points[name]):
            if shard is None:
                continue
            right = self.frame.expected(name, rank)
            seen = seen or bool(torch.isfinite(right).any())
            off = distance(shard.tensor, right)
            found.append((off, rank, self.tolerance(name, rank, off)))
        off, rank, tolerance = max(found, key=lambda one: one[0] / one[2])
        return LocalDiff(name, off, rank, tolerance, tuple(r for o, r, t in found if not o <= t), not seen)


def local_diffs(recording: Recording, ckpt: Checkpoint, plan: ShardPlan) -> dict[str, LocalDiff]:
    """Every recorded point's :class:`LocalDiff`, in the order of the forward pass.

    Raises CheckpointError if the checkpoint's files are no longer those that were opened.
    """
    names = point_names(ckpt.config.num_layers, ckpt.config.qk_norm, gate_up=True)
    ckpt.check_unchanged()
    judge = Judge(recording, ckpt, plan)
    with torch.inference_mode():
        return {name: judge.diff(name) for name in names if any(recording.points.get(name, ()))}

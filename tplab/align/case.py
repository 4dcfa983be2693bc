"""What the hypotheses of the diagnosis look at: the tensors around the first divergence, and how well a guess fits."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from tplab.align.report import AlignReport
from tplab.checkpoint import open_checkpoint
from tplab.model import separate_tensor


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong, as far as the numbers tell.

    Attributes:
        fault: the museum's name for it; None if nothing is wrong or no hypothesis fits.
        sentence: the same in words, with the evidence.
        point: the trace point at which it was first seen; None if nothing is wrong.
        numbers: the evidence by name.
        lookalikes: other faults of the museum that leave exactly the same numbers.
    """

    fault: str | None
    sentence: str
    point: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    lookalikes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return self.point is None

    @property
    def names(self) -> tuple[str, ...]:
        """The fault and those that cannot be told from it by numbers."""
        return (self.fault, *self.lookalikes) if self.fault else ()

    def __str__(self) -> str:
        return self.sentence


class Case:
    """A broken run: the report, and its tensors by short name (``"q_rope"``, ``"embed"``) in the first broken layer.

    ``at`` is the short name of the first divergent point. Every point before it is right, so ``right("q")`` can be
    computed with; ``ours(at)`` is what has to be explained.
    """

    def __init__(self, report: AlignReport):
        self.report, self.plan = report, report.plan
        self.first = report.first_divergence
        self.layer, _, self.at = self.first.name.rpartition(".")
        self.lengths = [len(row) for row in report.ids]

    def _evidence(self, what: str):
        return self.report.evidence.get(f"{self.layer}.{what}" if self.layer else what)

    def ours(self, what: str) -> torch.Tensor:
        """tplab's tensor, whole."""
        return self._evidence(what).ours

    def right(self, what: str) -> torch.Tensor:
        """Hugging Face's tensor."""
        return self._evidence(what).reference

    def shards(self, what: str) -> list[torch.Tensor]:
        """What each rank held."""
        return self._evidence(what).shards

    @cached_property
    def checkpoint(self):
        return open_checkpoint(self.report.model)

    @property
    def config(self):
        return self.checkpoint.config

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint in the run's dtype; names inside the layer may be given without its prefix."""
        full = f"model.{self.layer}.{name}" if self.layer and not name.startswith(("model.", "lm_head.")) else name
        with self.checkpoint.reader() as reader:
            return separate_tensor(self.checkpoint, reader, full).to(self.report.dtype)

    @cached_property
    def positions(self) -> torch.Tensor:
        """The absolute position of every flattened token."""
        rows = self.report.computed or [range(length) for length in self.lengths]
        return torch.tensor([position for positions in rows for position in positions])

    def gap(self, tensor: torch.Tensor, guess: torch.Tensor) -> float:
        """How far ``tensor`` is from ``guess``, relative to the guess's scale; infinite if either is not finite."""
        if tensor.shape != guess.shape or not (torch.isfinite(tensor).all() and torch.isfinite(guess).all()):
            return float("inf")
        return (tensor.double() - guess.double()).abs().max().item() / max(guess.double().abs().max().item(), 1e-30)

    def fits(self, tensor: torch.Tensor, guess: torch.Tensor) -> bool:
        """Whether rounding explains the rest, when ``tensor`` is taken for ``guess``."""
        return self.gap(tensor, guess) <= 3 * self.report.floor

    def found(self, fault: str | None, sentence: str, *lookalikes: str, **numbers: float) -> Diagnosis:
        """A diagnosis at this case's point."""
        return Diagnosis(fault, sentence, self.first.name, numbers, lookalikes)

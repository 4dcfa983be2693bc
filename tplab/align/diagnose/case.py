"""What the hypotheses of the diagnosis look at: the tensors around the first divergence, and how well a guess fits."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from tplab.align.reference import hf_model, hf_trace
from tplab.align.report import AlignReport
from tplab.checkpoint.layout import read_part, tensor_parts


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
        # Which positions of each prompt the rows of the tensors stand for: all, unless the decode path was aligned.
        self.rows = report.computed or [list(range(len(row))) for row in report.ids]
        self.lengths = [len(row) for row in self.rows]

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

    @property
    def checkpoint(self):
        return self.report.checkpoint

    @property
    def config(self):
        return self.checkpoint.config

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint in the run's dtype; names inside the layer may be given without its prefix."""
        full = f"model.{self.layer}.{name}" if self.layer and not name.startswith(("model.", "lm_head.")) else name
        with self.checkpoint.reader() as reader:
            part = tensor_parts(self.config, self.checkpoint.tensors)[full]
            return read_part(part, reader).to(self.report.dtype)

    @cached_property
    def positions(self) -> torch.Tensor:
        """The absolute position of every flattened token."""
        return torch.tensor([position for positions in self.rows for position in positions])

    @cached_property
    def ids(self) -> torch.Tensor:
        """The token id of every flattened token."""
        return torch.tensor([text[position] for text, positions in zip(self.report.ids, self.rows)
                             for position in positions])

    def keys_there(self, prompt: int) -> torch.Tensor:
        """For each row of a prompt, how many of its keys existed when the row was computed: all of a plain pass's, the
        tokens up to the end of its step along the decode path."""
        if self.report.decode is None:
            return torch.full((self.lengths[prompt],), self.lengths[prompt])
        ends = {}
        for step in self.report.decode.steps:
            for number, segment in ((s.number, s.segment) for s in step.sequences):
                if number == prompt:
                    end = segment.start + segment.count
                    ends.update(dict.fromkeys(range(segment.start, end), end))
        return torch.tensor([ends[position] for position in self.rows[prompt]])

    @cached_property
    def _whole_traces(self) -> list[dict[str, torch.Tensor]]:
        model = hf_model(self.checkpoint, self.report.dtype)
        keep = {f"{self.layer}.{what}" for what in ("q_rope", "k_rope", "v")}
        return [{name: trace[name] for name in keep} for trace in (hf_trace(model, text) for text in self.report.ids)]

    def whole(self, prompt: int, what: str) -> torch.Tensor:
        """Hugging Face's tensor for *all* tokens of one prompt, in the first broken layer; those included that tplab
        found in its cache instead of computing them."""
        return self._whole_traces[prompt][f"{self.layer}.{what}"]

    def gap(self, tensor: torch.Tensor, guess: torch.Tensor) -> float:
        """How far ``tensor`` is from ``guess``, relative to the guess's scale; infinite if either is not finite."""
        if tensor.shape != guess.shape or not (torch.isfinite(tensor).all() and torch.isfinite(guess).all()):
            return float("inf")
        return (tensor.double() - guess.double()).abs().max().item() / max(guess.double().abs().max().item(), 1e-30)

    @property
    def tolerance(self) -> float:
        """How far from a guess, relative to its scale, rounding can put what was computed from right tensors.
        (bfloat16's
        floor is what thirty layers add up to; one step has a small part of it, and a guess must not fit everything.)"""
        return min(3 * self.report.floor, 0.05)

    def fits(self, tensor: torch.Tensor, guess: torch.Tensor) -> bool:
        """Whether rounding explains the rest, when ``tensor`` is taken for ``guess``."""
        return self.gap(tensor, guess) <= self.tolerance

    def found(self, fault: str | None, sentence: str, *lookalikes: str, **numbers: float) -> Diagnosis:
        """A diagnosis at this case's point."""
        return Diagnosis(fault, sentence, self.first.name, numbers, lookalikes)

"""What the hypotheses of the diagnosis look at: the tensors around the first divergence, and how well a guess fits."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from tplab.align.reference import hf_model, hf_trace
from tplab.align.report import AlignReport, Evidence
from tplab.checkpoint.layout import read_part, tensor_parts


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong, as far as the numbers tell."""

    fault: str | None  # the museum's name for it; None if nothing is wrong or no hypothesis fits
    sentence: str  # the same in words, with the evidence
    point: str | None = None  # the trace point at which it was first seen; None if nothing is wrong
    numbers: dict[str, float] = field(default_factory=dict)  # the evidence by name
    lookalikes: tuple[str, ...] = ()  # other faults of the museum that leave exactly the same numbers

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

    ``point`` is the short name of the first divergent one. Every point before it is right, so ``reference("q")`` can
    be computed with; ``ours(point)`` is what has to be explained.
    """

    def __init__(self, report: AlignReport):
        self.report, self.plan, self.checkpoint = report, report.plan, report.checkpoint
        self.config = report.checkpoint.config
        self.first = report.first_divergence
        self.layer, _, self.point = self.first.name.rpartition(".")
        # Which positions of each prompt the rows of the tensors stand for: all, unless the decode path was aligned.
        self.computed = report.computed or [list(range(len(row))) for row in report.ids]
        self.lengths = [len(positions) for positions in self.computed]
        self.places = [(prompt, position) for prompt, positions in enumerate(self.computed) for position in positions]
        self.positions = torch.tensor([position for _, position in self.places])
        self.ids = self.token_ids(self.places)

    def token_ids(self, places: list[tuple[int, int]]) -> torch.Tensor:
        """The token ids at these ``(prompt, position)``; ``ids`` holds those of all rows."""
        return torch.tensor([self.report.ids[prompt][position] for prompt, position in places])

    def _evidence(self, name: str) -> Evidence:
        return self.report.evidence[f"{self.layer}.{name}" if self.layer else name]

    def ours(self, name: str) -> torch.Tensor:
        """tplab's tensor, whole."""
        return self._evidence(name).ours

    def reference(self, name: str) -> torch.Tensor:
        """Hugging Face's tensor."""
        return self._evidence(name).reference

    def shards(self, name: str) -> list[torch.Tensor]:
        """What each rank held."""
        return self._evidence(name).shards

    def weight(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint in the run's dtype; names inside the layer may be given without its prefix."""
        full = name if name.startswith("model.") else f"model.{self.layer}.{name}"
        with self.checkpoint.reader() as reader:
            part = tensor_parts(self.config, self.checkpoint.tensors)[full]
            return read_part(part, reader).to(self.report.dtype)

    @cached_property
    def decoded(self) -> set[tuple[int, int]]:
        """The ``(prompt, position)`` that were computed alone, with a past behind them."""
        return {(s.request_id, s.segment.start) for step in (self.report.decode.steps if self.report.decode else ())
                for s in step.requests if s.segment.count == 1 and s.segment.start}

    def num_keys(self, prompt: int) -> torch.Tensor:
        """For each row of a prompt, how many of its keys existed when the row was computed: all of a plain pass's, the
        tokens up to the end of its step along the decode path."""
        if self.report.decode is None:
            return torch.full((self.lengths[prompt],), self.lengths[prompt])
        ends = {}
        for segment in (r.segment for s in self.report.decode.steps for r in s.requests if r.request_id == prompt):
            end = segment.start + segment.count
            ends.update(dict.fromkeys(range(segment.start, end), end))
        return torch.tensor([ends[position] for position in self.computed[prompt]])

    @cached_property
    def _full_traces(self) -> list[dict[str, torch.Tensor]]:
        model = hf_model(self.checkpoint, self.report.dtype)
        return [{name: trace[f"{self.layer}.{name}"] for name in ("q_rope", "k_rope", "v")}
                for trace in (hf_trace(model, text) for text in self.report.ids)]

    def full_reference(self, prompt: int, name: str) -> torch.Tensor:
        """Hugging Face's ``q_rope``, ``k_rope`` or ``v`` for *all* tokens of one prompt, in the first broken layer;
        those included that tplab found in its cache instead of computing them."""
        return self._full_traces[prompt][name]

    @property
    def tolerance(self) -> float:
        """How far from a guess, relative to its scale, rounding can put what was computed from right tensors. (Much
        less than bfloat16's floor, which thirty layers add up to: a guess must not fit everything.)"""
        return min(3 * self.report.floor, 0.05)

    def fits(self, tensor: torch.Tensor, guess: torch.Tensor) -> bool:
        """Whether rounding explains the rest, when ``tensor`` is taken for ``guess``; never if either is not finite."""
        if tensor.shape != guess.shape or not (torch.isfinite(tensor).all() and torch.isfinite(guess).all()):
            return False
        gap = (tensor.double() - guess.double()).abs().max().item()
        return gap <= self.tolerance * max(guess.double().abs().max().item(), 1e-30)

    def diagnosis(self, fault: str | None, sentence: str, *lookalikes: str, **numbers: float) -> Diagnosis:
        """A diagnosis at this case's point."""
        return Diagnosis(fault, sentence, self.first.name, numbers, lookalikes)

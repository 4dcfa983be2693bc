"""What a check found, in words, as a table and as JSON."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from tplab.align.check.ordinary import Ordinary
from tplab.align.diagnose.case import Diagnosis
from tplab.align.floors import SHORT
from tplab.align.guilty import Judge
from tplab.align.report import AlignReport, internal_error
from tplab.checks import counted

GROWN = 10  # floors: how far float32 rounding can grow in an engine whose modules are all right
CLEARLY = 100  # floors: more than any rounding
_WEIGHTED = ("embed", "q", "k", "v", "gate", "up", "o_partial", "mlp_partial", "logits")  # points that a matrix makes
_LONGEST = 480  # characters of a finding without --verbose: five lines
_LOOKED = " Looked for and not found:"


@dataclass(repr=False)
class CheckReport(AlignReport):
    """An :class:`AlignReport` of a recorded engine; every point judged by its own inputs.

    ``verdict`` is ``"clean"``, ``"bug"`` or ``"cannot tell"``; :meth:`summary` says all that was found.
    """

    engine: ClassVar[str] = "engine"
    folder: str = ""
    broken_off: tuple[str, ...] = ()  # ranks without a recording, calls without an end
    stopped: tuple[str, ...] = ()  # calls in which the engine raised an error
    parameters: dict[str, str] = field(default_factory=dict)  # recorded weights that are not the checkpoint's
    adapted: set[str] = field(default_factory=set)  # points that differ by what an adapter adds
    failed: str = ""  # an internal error, and where; what was found before it is kept

    @cached_property
    def diagnoses(self) -> list[Diagnosis]:
        if not (self.guilty or self.recording.contradictions):
            return []
        try:
            return super().diagnoses
        except Exception as error:  # the last resort: the guilty points are known without a diagnosis
            self.failed = self.failed or internal_error("the diagnosis", error)
            return [Diagnosis(None, f"{', '.join(self.guilty[:4])} and what follows: no diagnosis.",
                              next(iter(self.guilty), "layout"), points=tuple(self.guilty))]

    @cached_property
    def ordinary(self) -> dict[str, str]:
        """Guilty points that a right engine may have: name → the reason ("TF32 products")."""
        try:
            with torch.inference_mode():
                return Ordinary(self).explained(super().guilty)
        except Exception as error:  # the last resort: then these points are guilty
            self.failed = self.failed or internal_error("the ordinary set-ups", error)
            return {}

    @cached_property
    def other_checkpoint(self) -> bool:
        """Whether no weight is this checkpoint's: no product of a matrix is like the expected one."""
        made = [name for name in self.local if name.rpartition(".")[2] in _WEIGHTED]
        if len(made) < 3 or any(self.local[name].inside for name in made):
            return False
        judge = Judge(self.recording, self.checkpoint, self.plan)
        with torch.inference_mode():
            return all(_likeness(judge, name) < 0.5 for name in made)

    @cached_property
    def guilty(self) -> list[str]:
        if self.other_checkpoint:
            return []
        known = self.ordinary.keys() | self.recording.lost | self.adapted
        return [name for name in super().guilty if name not in known]

    @cached_property
    def unnamed(self) -> bool:
        """Whether there are guilty points and no finding has a name; False in bfloat16 and float16, whose rounding can
        look like a bug."""
        return bool(self.guilty) and self.dtype not in SHORT and not any(one.fault for one in self.diagnoses)

    @cached_property
    def quantised(self) -> bool:
        """Whether no finding has a name, and every difference is like rounding to eight bits with unknown scales."""
        with torch.inference_mode():
            return self.unnamed and Ordinary(self).noisy(self.guilty)

    @cached_property
    def misplaced(self) -> bool:
        """Whether no finding has a name, and all other points are right up to the end of the model: then the tensor was
        taken for the wrong point."""
        others = [point for point in self.points if point.name not in self.guilty]
        return self.unnamed and others[-1:] == self.points[-1:] and all(
            point.relative <= GROWN * point.floor for point in others) and all(
            self.local[name].relative > CLEARLY * self[name].floor for name in self.guilty)

    @property
    def ok(self) -> bool:
        return self.verdict == "clean"

    @property
    def verdict(self) -> str:
        """``"bug"``: something is wrong; ``"clean"``: every recorded point is right, up to the end of every call."""
        if self.recording.contradictions or self.stopped or self.parameters and not self.other_checkpoint or (
                self.guilty and not (self.quantised or self.misplaced)):
            return "bug"
        return "cannot tell" if self.open_questions else "clean"

    @property
    def open_questions(self) -> list[str]:
        """The reasons why the engine may be wrong although no bug was seen."""
        known = self.guilty or self.ordinary or self.other_checkpoint or self.adapted or self.recording.contradictions
        far = not known and self.dtype not in SHORT and next(
            (p for p in self.points if not max(p.relative, 0) <= GROWN * p.floor), None)
        first = next(iter(self.guilty), "")
        rules = [
            (self.adapted, f"adapters (LoRA) change {_where(sorted(self.adapted))}, and the layers beneath are "
                           f"{self.model}'s: give the checkpoint into which they are merged"),
            (self.other_checkpoint, f"no weight is {self.model}'s: the engine runs another checkpoint, or loaded none"),
            (not (self.other_checkpoint or self.points or self.failed), "no point of the model was recorded"),
            (not self.other_checkpoint and self.points and all(diff.unknown for diff in self.local.values()),
             "all recorded values are NaN or infinity"),
            (self.quantised, "the differences are random and as large as rounding to eight bits: weights or a cache of "
                             "eight bits, with scales that were not recorded"),
            (self.misplaced, f"{first} differs, but points made from it are right, so another tensor is {first}. It "
                             f"was taken {self.recording.assumed.get(first, 'wrongly')}; give names= to correct this"),
            (far, far and f"{far.name} is off by {far.relative:.0e}, but every module is right for its own inputs")]
        return [self.failed] * bool(self.failed) + [*self.broken_off, *self.recording.unjudged] + [
            sentence for holds, sentence in rules if holds]

    @property
    def warnings(self) -> list[str]:
        """What a right engine may do, and what it can lead to."""
        found = list(self.recording.warnings)
        for what in dict.fromkeys(self.ordinary.values()):
            names = [name for name, other in self.ordinary.items() if other == what]
            worst = max(self.local[name].relative for name in names)
            found.append(f"{what}: {_where(names)}; these points and those behind them are off by up to {worst:.0e}")
        apart = next((p for p in self.points if p.spread > 0 and self.local[p.name].inside), None)
        if apart and not self.guilty and not self.other_checkpoint:
            found.append(f"ranks differ by rounding: first at {apart.name}, by up to {apart.spread:.0e}; ranks that "
                         "sample their own tokens can sample different ones")
        return found

    def inherits(self, name: str) -> bool:
        """Whether a point is off although its module is right."""
        point = self[name]
        return self.local[name].inside and not (point.relative <= point.floor and not point.nan and not point.inf)

    def table(self, every_layer: bool = True):
        """A pandas table: every point's global and local difference, its verdict, and its source."""
        table = super().table(every_layer)
        table["local"] = [self.local[name].relative for name in table.index]
        table["tolerance"] = [self.local[name].tolerance for name in table.index]
        table["says"] = [self.says(name) for name in table.index]
        table["from"] = [self.recording.assumed.get(name, "") for name in table.index]
        return table

    def says(self, name: str) -> str:
        """``"guilty"`` with the ranks if not all are, ``"inherits"``, ``"only NaN came in"`` or nothing."""
        local = self.local[name]
        if name in self.ordinary:
            return self.ordinary[name]
        if local.perhaps_from:
            return f"guilty, or inherits from where {local.perhaps_from} has its error"
        if local.guilty:
            some = len(local.guilty) < sum(shard is not None for shard in self.recording.points[name])
            return "guilty" + f" (rank {', '.join(map(str, local.guilty))})" * some
        return "only NaN came in" if local.unknown else "inherits" if self.inherits(name) else ""

    def summary(self, verbose: bool = False) -> str:
        """The verdict, the findings, and what was not seen; ``verbose``: also what was looked for, and all tensors that
        are no points."""
        ranks, unplaced = self.recording.world_size, self.recording.unplaced
        ends = [name for name in ("embed", "logits") if name not in self.local]
        heirs, many = sum(self.inherits(point.name) for point in self.points), len(self.guilty)
        guilty = f": {counted(many, 'guilty point')}, {heirs} more inherit{'s' * (heirs == 1)} an error"
        said = {"clean": "clean: every module makes of its own inputs what Hugging Face's would"
                + ", but for what the warning says" * bool(self.ordinary),
                "bug": f"not clean{guilty if many else ''}", "cannot tell": "cannot tell"}
        lines = [f"{self.folder} as {self.model}: {counted(ranks, 'rank')}, "
                 f"{str(self.dtype).removeprefix('torch.')}, {len(self.recording.places)} rows, {len(self.points)} "
                 f"points" + f" without {' and '.join(ends)}" * bool(ends), said[self.verdict]]
        lines += [line if verbose else _shortened(line.partition(_LOOKED)[0]) for line in self.diagnosis_lines()]
        more = {"weights": [f"{name}: {what}" for name, what in self.parameters.items() if not self.other_checkpoint],
                "stopped": self.stopped, "open": self.open_questions, "warning": self.warnings,
                "note": self.recording.notes, "not placed": unplaced if verbose else ()}
        lines += [f"{kind}: {what}" for kind, sentences in more.items() for what in sentences]
        if unplaced and not verbose:
            lines.append(f"note: {counted(len(unplaced), 'kind')} of tensors not placed: {unplaced[0]}"
                         + "; …" * (len(unplaced) > 1))
        return "\n".join(lines)

    def point_lines(self) -> str:
        """A table for the terminal: layers' outputs, the ends of the model, all points of the first guilty layer."""
        layer = next((name.rpartition(".")[0] for name in self.guilty), "")
        lines = [f"{'point':24}{'global':>9}{'local':>9}{'NaN':>7}"]
        for point in self.points:
            at, _, last = point.name.rpartition(".")
            if last in ("embed", "output", "norm", "logits") or at == layer:
                local = self.local[point.name].relative
                lines.append(f"{point.name:24}{point.relative:9.1e}{local:9.1e}{point.nan:7}  {self.says(point.name)}"
                             .rstrip().replace("nan", "NaN"))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()

    def to_dict(self) -> dict:
        """:meth:`AlignReport.to_dict`, and the fields of a check."""
        recording = self.recording
        return super().to_dict() | {
            "folder": self.folder, "verdict": self.verdict, "parameters": self.parameters,
            "diagnoses": [asdict(one) for one in self.diagnoses], "warnings": self.warnings,
            "local": [asdict(diff) | {"says": self.says(diff.name)} for diff in self.local.values()],
            "assumed": recording.assumed, "unplaced": recording.unplaced, "notes": recording.notes,
            "contradictions": recording.contradictions, "open": self.open_questions}


def _where(points) -> str:
    return Diagnosis(None, "", points=tuple(points)).where


def _shortened(line: str) -> str:
    """The sentences of a line that fit into five lines of a terminal."""
    return line if len(line) <= _LONGEST else line[:line.rfind(". ", 0, _LONGEST) + 1] + " …"


def _likeness(judge: Judge, name: str) -> float:
    """The correlation of a point with its expected values, on the first rank that has it."""
    judge.enter(name)
    rank, shard = next((rank, shard) for rank, shard in enumerate(judge.recording.points[name]) if shard is not None)
    held, should = (x.flatten().double().nan_to_num(0, 0, 0) for x in (shard.tensor, judge.frame.expected(name, rank)))
    return (held @ should / (held.norm() * should.norm()).clamp(min=1e-30)).item()

"""What a check found, in words, as a table and as JSON."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from tplab.align.check.ordinary import lower_precision, noisy
from tplab.align.check.rows import UNKNOWN
from tplab.align.diagnosis import Diagnosis, one_digit
from tplab.align.floors import SHORT
from tplab.align.guilty import Judge
from tplab.align.points import short_name
from tplab.align.report import AlignReport, internal_error
from tplab.checks import counted

GROWN = 10  # floors: how far float32 rounding can grow in an engine whose modules are all right
CLEARLY, CLEARLY_SHORT = 0.03, 0.5  # of a row's largest value: more than any rounding, in float32 and in bfloat16
_WEIGHTED = ("embed", "q", "k", "v", "gate", "up", "o_partial", "mlp_partial", "logits")  # points that a matrix makes


@dataclass(repr=False)
class CheckReport(AlignReport):
    """An :class:`AlignReport` of a recorded engine; every point judged by its own inputs.

    ``verdict`` is ``"clean"``, ``"bug"`` or ``"cannot tell"``; :meth:`summary` says all that was found.
    """

    engine: ClassVar[str] = "engine"
    folder: str = ""
    broken_off: tuple[str, ...] = ()  # calls without an end
    stopped: tuple[str, ...] = ()  # calls in which the engine raised an error
    parameters: dict[str, str] = field(default_factory=dict)  # recorded weights that are not the checkpoint's
    layouts: tuple[str, ...] = ()  # layouts that the user gave
    failed: str = ""  # an internal error, and where; what was found before it is kept

    @cached_property
    def diagnoses(self) -> list[Diagnosis]:
        if self.misplaced or not (self.guilty or self.recording.contradictions):
            return []
        try:
            return super().diagnoses
        except Exception as error:  # the last resort: the guilty points are known without a diagnosis
            self.failed = self.failed or internal_error("the diagnosis", error)
            return [Diagnosis(None, f"{', '.join(self.guilty[:4])} and what follows: no diagnosis.",
                              next(iter(self.guilty), "layout"), points=tuple(self.guilty))]

    @cached_property
    def other_checkpoint(self) -> bool:
        """Whether no weight is this checkpoint's: no product of a matrix is like the expected one."""
        made = [name for name in self.local if short_name(name) in _WEIGHTED]
        if len(made) < 3 or any(self.local[name].inside for name in made):
            return False
        with torch.inference_mode():
            return all(_likeness(self.judge, name) < 0.5 for name in made)

    @cached_property
    def _wrong(self) -> list[str]:
        """The points that are wrong for their own inputs."""
        return [name for name, diff in self.local.items() if not diff.inside and name not in self.recording.lost]

    @cached_property
    def adapted(self) -> list[str]:
        """Points that differ by what an adapter (LoRA) adds: all outputs of modules that have one, and no others."""
        return self._wrong if self._wrong and {*self._wrong} == self.recording.adapted else []

    @cached_property
    def precision(self) -> tuple[str, set[str]]:
        """A lower precision that a right engine may have, and the points that it explains."""
        return lower_precision(self, self._wrong) if self._wrong and not self.misplaced else ("", set())

    @cached_property
    def guilty(self) -> list[str]:
        if self.other_checkpoint or self.adapted:
            return []
        return [name for name in self._wrong if name not in self.precision[1]]

    @cached_property
    def quantised(self) -> bool:
        """Whether no finding has a name, and every difference is like rounding to eight bits with unknown scales. Not
        in bfloat16 and float16, whose rounding looks alike."""
        return bool(self.guilty) and self.dtype not in SHORT and noisy(self, self.guilty) and not any(
            diagnosis.fault for diagnosis in self.diagnoses)

    @cached_property
    def misplaced(self) -> bool:
        """Whether all other points are right up to the end of the model: then no error went on from the wrong ones, and
        their tensors were taken for what they are not."""
        others = [p for p in self.points if p.name not in self._wrong]
        grown, least = (1, CLEARLY_SHORT) if self.dtype in SHORT else (GROWN, CLEARLY)
        untold = any(UNKNOWN in text for text in self.recording.ids)  # rows of unknown texts have no reference
        if untold or self.recording.contradictions or not self._wrong or others[-1:] != self.points[-1:]:
            return False
        return all(p.relative <= grown * p.floor and not p.nan and not p.inf for p in others) and all(
            self.local[name].relative > least for name in self._wrong)

    @property
    def ok(self) -> bool:
        return self.verdict == "clean"

    @property
    def verdict(self) -> str:
        """``"bug"``: something is wrong; ``"clean"``: every recorded point is right, up to the end of every call."""
        if self.recording.contradictions or self.stopped or self.parameters and not self.other_checkpoint or (
                self.guilty and not (self.misplaced or self.quantised)):
            return "bug"
        return "cannot tell" if self.open_questions else "clean"

    @property
    def open_questions(self) -> list[str]:
        """The reasons why the engine may be wrong although no bug was seen; each says what would decide."""
        known = self._wrong or self.recording.contradictions
        far = not known and self.dtype not in SHORT and next(
            (p for p in self.points if not max(p.relative, 0) <= GROWN * p.floor), None)
        rules = [
            (self.adapted, f"adapters (LoRA) change {_where(self.adapted)}, and the layers beneath are "
                           f"{self.model}'s: give the checkpoint into which they are merged"),
            (self.other_checkpoint, f"no weight is {self.model}'s: the engine runs another checkpoint, or loaded none"),
            (not (self.points or self.failed), "no point of the model was recorded"),
            (self.points and all(diff.unknown for diff in self.local.values()),
             "all recorded values are NaN or infinity"),
            (self.guilty and not self.misplaced and self.quantised,
             "the differences are random and as large as rounding to eight bits: weights or a cache of eight bits, "
             "with scales that were not recorded"),
            (self.guilty and self.misplaced, self.guilty and self._misplaced_where()),
            (far, far and f"{far.name} is off by {one_digit(far.relative)} of its scale, but every module is right for "
                          "its own inputs")]
        return [self.failed] * bool(self.failed) + [*self.broken_off, *self.recording.unjudged] + [
            sentence for holds, sentence in rules if holds]

    def _misplaced_where(self) -> str:
        """The one question that would decide."""
        kinds, first = {short_name(name) for name in self.guilty}, self.guilty[0]
        heads = {"q", "k", "q_norm", "k_norm", "q_rope", "k_rope", "attn"}
        words = f"{_where(self.guilty)} differ, but what is made from them is right up to the end. "
        if kinds & {"q", "k"} and kinds <= heads and "pairs" not in self.layouts:
            return words + ("Do the numbers in each head of q and k lie in pairs, as in Meta's own files? Then give "
                            "--layout pairs")
        if "v" in kinds and kinds <= heads | {"v"} and "groups" not in self.layouts:
            return words + "Does the fused q|k|v lie KV head by KV head? Then give --layout groups"
        if kinds <= {"q_rope", "k_rope"}:
            words += "A text whose positions all differ by one number has the same scores; check its positions. Or else"
        else:
            words += "So"
        return words + (f" another tensor is {first}, which was taken {self.recording.assumed.get(first, '')}; give "
                        "--name to correct this")

    @property
    def warnings(self) -> list[str]:
        """What a right engine may do, and what it can lead to."""
        lines = list(self.recording.warnings)
        if self.precision[0]:
            lines.append(f"{self.precision[0]} explain{'s' * self.precision[0].startswith('a ')} how "
                         f"{_where(sorted(self.precision[1]))} differ: no bug of the engine")
        apart = next((p for p in self.points if p.spread > 0 and self.local[p.name].inside), None)
        if apart and not self.guilty and not self.other_checkpoint:
            lines.append(f"ranks differ by rounding: first at {apart.name}, by up to {one_digit(apart.spread)}; ranks "
                         "that sample their own tokens can sample different ones")
        return lines

    def inherits(self, name: str) -> bool:
        """Whether a point is off although its module is right."""
        point = self[name]
        return self.local[name].inside and not (point.relative <= point.floor and not point.nan and not point.inf)

    def table(self, every_layer: bool = True):
        """A pandas table: every point's global and local difference, its verdict, and its source."""
        table = super().table(every_layer)
        local = [self.local[name] for name in table.index]
        return table.assign(**{
            "local": [diff.relative for diff in local], "tolerance": [diff.tolerance for diff in local],
            "says": [*map(self.says, table.index)],
            "from": [self.recording.assumed.get(name, "") for name in table.index]})

    def says(self, name: str) -> str:
        """``"guilty"`` with the ranks if not all are, ``"inherits"``, ``"only NaN came in"`` or nothing."""
        local = self.local[name]
        if local.perhaps_from:
            return f"guilty, or inherits from where {local.perhaps_from} has its error"
        if local.guilty:
            some = len(local.guilty) < sum(shard is not None for shard in self.recording.points[name])
            return "guilty" + f" (rank {', '.join(map(str, local.guilty))})" * some
        return "only NaN came in" if local.unknown else "inherits" if self.inherits(name) else ""

    def summary(self) -> str:
        """The verdict, the findings, and what was not seen."""
        recording, many = self.recording, len(self.guilty)
        ends = [name for name in ("embed", "logits") if name not in self.local]
        heirs = sum(self.inherits(point.name) for point in self.points)
        guilty = f": {counted(many, 'guilty point')}, {heirs} more inherit{'s' * (heirs == 1)} an error" * bool(many)
        verdicts = {"clean": "clean: every module makes of its own inputs what Hugging Face's would",
                    "bug": f"not clean{guilty}", "cannot tell": "cannot tell"}
        lines = [f"{self.folder} as {self.model}: {counted(recording.world_size, 'rank')}, "
                 f"{str(self.dtype).removeprefix('torch.')}, {len(recording.places)} rows, {len(self.points)} points"
                 + f" without {' and '.join(ends)}" * bool(ends), verdicts[self.verdict], *self.diagnosis_lines()]
        more = {"weights": [f"{name}: {what}" for name, what in self.parameters.items() if not self.other_checkpoint],
                "stopped": self.stopped, "open": self.open_questions, "warning": self.warnings, "note": recording.notes}
        lines += [f"{kind}: {what}" for kind, sentences in more.items() for what in sentences]
        if unplaced := recording.unplaced:
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
            "diagnoses": [asdict(diagnosis) for diagnosis in self.diagnoses], "warnings": self.warnings,
            "local": [asdict(diff) | {"says": self.says(diff.name)} for diff in self.local.values()],
            "assumed": recording.assumed, "unplaced": recording.unplaced, "notes": recording.notes,
            "contradictions": recording.contradictions, "open": self.open_questions}


def _where(points) -> str:
    return Diagnosis(None, "", points=tuple(points)).where


def _likeness(judge: Judge, name: str) -> float:
    """The correlation of a point with its expected values, on the first rank that has it."""
    rank = next(rank for rank, shard in enumerate(judge.recording.points[name]) if shard is not None)
    held, should = (x.flatten().double().nan_to_num(0, 0, 0) for x in (judge.held(name, rank), judge.expected(
        name, rank)))
    return (held @ should / (held.norm() * should.norm()).clamp(min=1e-30)).item()

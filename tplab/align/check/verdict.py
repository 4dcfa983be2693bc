"""What a check found, in words, as a table and as JSON."""

from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import ClassVar

from tplab.align.diagnose.case import Diagnosis
from tplab.align.floors import SHORT
from tplab.align.report import AlignReport

GROWN = 10  # so many floors of float32 rounding can grow in an engine whose modules are all right


@dataclass(repr=False)
class CheckReport(AlignReport):
    """An :class:`AlignReport` of a recorded engine; every point judged by its own inputs.

    ``verdict`` is ``"clean"``, ``"bug"`` or ``"cannot tell"``; :meth:`summary` says all that was found.
    """

    engine: ClassVar[str] = "engine"
    folder: str = ""
    broken_off: tuple[str, ...] = ()  # ranks without a recording, calls of which the end is not there
    stopped: tuple[str, ...] = ()  # calls in which the engine raised an error
    parameters: dict[str, str] = field(default_factory=dict)  # recorded weights that are not the checkpoint's

    @cached_property
    def diagnoses(self) -> list[Diagnosis]:
        return super().diagnoses if self.guilty or self.recording.contradictions else []

    @property
    def ok(self) -> bool:
        return self.verdict == "clean"

    @property
    def verdict(self) -> str:
        """``"bug"``: something is wrong; ``"clean"``: nothing of what can be seen is, up to the end of every call."""
        if self.guilty or self.parameters or self.recording.contradictions or self.stopped:
            return "bug"
        return "cannot tell" if self.open_questions else "clean"

    @property
    def open_questions(self) -> list[str]:
        """Why nothing wrong was seen does not mean that nothing is."""
        found = list(self.broken_off)
        if not self.points:
            found.append("no point of the model was recorded")
        elif all(diff.unknown for diff in self.local.values()):
            found.append("there is nothing but NaN and infinity")
        far = [p for p in self.points if self.dtype not in SHORT and not max(p.relative, 0) <= GROWN * p.floor]
        if far and not self.guilty:
            found.append(f"{far[0].name} is off by {far[0].relative:.0e}, though every module is right by its inputs")
        return found

    def inherits(self, name: str) -> bool:
        """Whether a point is off although its module is right."""
        point = self[name]
        return self.local[name].inside and not (point.relative <= point.floor and not point.nan and not point.inf)

    def table(self, every_layer: bool = True):
        """A pandas table: every point's global and local difference, guilty or inheriting, and where it came from."""
        table = super().table(every_layer)
        table["local"] = [self.local[name].relative for name in table.index]
        table["tolerance"] = [self.local[name].tolerance for name in table.index]
        table["says"] = [self.says(name) for name in table.index]
        table["from"] = [self.recording.assumed.get(name, "") for name in table.index]
        return table

    def says(self, name: str) -> str:
        """``"guilty"`` with the ranks if not all are, ``"inherits"``, ``"not judged"`` or nothing."""
        local = self.local[name]
        if local.perhaps_from:
            return f"guilty, or inherits from where {local.perhaps_from} has its error"
        if local.guilty:
            some = len(local.guilty) < sum(shard is not None for shard in self.recording.points[name])
            return "guilty" + f" (rank {', '.join(map(str, local.guilty))})" * some
        return "only NaN came in" if local.unknown else "inherits" if self.inherits(name) else ""

    def summary(self) -> str:
        """The verdict, the bugs by name, what was not seen."""
        seen, ends = len(self.points), [name for name in ("embed", "logits") if name not in self.local]
        rows = len(self.recording.places)
        lines = [f"{self.folder} as {self.model}: {self.recording.world_size} rank"
                 f"{'s' * (self.recording.world_size > 1)}, {str(self.dtype).removeprefix('torch.')}, {rows} rows, "
                 f"{seen} points" + f" without {' and '.join(ends)}" * bool(ends)]
        heirs, many = sum(self.inherits(point.name) for point in self.points), len(self.guilty)
        lines.append({"clean": "clean: every module makes of its own inputs what Hugging Face's would",
                      "bug": f"not clean: {many} guilty point{'s' * (many != 1)}, {heirs} more inherit"
                             f"{'s' * (heirs == 1)} an error",
                      "cannot tell": "cannot tell"}[self.verdict])
        lines += self.diagnosis_lines()
        lines += [f"weights: {name}: {what}" for name, what in self.parameters.items()]
        lines += [f"stopped: {what}" for what in self.stopped]
        lines += [f"open: {what}" for what in self.open_questions]
        lines += [f"note: {what}" for what in (*self.recording.notes, *(f"not placed: {x}" for x in
                                                                        self.recording.unplaced))]
        return "\n".join(lines)

    def point_lines(self) -> str:
        """A table for the terminal: the layers' outputs and the ends of the model; of the first guilty layer, all."""
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
        """As :meth:`AlignReport.to_dict`, with what only a check knows."""
        return super().to_dict() | {
            "folder": self.folder, "verdict": self.verdict, "parameters": self.parameters,
            "diagnoses": [asdict(one) for one in self.diagnoses],
            "local": [asdict(diff) | {"says": self.says(diff.name)} for diff in self.local.values()],
            "assumed": self.recording.assumed, "unplaced": self.recording.unplaced, "notes": self.recording.notes,
            "contradictions": self.recording.contradictions, "open": self.open_questions}

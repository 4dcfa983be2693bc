"""The report of one alignment: every trace point's difference, where it starts, and the logits."""

import json
import traceback
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import ClassVar, NamedTuple

import torch

from tplab.align.floors import LOCAL, TIMES, bound, relative_floor
from tplab.align.guilty import Judge, LocalDiff
from tplab.align.points import layout, short_name
from tplab.align.recording import Recording
from tplab.checkpoint import Checkpoint
from tplab.engine.step import SchedulerOutput
from tplab.model import LoadStats
from tplab.ranks import OpRecord
from tplab.shard import ShardPlan


@dataclass(frozen=True)
class PointDiff:
    """One trace point, tplab against Hugging Face."""

    name: str
    layout: str
    shape: tuple[int, ...]
    max_abs: float  # of the difference, over entries that are finite on both sides
    mean_abs: float
    relative: float  # max_abs divided by the reference's largest magnitude
    nan: int  # entries of tplab's tensor, of `size`
    inf: int
    size: int
    spread: float  # largest disagreement between ranks about what they all hold
    inside: bool  # explained by rounding, and finite, and the ranks agree bit for bit or within the floor
    floor: float  # what rounding can explain here, relative to the reference's largest magnitude


def compare(name: str, ours: torch.Tensor, reference: torch.Tensor, spread: float, dtype: torch.dtype,
            decode: bool = False, measured: float = float("inf")) -> PointDiff:
    """The difference at one trace point, of two tensors ``[tokens, …]`` of one shape. ``measured``: the rounding at
    this point, relative to the reference's scale, where it was measured; the floor is a few times that, and never more
    than the dtype's own."""
    if ours.shape != reference.shape:
        raise ValueError(f"{name}: tplab has {tuple(ours.shape)}, Hugging Face {tuple(reference.shape)}")
    wide = torch.promote_types(torch.promote_types(ours.dtype, reference.dtype), torch.float32)
    ours, reference = ours.to(wide), reference.to(wide)
    if not reference.numel():  # rows of unknown texts alone
        return PointDiff(name, layout(name), tuple(ours.shape), 0.0, 0.0, 0.0, 0, 0, 0, spread, True, 0.0)
    diff, nan, inf = (ours - reference).abs_(), 0, 0
    if not isfinite(diff.max()):  # counting NaN costs more than the difference itself
        nan, inf = int(torch.isnan(ours).sum()), int(torch.isinf(ours).sum())
        diff = diff[torch.isfinite(ours) & torch.isfinite(reference)]
    scale = max(abs(extreme.item()) for extreme in torch.aminmax(reference))
    max_abs = diff.max().item() if diff.numel() else float("nan")
    largest = min(bound(name, scale, dtype, decode), max(TIMES * measured, LOCAL[dtype]) * scale)
    good = nan == inf == 0 and max_abs <= largest and spread <= largest
    mean_abs = diff.mean().item() if diff.numel() else float("nan")
    return PointDiff(name, layout(name), tuple(ours.shape), max_abs, mean_abs, max_abs / scale if scale else max_abs,
                     nan, inf, ours.numel(), spread, good, min(relative_floor(dtype, decode),
                                                               max(TIMES * measured, LOCAL[dtype])))


def internal_error(where: str, error: Exception) -> str:
    """An error of this room in one line, for a report about it."""
    frame, what = traceback.extract_tb(error.__traceback__)[-1], " ".join(str(error).split())[:200]
    return (f"internal error at {where}: {type(error).__name__}: {what} ({Path(frame.filename).name}, line "
            f"{frame.lineno}); please report it with the recording")


class Evidence(NamedTuple):
    """The tensors behind one point: tplab's (whole), Hugging Face's, and what each rank held."""

    ours: torch.Tensor
    reference: torch.Tensor
    shards: list[torch.Tensor | None]


@dataclass(frozen=True)
class DecodeFacts:
    """What the engine's scheduler did, which no tensor shows."""

    steps: tuple[SchedulerOutput, ...]  # what was sent to the ranks
    tables: tuple[dict[int, tuple[int, ...]], ...]  # per step {sequence: its block table in the scheduler}
    drawn: tuple[dict[tuple[int, int], int], ...]  # per rank {(sequence, position): the token that it sampled itself}
    block_size: int  # tokens per block
    blocks_left: int  # still in use after the last sequence had ended
    preemptions: int  # how often a sequence lost its blocks and had to begin again
    prefix_caching: bool  # whether equal beginnings were to share their blocks


@dataclass(repr=False)
class AlignReport:
    """What :func:`tplab.align.align` found. ``ok`` says whether everything is inside the floor."""

    engine: ClassVar[str] = "tplab"  # whose tensors these are, in figures and tables
    model: str
    plan: ShardPlan
    dtype: torch.dtype
    ids: list[list[int]]  # the prompts' token ids
    points: list[PointDiff]  # in the order of the forward pass
    evidence: dict[str, Evidence] = field(repr=False)  # of the first divergent layer and of the ends of the model
    patches: tuple[str, ...] = ()  # the dotted names that were replaced during the run
    op_logs: list[list[OpRecord]] = field(default_factory=list, repr=False)  # per rank, of the forward pass, in order
    load_stats: list[LoadStats] = field(default_factory=list, repr=False)  # per rank, the bytes read and held
    # Per rank, of layer 0's q, k and v weights as the rank itself found them; of a plain forward pass only.
    shapes: list[dict[str, tuple[int, ...]]] = field(default_factory=list, repr=False)
    computed: list[list[int]] | None = field(default=None, repr=False)  # per prompt, the rows' positions; None: all
    decode: DecodeFacts | None = field(default=None, repr=False)  # of align_decode
    checkpoint: Checkpoint | None = field(default=None, repr=False)  # what ran, for the diagnosis
    recording: Recording | None = field(default=None, repr=False)  # all points of a run that is not ok, rank by rank

    @cached_property
    def local(self) -> dict[str, LocalDiff]:
        """Every recorded point judged from its own inputs, in the order of the forward pass. Empty where all points are
        right."""
        return {} if self.recording is None else self.judge.diffs()

    @cached_property
    def judge(self) -> Judge:
        """What every point should be."""
        return Judge(self.recording, self.checkpoint, self.plan)

    @property
    def guilty(self) -> list[str]:
        """The points that are wrong for their own inputs; other points outside the floor inherit an error."""
        return [name for name, diff in self.local.items() if not diff.inside]

    @cached_property
    def diagnoses(self) -> list:
        """A :class:`Diagnosis` for each bug, in the order in which they show."""
        from tplab.align.diagnose import diagnose_all  # it looks at reports, so this room is below it

        return diagnose_all(self)

    def diagnosis_lines(self) -> list[str]:
        """The diagnoses in words and numbered: where, the bug's name, those that look alike, the evidence."""
        return [f"{number}. {diagnosis.where}" + f": {diagnosis.fault}" * bool(diagnosis.fault) + (
            f" (or {', '.join(diagnosis.lookalikes)})" if diagnosis.lookalikes else "") + f". {diagnosis.sentence}"
            for number, diagnosis in enumerate(self.diagnoses, 1)]

    @property
    def tp_logits(self) -> torch.Tensor:
        """tplab's logits, ``[tokens, vocab]``, all prompts below each other."""
        return self.evidence["logits"].ours

    @property
    def hf_logits(self) -> torch.Tensor:
        """Hugging Face's logits, ``[tokens, vocab]``."""
        return self.evidence["logits"].reference

    @property
    def floor(self) -> float:
        """The largest rounding error, relative to the reference's scale at each point."""
        return max(point.floor for point in self.points)

    @property
    def ok(self) -> bool:
        return self.first_divergence is None

    @cached_property
    def first_divergence(self) -> PointDiff | None:
        """The first point of the forward pass whose difference is more than rounding."""
        return next((point for point in self.points if not point.inside), None)

    def __getitem__(self, name: str) -> PointDiff:
        return {point.name: point for point in self.points}[name]

    @property
    def max_abs_diff(self) -> float:
        """Of the logits; NaN where tplab's logits hold no finite number."""
        return self["logits"].max_abs

    @property
    def rank_spread(self) -> float:
        """The largest disagreement between ranks at any point."""
        return max((point.spread for point in self.points), default=0.0)

    @property
    def nan_count(self) -> int:
        """NaN entries at all points together."""
        return sum(point.nan for point in self.points)

    @property
    def top1_agreement(self) -> float:
        """The share of positions with the same largest logit on both sides; a row with NaN counts as different."""
        whole = ~torch.isnan(self.tp_logits).any(-1)
        same = self.tp_logits.nan_to_num().argmax(-1) == self.hf_logits.argmax(-1)
        return (same & whole).double().mean().item()

    def table(self, every_layer: bool = True):
        """A pandas table of the points; without ``every_layer``, the layers' outputs and the ends of the model only."""
        import pandas as pd

        rows = [asdict(p) for p in self.points if every_layer or short_name(p.name)
                 in ("embed", "output", "norm", "logits")]
        return pd.DataFrame(rows, columns=[column.name for column in fields(PointDiff)]).set_index("name")

    def __repr__(self) -> str:
        first = self.first_divergence
        where = "everything inside the floor" if self.ok else f"first outside the floor: {first.name if first else '–'}"
        return (f"{type(self).__name__}({self.model}, tp {self.plan.tensor_parallel_size}, "
                f"{str(self.dtype).removeprefix('torch.')}: {where})")

    def summary(self) -> str:
        """Two or three lines for the terminal."""
        floor = f"floor {self.floor:.0e} relative"
        verdict = f"inside the {floor}" if self.ok else f"first outside the {floor}: {self.first_divergence.name}"
        return (f"{self.model}, tp {self.plan.tensor_parallel_size}, {str(self.dtype).removeprefix('torch.')}: "
                f"max |Δ logits| {self.max_abs_diff:.2e}, top-1 agreement {self.top1_agreement:.1%}, "
                f"spread across ranks {self.rank_spread:.2e}, NaN {self.nan_count}\n{verdict}")

    def to_dict(self) -> dict:
        """All of it but the tensors."""
        first, logits = self.first_divergence, "logits" in self.evidence
        return {
            "model": self.model, "tp": self.plan.tensor_parallel_size, "dtype": str(self.dtype).removeprefix("torch."),
            "plan": {"kind": self.plan.kind, "ranks": self.plan.rows()}, "ids": self.ids, "ok": self.ok,
            "max_abs_diff": self.max_abs_diff if logits else None,
            "top1_agreement": self.top1_agreement if logits else None, "rank_spread": self.rank_spread,
            "nan_count": self.nan_count, "first_divergence": first and first.name, "patches": self.patches,
            "shapes": self.shapes, "points": [asdict(point) for point in self.points]}

    def to_json(self, path: str | Path) -> None:
        """Write :meth:`to_dict`. NaN and infinity become null, since JSON knows neither."""
        def clean(value):
            if isinstance(value, float):
                return value if value == value and abs(value) != float("inf") else None
            if isinstance(value, dict):
                return {key: clean(item) for key, item in value.items()}
            return [clean(item) for item in value] if isinstance(value, (list, tuple)) else value

        Path(path).write_text(json.dumps(clean(self.to_dict()), indent=1))

    def save_logits(self, path: str | Path) -> None:
        """Write ``tp_logits`` and ``hf_logits``, each ``[tokens, vocab]``, as safetensors."""
        from safetensors.torch import save_file

        save_file({"tp_logits": self.tp_logits.contiguous(), "hf_logits": self.hf_logits.contiguous()}, path)

"""``judge``: compares an engine's points with Hugging Face's on the same ids, and with its own inputs."""

from dataclasses import replace

import torch

from tplab.align.floors import SHORT
from tplab.align.gather import whole_point
from tplab.align.guilty import Judge, recorded_points
from tplab.align.points import POINTS, layout
from tplab.align.recording import Recording
from tplab.align.reference import hf_model, hf_trace
from tplab.align.report import AlignReport, Evidence, compare, internal_error
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import read_part, tensor_parts
from tplab.errors import TplabError
from tplab.patch import Patch
from tplab.shard import ShardPlan


def judge(recording: Recording, ckpt: Checkpoint, plan: ShardPlan, patches: tuple[Patch, ...] = (), *,
          by_local: bool = False, kind: type[AlignReport] = AlignReport, **more) -> AlignReport:
    """Gather every recorded point, compare it with Hugging Face's, and keep the tensors of the first broken layer.

    Args:
        by_local: judge each point by its own inputs; global differences only explain. bfloat16 and float16 are always
            judged so, since the rounding of many layers looks like a bug.
        kind: the class of the report.
        more: further fields of the report.
    """
    short = recording.dtype in SHORT
    local, judged = {}, Judge(recording, ckpt, plan) if by_local or short else None
    theirs = _Reference(recording, ckpt, recording.dtype)
    exact = _Reference(recording, ckpt, torch.float32) if short else None
    points, evidence, broken, broken_layer = [], {}, False, None
    for name in recorded_points(recording, ckpt):
        try:
            shards, right = recording.points[name], theirs.pop(name)
            measured = _relative(right, exact.pop(name)) if exact and right.numel() else float("inf")
            ours, spread, held = whole_point(name, shards)
            ours = ours[theirs.rows(name)]
            if layout(name) == "partial" and sum(map(bool, shards)) < len(judged.stage(name) if judged else shards):
                ours = right = ours[:0]  # without all summands there is no sum
            if judged:
                local[name] = judged.diff(name)
                if shards[0] and shards[0].kind == "partial" and local[name].inside:
                    ours = _with_bias(name, ours, right, ckpt)
            if held is not None and len(held) < right.shape[1]:  # the others are on ranks that are missing
                right = right[:, held]
            point = compare(name, ours, right, spread, recording.dtype, not recording.plain, measured)
            if judged:
                # Inside, unless it is guilty, or outside the floor and behind a guilty point.
                point = replace(point, inside=local[name].inside and (point.inside or not broken))
                broken = broken or not local[name].inside
            points.append(point)
            layer = name.rpartition(".")[0]
            if layer and broken_layer is None:
                # Until a layer breaks, only the current layer is kept: so the evidence of a deep model stays small.
                evidence = {kept: value for kept, value in evidence.items() if kept.rpartition(".")[0] in ("", layer)}
                broken_layer = layer if not point.inside else None
            if layer in ("", broken_layer) or broken_layer is None:
                evidence[name] = Evidence(ours, right, [shard and shard.tensor for shard in shards])
        except Exception as error:
            if not by_local or isinstance(error, TplabError):
                raise
            more["failed"] = internal_error(name, error)  # the last resort of a check: earlier findings stay
            local.pop(name, None)
            break
    computed = None if recording.plain else [[p for s, p in recording.places if s == number]
                                             for number in range(len(recording.ids))]
    report = kind(ckpt.name, plan, recording.dtype, recording.ids, points, evidence, checkpoint=ckpt,
                  patches=tuple(patch.target for patch in patches), computed=computed, recording=recording, **more)
    if judged:
        report.local, report.judge = local, judged
    if not by_local and report.ok:
        report.recording = None
    return report


def _with_bias(name: str, ours: torch.Tensor, right: torch.Tensor, ckpt: Checkpoint) -> torch.Tensor:
    """The sum of all summands; with the bias, if that is nearer to the reference: then the engine adds it later."""
    layer, _, point = name.rpartition(".")
    bias = tensor_parts(ckpt.config, ckpt.tensors).get(f"model.{layer}.{POINTS[point].module}.bias")
    if bias is None:
        return ours
    with ckpt.reader() as reader:
        more = ours + read_part(bias, reader).to(ours.dtype)
    return more if (more - right).abs().nanmean() < (ours - right).abs().nanmean() else ours


def _relative(ours: torch.Tensor, right: torch.Tensor) -> float:
    return ((ours.double() - right.double()).abs().max() / right.double().abs().max().clamp(min=1e-30)).item()


class _Reference:
    """Hugging Face's points on the ids and rows of a recording; each is returned once, since traces are large. A text
    of which a token is unknown (-1) has none from there on."""

    def __init__(self, recording: Recording, ckpt: Checkpoint, dtype: torch.dtype):
        self.recording, model = recording, hf_model(ckpt, dtype)
        self.traces = [hf_trace(model, text[:known] or [0], recording.points)
                       for text, known in zip(recording.ids, recording.known)]

    def rows(self, name: str) -> slice | list[int]:
        """The rows of a point that have a reference."""
        places = self.recording.places_of(name)
        rows = [row for row, (s, p) in enumerate(places) if p < self.recording.known[s]]
        return rows if len(rows) < len(places) else slice(None)

    def pop(self, name: str) -> torch.Tensor:
        places = [(s, p) for s, p in self.recording.places_of(name) if p < self.recording.known[s]]
        parts = []
        for number, trace in enumerate(self.traces):
            positions, whole = [p for s, p in places if s == number], trace.pop(name)
            parts.append(whole if positions == list(range(len(whole))) else whole[positions])
        return torch.cat(parts)

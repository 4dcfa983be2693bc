"""Alignment reports made of numbers alone: no model, no rank, whatever differences a figure should be shown."""

import math
from dataclasses import replace

import torch

from tplab.align.floors import RELATIVE
from tplab.align.gather import whole_point
from tplab.align.points import layout, point_names
from tplab.align.report import AlignReport, Evidence, PointDiff, compare
from tplab.checkpoint import open_checkpoint
from tplab.model import LoadStats
from tplab.shard import ShardPlan


def config_with(**fields):
    """fable's config with other fields."""
    return replace(open_checkpoint("fable").config, **fields)


def plan(tensor_parallel_size=2, heads=8, kv_heads=2):
    return ShardPlan.make(tensor_parallel_size=tensor_parallel_size, num_heads=heads, num_kv_heads=kv_heads,
                          head_dim=16, hidden_size=128, intermediate_size=352, vocab_size=768)


def make_report(differences=None, layers=4, dtype=torch.float32, quiet=1e-7, tensor_parallel_size=2, spread=None):
    """``differences``: ``{point: relative difference}`` from which on that difference stays; NaN for NaN.

    Before the first of them every point differs by ``quiet``; the embedding by nothing at all.
    """
    now, points = quiet, []
    for name in point_names(config_with(num_layers=layers)):
        now = (differences or {}).get(name, now)
        relative, lost = (0.0 if name == "embed" and now == quiet else now), math.isnan(now)
        apart = (spread or {}).get(name, 0.0)
        inside = not lost and max(relative, apart / 4) <= RELATIVE[dtype]
        points.append(PointDiff(name, layout(name), (6, 128), relative * 4, relative * 2, relative, 276 if lost else 0,
                                0,
                                768, apart, inside, RELATIVE[dtype]))
    logits = torch.arange(6 * 768, dtype=dtype).reshape(6, 768) % 17
    ours = logits * float("nan") if math.isnan(now) else logits + now
    shapes = [{"q": (64, 128), "k": (16, 128), "v": (16, 128)}] * tensor_parallel_size
    return AlignReport("fable", plan(tensor_parallel_size), dtype, [[1, 2, 3, 4, 5, 6]], points,
                       {"logits": Evidence(ours, logits, [])}, shapes=shapes,
                       load_stats=[LoadStats(1_230_000 + rank, 2_460_000) for rank in range(tensor_parallel_size)])


def with_point(report, name, change):
    """The report with something else recorded at one point: ``change(tensor)`` of each rank's."""
    recording, found = report.recording, report.evidence[name]
    shards = [replace(shard, tensor=change(shard.tensor)) for shard in recording.points[name]]
    points = [compare(name, whole_point(name, shards)[0], found.reference, p.spread, report.dtype,
                      report.computed is not None) if p.name == name else p for p in report.points]
    return replace(report, points=points, recording=replace(
        recording, points=recording.points | {name: shards}))

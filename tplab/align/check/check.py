"""``check``: judges the folder that the recorder wrote against the checkpoint that the engine runs."""

import os
from collections.abc import Mapping

import torch

from tplab.align.check.folder import NOTHING_RAN, Recorded, read_recorded
from tplab.align.check.models import one_model
from tplab.align.check.names import pattern_of, role_of, split_name
from tplab.align.check.notes import once
from tplab.align.check.placement import find_points
from tplab.align.check.verdict import CheckReport
from tplab.align.check.weights import wrong_parameters
from tplab.align.judge import judge
from tplab.align.recording import Recording
from tplab.align.report import internal_error
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.errors import TplabError
from tplab.shard import ShardPlan


def check(folder: str | os.PathLike, model: str | Checkpoint, *, names: Mapping[str, str] | None = None
          ) -> CheckReport:
    """Judge any engine by what it recorded with ``tplab/record.py``.

    Every module is computed again from its own recorded inputs and the checkpoint's weights (*local*: is it guilty?).
    Every point is also compared with Hugging Face's on the same ids (*global*: does it inherit an error?).

    Args:
        folder: the one that ``record(folder, …)`` wrote.
        model: the checkpoint that the engine runs: a name, folder or hub id, or an opened one.
        names: ``{pattern: point}`` for tensors whose names say nothing: ``{"blocks.{i}.mix.out": "o_proj"}``.

    Raises:
        RecordingError: the folder is no recording, or a damaged one.
        PlacementError: nothing in it can be placed in this model, or ``names`` are wrong.
        CheckpointError, ShardPlanError: as for :func:`tplab.align.align`.
    """
    ckpt = open_checkpoint(model)
    recorded, reading = one_model(read_recorded(folder), ckpt), {}
    report = _judged(recorded, ckpt, names)
    for more, possible, better in _OTHER_READINGS:
        if report.guilty and possible(report):
            other = _judged(recorded, ckpt, names, **reading | more)
            if better(other, report):
                report, reading = other, reading | more
    if report.guilty and (bare := _below_adapters(recorded)):
        other = _judged(recorded, ckpt, bare | (names or {}))
        inside = {name for name in report.guilty if name in other.local and other.local[name].inside}
        if inside and not other.failed and {name.rpartition(".")[2] for name in inside} <= {*"qkv", "gate", "up"}:
            report.adapted, _ = inside, report.__dict__.pop("guilty")
    return report


def _guilty_of_less(other: CheckReport, report: CheckReport) -> bool:
    return set(other.guilty) < set(report.guilty)


_OTHER_READINGS = (  # another way to read the recording, when it is possible, and when it is the better one
    (dict(enable_expert_parallel=True),  # no name says how experts are dealt out
     lambda report: report.checkpoint.config.experts and 1 < report.recording.world_size
     <= report.checkpoint.config.experts.num_experts,
     lambda other, report: _unexplained(other) < _unexplained(report)),
    (dict(trust_positions=True), lambda report: report.recording.doubts, _guilty_of_less),
    (dict(trust_positions=True, unknown_start=True), lambda report: report.recording.doubts, _guilty_of_less),
    (dict(usual_order=True), lambda report: report.recording.reordered,  # what follows was made of the usual order
     lambda other, report: not set(other.guilty) & set(report.guilty)))


def _unexplained(report: CheckReport) -> tuple[int, int]:
    """The number of guilty points, rank by rank, and the number of findings without a name."""
    return (sum(len(diff.guilty) for diff in report.local.values()),
            sum(one.fault is None for one in report.diagnoses))


def _below_adapters(recorded: Recorded) -> dict[str, str]:
    """The roles of the layers beneath adapters, by the pattern of their names."""
    entries = (entry for rank in recorded.ranks if rank for call in rank.calls[:1] for entry in call.entries)
    found = {pattern_of(entry.name): role_of(*split_name(entry.name)) for entry in entries
             if entry.name.endswith(".base_layer")}
    return {pattern: role for pattern, role in found.items() if role in ("q", "k", "v", "qkv", "gate", "up", "gate_up")}


def _judged(recorded: Recorded, ckpt: Checkpoint, names: dict[str, str] | None, **reading) -> CheckReport:
    calls = [(found.rank, call) for found in recorded.ranks if found is not None for call in found.calls]
    ended = {which: once((rank, call.index, call.status.rstrip(".") + (call.last and f", in {call.last}"))
                         for rank, call in calls if call.status != "done" and call.status.startswith("failed") is which)
             for which in (True, False)}
    gone = [f"rank {rank} recorded nothing" for rank, found in enumerate(recorded.ranks) if found is None]
    unseen = once((rank, call.index, NOTHING_RAN) for rank, call in calls if NOTHING_RAN in call.left_out)
    facts = dict(folder=str(recorded.folder), stopped=tuple(ended[True]), broken_off=(*gone, *unseen, *ended[False]))
    try:
        recording = find_points(recorded, ckpt, names, **reading)
        report = judge(recording, ckpt, recording.plan, by_local=True, kind=CheckReport, **facts)
        report.parameters = wrong_parameters(recording, ckpt)
    except TplabError:
        raise
    except Exception as error:  # the last resort: the user gets an answer to any recording
        nothing = Recording(recorded.world_size, [], [], [], [], {}, torch.float32)
        report = CheckReport(ckpt.name, ShardPlan.from_config(ckpt.config, 1), nothing.dtype, [], [], {},
                             checkpoint=ckpt, recording=nothing, **facts)
        report.failed = internal_error("the placement", error)
    return report

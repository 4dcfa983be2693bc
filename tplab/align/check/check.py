"""``check``: judges the folder that the recorder wrote against the checkpoint that the engine runs."""

import os
from collections.abc import Mapping, Sequence

import torch

from tplab.align.check.folder import read_recorded
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


def check(folder: str | os.PathLike, model: str | Checkpoint, *, names: Mapping[str, str] | None = None,
          layout: Sequence[str] = ()) -> CheckReport:
    """Judge any engine by what it recorded with ``tplab/record.py``.

    Every module is computed again from its own recorded inputs and the checkpoint's weights (*local*: is it guilty?).
    Every point is also compared with Hugging Face's on the same ids (*global*: does it inherit an error?). What is told
    is believed, and judged; what is not told is found by names and sizes. Where these do not decide, the report asks.

    Args:
        folder: the one that ``record(folder, …)`` wrote.
        model: the checkpoint that the engine runs: a name, folder or hub id, or an opened one.
        names: ``{pattern: point}`` for tensors whose names say nothing: ``{"blocks.{i}.mix.out": "o_proj"}``; the
            point ``""`` leaves a tensor out.
        layout: of :data:`tplab.align.check.shares.LAYOUTS`: ``"pairs"`` if the numbers in each head of q and k lie in
            pairs, as in Meta's own files; ``"groups"`` if a fused q|k|v lies KV head by KV head.

    Raises:
        RecordingError: the folder is no recording, or a damaged one.
        PlacementError: nothing in it can be placed in this model, or ``names`` or ``layout`` are wrong.
        CheckpointError, ShardPlanError: as for :func:`tplab.align.align`.
    """
    ckpt, recorded = open_checkpoint(model), read_recorded(folder)
    calls = [(known.rank, call) for known in recorded.ranks if known is not None for call in known.calls]
    stopped, broken_off = (
        tuple(once((rank, call.index, _how_it_ended(call)) for rank, call in calls if call.status.startswith(how)))
        for how in ("failed", "cut off"))
    facts = dict(folder=str(recorded.folder), stopped=stopped, broken_off=broken_off, layouts=tuple(layout))
    try:
        recording = find_points(recorded, ckpt, names, tuple(layout))
        report = judge(recording, ckpt, recording.plan, by_local=True, kind=CheckReport, **facts)
        report.parameters = wrong_parameters(recording, ckpt)
    except TplabError:
        raise
    except Exception as error:  # the last resort: the user gets an answer to any recording
        nothing = Recording(recorded.world_size, [], [], [], [], {}, torch.float32)
        report = CheckReport(ckpt.name, ShardPlan.from_config(ckpt.config, 1), nothing.dtype, [], [], {},
                             checkpoint=ckpt, recording=nothing, **facts)
        report.local, report.failed = {}, internal_error("the placement", error)
    return report


def _how_it_ended(call) -> str:
    """A call's status, in the innermost module that its error ended; without one, in the module entered last."""
    ended = (module for module, _, error in (line.partition(": ") for line in call.raised) if error in call.status)
    place = next(ended, call.last)
    return call.status.rstrip(".") + (place and f", in {place}")

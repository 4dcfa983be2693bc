"""``check``: a folder that the recorder wrote, judged against the checkpoint of which the engine says it is."""

import os
from collections.abc import Mapping

from tplab.align.check.folder import read_recorded
from tplab.align.check.notes import once
from tplab.align.check.place import place
from tplab.align.check.verdict import CheckReport
from tplab.align.check.weights import wrong_parameters
from tplab.align.judge import judge
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.shard import ShardPlan


def check(folder: str | os.PathLike, model: str | Checkpoint, *, names: Mapping[str, str] | None = None
          ) -> CheckReport:
    """Judge any engine by what it recorded with ``tplab/record.py``.

    Every module is computed again from its own recorded inputs and the checkpoint's weights (*local*: is it guilty?),
    and all is compared with Hugging Face on the same ids (*global*: does it inherit an error?).

    Args:
        folder: the one that ``record(folder, …)`` wrote.
        model: the checkpoint that the engine runs: a name, folder or hub id, or an opened one.
        names: ``{pattern: point}`` for tensors whose names say nothing: ``{"blocks.{i}.mix.out": "o_proj"}``.

    Raises:
        RecordingError: the folder is no recording, or a damaged one.
        PlacementError: nothing in it can be placed in this model, or ``names`` are wrong.
        CheckpointError, ShardPlanError: as for :func:`tplab.align.align`.
    """
    ckpt = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    recorded = read_recorded(folder)
    plan = ShardPlan.from_config(ckpt.config, recorded.world_size)
    recording = place(recorded, ckpt, dict(names) if names else None)
    gone = [f"rank {rank} recorded nothing" for rank, found in enumerate(recorded.ranks) if found is None]
    ended = [(found.rank, call.index, call.status + (call.last and f", in {call.last}"))
             for found in recorded.ranks if found is not None for call in found.calls if call.status != "done"]
    stopped = [one for one in ended if one[2].startswith("failed")]
    return judge(recording, ckpt, plan, by_local=True, kind=CheckReport, folder=str(folder),
                 broken_off=(*gone, *once(one for one in ended if one not in stopped)), stopped=tuple(once(stopped)),
                 parameters=wrong_parameters(recording, ckpt))

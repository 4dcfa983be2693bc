"""Loading and slicing, without running anything: the recorded weights against the checkpoint, bit for bit."""

import torch

from tplab.align.local import Weights
from tplab.align.recording import Recording
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import EMBEDDING, HEAD


def wrong_parameters(recording: Recording, ckpt: Checkpoint) -> dict[str, str]:
    """``{"rank 1: tensor's name": what is wrong}``, empty where every recorded weight is the checkpoint's."""
    weights, wrong = {}, {}
    for rank, held in enumerate(recording.parameters):
        for name, parameter in (held or {}).items():
            # A norm's weight, say, may stand in float32 in a bfloat16 engine: as the file has it, or rounded before.
            for dtype in dict.fromkeys((recording.dtype, parameter.tensor.dtype)):
                tensors = weights.setdefault(dtype, Weights(ckpt, dtype, dtype))
                tied = name == HEAD and name not in tensors.parts
                right = tensors.raw(EMBEDDING if tied else name).to(parameter.tensor.dtype)
                if parameter.dim is not None:
                    right = right.index_select(parameter.dim, torch.tensor(list(parameter.indices), dtype=torch.long))
                if torch.equal(parameter.tensor, right):
                    break
            else:
                ours, what = parameter.tensor, f"shape {list(parameter.tensor.shape)}, not {list(right.shape)}"
                if ours.shape == right.shape:
                    what = f"{(ours != right).double().mean().item():.0%} of its numbers are not the checkpoint's"
                wrong[f"rank {rank}: {name}"] = what
    return wrong

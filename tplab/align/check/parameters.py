"""Loading and slicing, without running anything: the recorded weights against the checkpoint, bit for bit."""

import torch

from tplab.align.local import Weights
from tplab.align.recording import Recording
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import EMBEDDING, HEAD


def wrong_parameters(recording: Recording, ckpt: Checkpoint) -> dict[str, str]:
    """``{"rank 1: tensor's name": what is wrong}``, empty where every recorded weight is the checkpoint's."""
    weights, wrong = Weights(ckpt, recording.dtype, recording.dtype), {}
    for rank, held in enumerate(recording.parameters):
        for name, parameter in (held or {}).items():
            tied = name == HEAD and name not in weights.parts
            right = weights.raw(EMBEDDING if tied else name).to(parameter.tensor.dtype)
            if parameter.dim is not None:
                right = right.index_select(parameter.dim, torch.tensor(list(parameter.indices), dtype=torch.long))
            ours = parameter.tensor
            if ours.shape != right.shape:
                wrong[f"rank {rank}: {name}"] = f"shape {list(ours.shape)}, not {list(right.shape)}"
            elif not torch.equal(ours, right):
                share = (ours != right).double().mean().item()
                wrong[f"rank {rank}: {name}"] = f"{share:.0%} of its numbers are not the checkpoint's"
    return wrong

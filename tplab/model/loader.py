"""From checkpoint to rank: each parameter keeps its slices of the tensors that the layout names for it."""

from dataclasses import dataclass
from typing import Any

import torch

from tplab.checkpoint.layout import by_parameter, sources, tensor_parts
from tplab.model.decoder import TensorParallelCausalLM
from tplab.shard import ShardPlan


@dataclass(frozen=True)
class LoadStats:
    """What loading cost this rank: bytes read from the checkpoint, bytes of parameters held."""

    bytes_read: int
    parameter_bytes: int


def load_model(ckpt, plan: ShardPlan, dtype: torch.dtype = torch.float32, only: int | None = None
               ) -> TensorParallelCausalLM:
    """Build this rank's part of the model and fill it, reading only the slices that the plan gives to this rank.

    Its ``load_stats`` say what that cost. The names and shapes of an opened checkpoint's tensors are checked already;
    their values are converted to ``dtype``. ``only``: one layer alone; -1: the ends of the model alone.
    """
    model = TensorParallelCausalLM(ckpt.config, plan, dtype, only)
    # Under expert parallelism, other experts are on other ranks only.
    here: dict[str, Any] = dict(model.named_parameters())
    with ckpt.reader() as reader:
        for path, parts in by_parameter(tensor_parts(ckpt.config, ckpt.tensors)).items():
            if path in here and (only is None or only < 0 or path.startswith("layers.")):
                here[path].weight_loader(*sources(list(parts.values()), reader))
        model.load_stats = LoadStats(reader.bytes_read, sum(p.numel() * p.element_size() for p in model.parameters()))
    return model.eval()

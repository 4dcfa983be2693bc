"""From checkpoint to rank: each parameter keeps its slices of the tensors that the layout names for it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tplab.checkpoint.layout import by_parameter, sources, tensor_parts
from tplab.model.decoder import TensorParallelCausalLM
from tplab.shard import Piece, ShardPlan


@dataclass(frozen=True)
class LoadStats:
    """What loading cost this rank: bytes read from the checkpoint, bytes of parameters held."""

    bytes_read: int
    parameter_bytes: int


def load_model(ckpt, plan: ShardPlan, dtype: torch.dtype = torch.float32) -> TensorParallelCausalLM:
    """Build this rank's part of the model and fill it, reading only the slices that the plan gives to this rank.

    Args:
        ckpt: an opened :class:`tplab.checkpoint.Checkpoint` (its tensors' names and shapes are checked already).
        plan: the shard plan for as many ranks as there are.
        dtype: of weights and activations; the checkpoint's values are converted.

    Returns:
        The model, with ``load_stats`` (:class:`LoadStats`).
    """
    model = TensorParallelCausalLM(ckpt.config, plan, dtype)
    with ckpt.reader() as reader:
        for path, parts in by_parameter(tensor_parts(ckpt.config, ckpt.tensors)).items():
            model.get_parameter(path).weight_loader(*sources(parts.values(), reader))
        model.load_stats = LoadStats(reader.bytes_read, sum(p.numel() * p.element_size() for p in model.parameters()))
    return model.eval()


def model_pieces(model: TensorParallelCausalLM) -> Iterator[Piece]:
    """Every parameter of this rank, cut into its pieces of the checkpoint's tensors, by Hugging Face's names."""
    for path, parts in by_parameter(tensor_parts(model.config, ())).items():
        parameter = model.get_parameter(path)
        tensors = parameter.data.split([len(rows) for rows in parameter.ranges], parameter.dim)
        for name, rows, tensor in zip(parts, parameter.ranges, tensors, strict=True):
            yield Piece(name, parameter.dim, rows, tensor)

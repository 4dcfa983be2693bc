"""From checkpoint to rank: which checkpoint tensors fill which module, and which slices of them are read.

A module knows how to cut its tensors (``load``) and how to name its pieces (``pieces``); the table below knows only
where a merged module's parts stand in a checkpoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tplab.model.decoder import TensorParallelCausalLM
from tplab.shard import Piece, ShardPlan

PACKED_MODULES = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class LoadStats:
    """What loading cost this rank: bytes read from the checkpoint, bytes of parameters held."""

    bytes_read: int
    parameter_bytes: int


def checkpoint_names(path: str) -> list[str]:
    """A module's path in the model → the checkpoint's names for it; several where the checkpoint keeps parts apart."""
    head, _, last = path.rpartition(".")
    prefix = "" if path == "lm_head" else "model."
    return [f"{prefix}{head}{'.' * bool(head)}{name}" for name in PACKED_MODULES.get(last, (last,))]


def _modules(model: TensorParallelCausalLM):
    for path, module in model.named_modules():
        if hasattr(module, "pieces") and not (path == "lm_head" and model.config.tie_word_embeddings):
            yield path, module


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
        for path, module in _modules(model):
            names = checkpoint_names(path)
            fused = f"model.{path}"
            for kind, _ in module.named_parameters(recurse=False):
                whole = names[0] if len(names) == 1 else fused
                if f"{whole}.{kind}" in ckpt.tensors:
                    module.load(kind, reader[f"{whole}.{kind}"])
                else:
                    module.load(kind, [reader[f"{name}.{kind}"] for name in names])
        model.load_stats = LoadStats(reader.bytes_read, sum(p.numel() * p.element_size() for p in model.parameters()))
    return model.eval()


def separate_tensor(ckpt, reader, name: str) -> torch.Tensor:
    """A whole tensor by its separate name (``…q_proj.weight``), cut out of the fused one if the checkpoint fuses it."""
    if name in ckpt.tensors:
        return reader[name][:]
    c = ckpt.config
    head, last, kind = name.rsplit(".", 2)
    fused, parts = next((fused, parts) for fused, parts in PACKED_MODULES.items() if last in parts)
    sizes = {"qkv_proj": [c.num_heads * c.head_dim, *[c.num_kv_heads * c.head_dim] * 2],
             "gate_up_proj": [c.intermediate_size] * 2}[fused]
    return reader[f"{head}.{fused}.{kind}"][:].split(sizes)[parts.index(last)]


def model_pieces(model: TensorParallelCausalLM) -> Iterator[Piece]:
    """Every parameter of this rank, under the name of the checkpoint tensor it was cut from."""
    for path, module in _modules(model):
        yield from module.pieces(checkpoint_names(path))

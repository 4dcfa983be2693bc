"""The tplab side: run a prompt on the ranks, bring every trace point back, put the shards into HF's layout."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tplab.align.points import layout
from tplab.checkpoint.layout import by_parameter, tensor_parts
from tplab.model import LoadStats, NoCache, TensorParallelCausalLM, load_model
from tplab.model.trace import recording
from tplab.ranks import OpRecord, op_log
from tplab.shard import ShardPlan


def trace_on_rank(ckpt, plan: ShardPlan, dtype: torch.dtype, prompts: list[list[int]]
                  ) -> tuple[dict[str, torch.Tensor], list[OpRecord], LoadStats]:
    """On every rank: load, one forward pass over all prompts → its trace points, its collectives, what loading cost."""
    with torch.inference_mode():
        model = load_model(ckpt, plan, dtype)
        lengths = [len(prompt) for prompt in prompts]
        input_ids = torch.tensor([token for prompt in prompts for token in prompt])
        positions = torch.cat([torch.arange(length) for length in lengths])
        before = max((record.seq for record in op_log()), default=0)
        with recording() as points:
            model.compute_logits(model(input_ids, positions, NoCache(lengths)))
    return points, [record for record in op_log() if record.seq > before], model.load_stats


def whole_point(name: str, shards: list[torch.Tensor], plan: ShardPlan) -> tuple[torch.Tensor, float]:
    """One trace point of all ranks → the tensor Hugging Face has, and the largest disagreement between ranks.

    Ranks can disagree only about what more than one of them holds: replicated tensors and replicated KV heads.
    """
    how = layout(name)
    if how == "partial":
        return torch.stack(shards).sum(0), 0.0
    if how == "replicated":
        return shards[0], max((_distance(shard, shards[0]) for shard in shards[1:]), default=0.0)
    if how in ("mlp", "vocab"):
        return torch.cat(shards, dim=-1), 0.0
    heads: dict[int, torch.Tensor] = {}
    spread = 0.0
    for shard, tensor in zip(plan.ranks, shards, strict=True):
        for head, values in zip(getattr(shard, how), tensor.unbind(1), strict=True):
            if head in heads:
                spread = max(spread, _distance(values, heads[head]))
            heads.setdefault(head, values)
    return torch.stack([heads[head] for head in sorted(heads)], 1), spread


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference; equal NaNs and infinities count as agreement, unequal ones as infinitely far."""
    both = torch.isfinite(a) & torch.isfinite(b)
    if not torch.allclose(a.masked_fill(both, 0), b.masked_fill(both, 0), rtol=0, atol=0, equal_nan=True):
        return float("inf")
    return (a - b)[both].abs().max().item() if both.any() else 0.0


class Piece(NamedTuple):
    """One rank's part of one checkpoint tensor: ``tensor`` is ``[..., start:stop, ...]`` of it along ``dim``."""

    name: str
    dim: int
    rows: range
    tensor: torch.Tensor


def model_pieces(model: TensorParallelCausalLM) -> Iterator[Piece]:
    """Every parameter of this rank, cut into its pieces of the checkpoint's tensors, by Hugging Face's names."""
    for path, parts in by_parameter(tensor_parts(model.config, ())).items():
        parameter = model.get_parameter(path)
        tensors = parameter.data.split([len(rows) for rows in parameter.ranges], parameter.dim)
        for name, rows, tensor in zip(parts, parameter.ranges, tensors, strict=True):
            yield Piece(name, parameter.dim, rows, tensor)


def pieces_on_rank(ckpt, plan: ShardPlan, dtype: torch.dtype) -> list:
    """On every rank: every parameter with its checkpoint name and the rows it was cut from."""
    return list(model_pieces(load_model(ckpt, plan, dtype)))

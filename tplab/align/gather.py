"""The tplab side: runs a prompt on the ranks, collects every trace point, puts the shards into HF's layout."""

from collections.abc import Iterator
from math import isfinite
from typing import NamedTuple

import torch

from tplab.align.points import as_index, in_a_row, layout
from tplab.align.recording import Recording, Shard
from tplab.checkpoint.layout import by_parameter, tensor_parts
from tplab.model import LoadStats, NoCache, TensorParallelCausalLM, load_model
from tplab.model.trace import recording
from tplab.ranks import OpRecord, op_log
from tplab.shard import ShardPlan


class Trace(NamedTuple):
    """One rank's trace of a forward pass."""

    points: dict[str, torch.Tensor]
    op_log: list[OpRecord]  # its collectives
    load_stats: LoadStats  # the bytes read and held
    shapes: dict[str, tuple[int, ...]]  # of layer 0's q, k and v weights, as they stand in this rank's fused one


def trace_on_rank(ckpt, plan: ShardPlan, dtype: torch.dtype, prompts: list[list[int]]) -> Trace:
    """On every rank: load, and one forward pass over all prompts."""
    with torch.inference_mode():
        model = load_model(ckpt, plan, dtype)
        lengths = [len(prompt) for prompt in prompts]
        input_ids = torch.tensor([token for prompt in prompts for token in prompt])
        positions = torch.cat([torch.arange(length) for length in lengths])
        before = max((record.seq for record in op_log()), default=0)
        with recording() as points:
            model.compute_logits(model(input_ids, positions, NoCache(lengths)))
    qkv = model.layers[0].self_attn.qkv_proj
    shapes = {part: tuple(weight.shape) for part, weight in zip("qkv", qkv.weight.split(qkv.split_sizes))}
    return Trace(points, [record for record in op_log() if record.seq > before], model.load_stats, shapes)


def recorded(traces: list[dict[str, torch.Tensor]], plan: ShardPlan, dtype: torch.dtype, ids: list[list[int]],
             places: list[tuple[int, int]], num_keys: list[int], logit_places: list[tuple[int, int]],
             origins: list[tuple[int, int]] | None = None) -> Recording:
    """The lab's own traces, one per rank, as a :class:`Recording`: shares are the plan's, and without ``origins`` all
    rows are of one call."""
    def shard(name: str, rank: int) -> Shard:
        how = layout(name)
        shares = () if how in ("replicated", "partial") else getattr(plan.ranks[rank], how)
        return Shard(traces[rank][name], how, shares)
    points = {name: [shard(name, rank) for rank in range(len(traces))] for name in traces[0]
              if not name.endswith((".gate", ".up"))}
    return Recording(len(traces), ids, places, num_keys, logit_places, points, dtype,
                     origins or [(0, row) for row in range(len(places))])


def whole_point(name: str, shards: list[Shard | None]) -> tuple[torch.Tensor, float, list[int] | None]:
    """One trace point of all ranks → the whole tensor in Hugging Face's layout, the largest disagreement between ranks,
    and the heads, columns or vocabulary rows that the tensor holds (None: it is not dealt out).

    Ranks can disagree only where several hold the same: replicated tensors and replicated KV heads.
    """
    held = [shard for shard in shards if shard is not None]
    tensors = [shard.tensor for shard in held]
    if held[0].kind == "partial":
        return torch.stack(tensors).sum(0), 0.0, None
    if held[0].kind == "replicated":
        return tensors[0], max((_distance(tensor, tensors[0]) for tensor in tensors[1:]), default=0.0), None
    joined, held_indices = torch.cat(tensors, 1), [index for shard in held for index in shard.indices]
    if in_a_row(held_indices):  # one share behind the other
        return joined, 0.0, held_indices
    owner: dict[int, tuple[int, int]] = {}
    spread = 0.0
    for number, shard in enumerate(held):
        twice = [(i, *owner[index]) for i, index in enumerate(shard.indices) if index in owner]
        if twice:
            mine, number_before, theirs = (list(column) for column in zip(*twice))
            before = torch.stack([tensors[n][:, i] for n, i in zip(number_before, theirs)], 1)
            spread = max(spread, _distance(shard.tensor[:, mine], before))
        for i, index in enumerate(shard.indices):
            owner.setdefault(index, (number, i))
    indices = sorted(owner)
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + tensor.shape[1])
    return joined[:, as_index([starts[number] + i for number, i in map(owner.get, indices)])], spread, indices


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference; equal NaNs and infinities count as agreement, unequal ones as infinitely far."""
    if a is b or not a.numel():
        return 0.0
    if isfinite(gap := (a - b).abs_().max().item()):
        return gap
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
    parameters = dict(model.named_parameters())
    for path, parts in by_parameter(tensor_parts(model.config, ())).items():
        if path not in parameters:  # an expert that another rank holds
            continue
        parameter = parameters[path]
        tensors = parameter.data.split([len(rows) for rows in parameter.ranges], parameter.shard_dim)
        for name, rows, tensor in zip(parts, parameter.ranges, tensors, strict=True):
            yield Piece(name, parameter.shard_dim, rows, tensor)


def pieces_on_rank(ckpt, plan: ShardPlan, dtype: torch.dtype) -> list:
    """On every rank: every parameter with its checkpoint name and the rows it was cut from."""
    return list(model_pieces(load_model(ckpt, plan, dtype)))

"""Tensor-parallel attention: each rank computes the heads it owns; one all-reduce, behind ``o_proj``.

In float32 and float64 the arithmetic is that of Hugging Face's eager attention, casts included: scores in the working
dtype, softmax in float32, cast back, weighted sum. K and V are never repeated for grouped queries: the queries of a
group are laid below each other and meet their KV head in one product. A prompt's queries attend in tiles, in float32
with the same bits: see ``tiled_attention.py``; sequences that decode are not copied out of a paged cache first: see
``paged_attention.py``. What those leave over attends in bfloat16 in torch's fused attention, several times as quick as
step by step, and closer to the exact result: it rounds no scores. (In float32, one rank would no longer give Hugging
Face's bits by it.)
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from tplab.kernels.paged_attention import Paged, attend_paged
from tplab.kernels.product import is_widened
from tplab.kernels.softmax import masked_softmax
from tplab.kernels.tiled_attention import attend_tiled, tiled_for
from tplab.model.norm import RMSNorm
from tplab.model.rope import rotate
from tplab.model.trace import point
from tplab.ranks import rank
from tplab.shard import QKVParallelLinear, RowParallelLinear, ShardPlan

RUN = 128  # queries of one sequence that attend at once: 1 MB of float32 scores a head over 2,048 keys
LONG_RUN = 512  # by tiles, which hold the scores of 16 queries: keys are laid out for all of a run's queries at once


class AttentionBatch(NamedTuple):
    """Queries that can attend in one product.

    Attributes:
        rows: their rows among the flattened tokens (a slice or an index tensor), ``batch * queries`` of them.
        k, v: everything they may look at, ``[batch, kv heads here, keys, head_dim]``; as ``Paged`` only if
            :func:`is_own`.
        mask: ``[batch, 1, queries, keys]`` boolean, True where a query must *not* look.
    """

    rows: slice | torch.Tensor
    k: torch.Tensor | Paged
    v: torch.Tensor | Paged
    mask: torch.Tensor


class AttentionContext(Protocol):
    """Where keys and values come from: the prompt alone, or a cache. One per forward pass."""

    lengths: list[int] | list[tuple[int, int]]  # as :class:`tplab.model.rope.Rotary` takes them
    logits_indices: torch.Tensor | None  # the only tokens that the last layer goes on with; None: all

    def batches(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Iterator[AttentionBatch]:
        """Take the new ``[tokens, kv heads here, head_dim]`` keys and values in, give the batches out."""


def causal_mask(positions: torch.Tensor, keys: int) -> torch.Tensor:
    """``[batch, queries]`` absolute positions → boolean ``[batch, 1, queries, keys]``, True for keys in the future."""
    return (torch.arange(keys, device=positions.device) > positions[..., None])[:, None]


def mask_scores(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Hide the future. Selecting, not multiplying: ``0 * -inf`` is NaN."""
    return scores.masked_fill(mask, float("-inf"))


_SELECTS = mask_scores  # while no other stands in its place, it need not be a step of its own


def run_length(dtype: torch.dtype, head_dim: int) -> int:
    """How many queries of one sequence attend at once."""
    return LONG_RUN if tiled_for(dtype, head_dim) else RUN


def runs(start: int, count: int, length: int) -> Iterator[range]:
    """A sequence's new positions, cut at multiples of ``length``: so many queries attend at once.

    The scores of a long prompt are never all there: those of one run over all keys stay in the processor's cache.
    """
    end = start + count
    while start < end:
        stop = min(end, start // length * length + length)
        yield range(start, stop)
        start = stop


class NoCache:
    """The context of a plain forward pass over whole prompts, of these lengths: keys and values are the new ones.

    Each run is given all keys, those that it must not see too, as in Hugging Face: a float32 softmax over another
    length may round differently, even in a float64 model.
    """

    logits_indices = None

    def __init__(self, lengths: Sequence[int]):
        self.lengths = list(lengths)

    def batches(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Iterator[AttentionBatch]:
        start = 0
        for length in self.lengths:
            keys, values = (new[start:start + length].transpose(0, 1)[None] for new in (k, v))
            for run in runs(0, length, run_length(k.dtype, k.shape[2])):
                mask = causal_mask(torch.arange(run.start, run.stop, device=k.device)[None], length)
                yield AttentionBatch(slice(start + run.start, start + run.stop), keys, values, mask)
            start += length


def attend(q: torch.Tensor, k: torch.Tensor | Paged, v: torch.Tensor | Paged, mask: torch.Tensor, scaling: float
           ) -> torch.Tensor:
    """Masked softmax attention of grouped queries.

    Args:
        q: ``[batch, kv_heads * group, queries, head_dim]``; the queries of one KV head stand together.
        k, v: ``[batch, kv_heads, keys, head_dim]``.
        mask: ``[batch, 1, queries, keys]``, True = hidden.

    Returns:
        ``[batch, kv_heads * group, queries, head_dim]``.
    """
    if isinstance(k, Paged):
        attended = attend_paged(q, k, v, mask, scaling)
        if attended is not None:
            return attended
        k, v = k.gathered(), v.gathered()
    attended = attend_tiled(q, k, v, mask, scaling) if mask_scores is _SELECTS else None
    if attended is not None:
        return attended
    if q.dtype == torch.bfloat16:
        bias = _bias(mask, q.dtype)
        if bias is not None:
            return _fused(q, k, v, bias, scaling)
    batch, heads, queries, head_dim = q.shape
    groups, keys = batch * k.shape[1], k.shape[2]
    k, v = k.reshape(groups, keys, head_dim), v.reshape(groups, keys, head_dim)
    scores = torch.bmm(q.reshape(groups, -1, head_dim), k.transpose(1, 2)).view(batch, heads, queries, keys)
    weights = masked_softmax(scores, mask, scaling) if mask_scores is _SELECTS else None
    if weights is None:
        scores = mask_scores(scores.mul_(scaling), mask)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights.view(groups, -1, keys), v).view(batch, heads, queries, head_dim)


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """What the fused attention adds to scores; None if a row sees nothing, which is NaN in a softmax and 0 there.

    Made in the first layer and kept with the mask: a step's other layers get the same mask.
    """
    if not hasattr(mask, "bias"):
        bias = mask_scores(torch.zeros(mask.shape, dtype=dtype), mask)
        mask.bias = bias if bias.amax(dim=-1).min() > float("-inf") else None
    return mask.bias


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, scaling: float) -> torch.Tensor:
    if is_widened(q.dtype):
        return _fused(q.float(), k.float(), v.float(), bias.float(), scaling).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling, enable_gqa=True)


class TensorParallelAttention(nn.Module):
    """Self-attention over this rank's heads; ``config`` is a :class:`tplab.checkpoint.ModelConfig`."""

    def __init__(self, config, plan: ShardPlan, layer: int, dtype: torch.dtype):
        super().__init__()
        self.layer, self.scaling = layer, config.head_dim ** -0.5
        self.groups = plan.ranks[rank()].kv_groups
        self.rotate = rotate(config.model_type)
        self.qkv_proj = QKVParallelLinear(config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads,
                                          shards=plan.ranks, bias=config.qkv_bias, dtype=dtype)
        columns = [range(s.q_heads.start * config.head_dim, s.q_heads.stop * config.head_dim) for s in plan.ranks]
        self.o_proj = RowParallelLinear(config.num_heads * config.head_dim, config.hidden_size, parts=columns,
                                        bias=config.o_bias, dtype=dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype) if config.qk_norm else None

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
                ) -> torch.Tensor:
        """``[tokens, hidden]`` → ``[tokens, hidden]``, whole on every rank."""
        name = f"layers.{self.layer}."
        q, k, v = self.qkv_proj.split_heads(self.qkv_proj(x))
        point(name + "q", q), point(name + "k", k), point(name + "v", v)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
            point(name + "q_norm", q), point(name + "k_norm", k)
        q, k = self.apply_rope(q, k, cos, sin)
        point(name + "q_rope", q), point(name + "k_rope", k)
        out = self.attend_all(q, k, v, context)
        point(name + "attn", out)
        partial = self.o_proj.partial(out.flatten(1))
        point(name + "o_partial", partial)
        out = self.o_proj.reduce(partial)
        point(name + "o_proj", out)
        return out

    def apply_rope(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
                   ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q and k, ``[tokens, heads, head_dim]``, in the layout that Hugging Face's function expects."""
        q, k = self.rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        return q[0].transpose(0, 1), k[0].transpose(0, 1)

    def attend_all(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: AttentionContext
                   ) -> torch.Tensor:
        """Attention of all flattened tokens, ``[tokens, heads here, head_dim]``, batch by batch of the context."""
        out = None
        for rows, keys, values, mask in context.batches(self.layer, k, v):
            batch, _, queries, _ = mask.shape
            q_rows = q[rows].view(batch, queries, *q.shape[1:]).transpose(1, 2)
            attended = [attend(q_rows[:, heads.start:heads.stop], keys[:, kv.start:kv.stop],
                               values[:, kv.start:kv.stop],
                               mask, self.scaling) for heads, kv in self.groups]
            whole = (attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)).transpose(1, 2).flatten(0, 1)
            if len(whole) == len(q):
                return whole
            out = torch.empty_like(q) if out is None else out
            out[rows] = whole
        return out


_OWN = attend, mask_scores, causal_mask, TensorParallelAttention.attend_all


def is_own() -> bool:
    """Whether attention is done here: no other function, a fault's or a learner's, stands in a place of these."""
    return _OWN == (attend, mask_scores, causal_mask, TensorParallelAttention.attend_all)

"""Tensor-parallel attention: each rank computes its own heads; one all-reduce, after ``o_proj``.

The arithmetic is that of Hugging Face's eager attention, casts included: scores in the working dtype, softmax in
float32, cast back, weighted sum. K and V are never repeated for grouped queries: the queries of a group are stacked and
multiplied with their KV head in one product.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from tplab.model.norm import FullWidthNorm, make_norm, norm_each_head
from tplab.model.rope import no_rotation, rotate
from tplab.model.trace import point
from tplab.ranks import rank
from tplab.shard import QKVParallelLinear, RowParallelLinear, ShardPlan
from tplab.shard.linear import column_shard
from tplab.shard.parameter import sharded_parameter


class AttentionBatch(NamedTuple):
    """Queries that can attend in one product.

    Attributes:
        rows: their rows among the flattened tokens (a slice or an index tensor), ``batch * queries`` of them.
        k, v: everything they may look at, ``[batch, kv heads here, keys, head_dim]``.
        mask: ``[batch, 1, queries, keys]`` boolean, True where a query must *not* look.
    """

    rows: slice | torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor


class AttentionContext(Protocol):
    """Where keys and values come from: the prompt alone, or a cache. One per forward pass."""

    lengths: list[int] | list[tuple[int, int]]  # as :class:`tplab.model.rope.Rotary` takes them

    def batches(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Iterator[AttentionBatch]:
        """Store the new ``[tokens, kv heads here, head_dim]`` keys and values; yield the batches."""


def causal_mask(positions: torch.Tensor, keys: int) -> torch.Tensor:
    """``[batch, queries]`` absolute positions → boolean ``[batch, 1, queries, keys]``, True for keys in the future."""
    return (torch.arange(keys, device=positions.device) > positions[..., None])[:, None]


def within_window(mask: torch.Tensor, window: int) -> torch.Tensor:
    """Also hide the keys ``window`` tokens or more before a query; its own key is the first of the window.

    ``mask`` is causal, ``[batch, 1, queries, keys]``, with any part of the sequence cached.
    """
    seen = (~mask).sum(-1, keepdim=True)
    return mask | (torch.arange(mask.shape[-1], device=mask.device) < seen - window)


def mask_scores(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Hide the future. Selecting, not multiplying: ``0 * -inf`` is NaN."""
    return scores.masked_fill(mask, float("-inf"))


class NoCache:
    """The context of a plain forward pass over whole prompts, of these lengths: keys and values are the new ones."""

    def __init__(self, lengths: Sequence[int]):
        self.lengths = list(lengths)

    def batches(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Iterator[AttentionBatch]:
        start = 0
        for length in self.lengths:
            rows = slice(start, start + length)
            keys, values = (new[rows].transpose(0, 1)[None] for new in (k, v))
            yield AttentionBatch(rows, keys, values, causal_mask(torch.arange(length, device=k.device)[None], length))
            start += length


def softmax(scores: torch.Tensor) -> torch.Tensor:
    """Weights of all keys, in float32 as Hugging Face has them."""
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The same with one sink per head: a score that counts in the softmax's sum and has no value (gpt-oss)."""
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    every = torch.cat([scores, column], dim=-1)
    return torch.softmax(every - every.amax(-1, keepdim=True), dim=-1)[..., :-1]  # in the working dtype


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Keep ``x`` within ``cap``, smoothly (arXiv:2408.00118)."""
    return torch.tanh(x / cap) * cap


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float, *,
           softcap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Masked softmax attention of grouped queries.

    Args:
        q: ``[batch, kv_heads * group, queries, head_dim]``; the queries of one KV head stand together.
        k, v: ``[batch, kv_heads, keys, head_dim]``.
        mask: ``[batch, 1, queries, keys]``, True = hidden.
        softcap: scores stay within it.
        sinks: ``[kv_heads * group]``.

    Returns:
        ``[batch, kv_heads * group, queries, head_dim]``.
    """
    batch, heads, queries, head_dim = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, head_dim)
    scores = (grouped @ k.transpose(2, 3)).view(batch, heads, queries, -1) * scaling
    scores = mask_scores(scores if softcap is None else soft_cap(scores, softcap), mask)
    weights = softmax(scores) if sinks is None else softmax_with_sinks(scores, sinks)
    return (weights.view(*grouped.shape[:3], -1) @ v).view(q.shape)


class TensorParallelAttention(nn.Module):
    """Self-attention over this rank's heads; ``config`` is a :class:`tplab.checkpoint.ModelConfig`."""

    def __init__(self, config, plan: ShardPlan, layer: int, dtype: torch.dtype):
        super().__init__()
        self.layer, self.scaling, self.window = layer, config.scaling, config.windows[layer]
        self.shard, self.groups = plan.ranks[rank()], plan.ranks[rank()].kv_groups
        self.rotate = rotate(config.model_type) if config.rotates[layer] else no_rotation
        self.qkv_proj = QKVParallelLinear(config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads,
                                          shards=plan.ranks, bias=config.qkv_bias, dtype=dtype)
        columns = [range(s.q_heads.start * config.head_dim, s.q_heads.stop * config.head_dim) for s in plan.ranks]
        self.o_proj = RowParallelLinear(config.num_heads * config.head_dim, config.hidden_size, parts=columns,
                                        bias=config.o_bias, dtype=dtype)
        self.q_norm = self.k_norm = self.sinks = None
        if config.qk_norm:
            full = config.full_width_qk_norm
            self.q_norm = make_norm(config, config.q_size if full else config.head_dim, dtype)
            self.k_norm = make_norm(config, config.kv_size if full else config.head_dim, dtype)
            self.norm_heads = FullWidthNorm(plan) if full else norm_each_head
        self.options = {} if config.attn_logit_softcapping is None else {"softcap": config.attn_logit_softcapping}
        if config.sinks:
            heads = self.shard.q_heads
            self.sinks = sharded_parameter(self, "sinks", torch.empty(len(heads), dtype=dtype), [heads])

    def load(self, parameter: str, source) -> None:
        """Fill ``"sinks"``: those of this rank's heads."""
        getattr(self, parameter).data.copy_(column_shard(source, self.shard.q_heads))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
                ) -> torch.Tensor:
        """``[tokens, hidden]`` → ``[tokens, hidden]``, whole on every rank."""
        name = f"layers.{self.layer}."
        q, k, v = self.qkv_proj.split_heads(self.qkv_proj(x))
        q, k, v = (point(name + what, x) for what, x in (("q", q), ("k", k), ("v", v)))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.norm_heads(self.q_norm, self.k_norm, q, k)
            q, k = point(name + "q_norm", q), point(name + "k_norm", k)
        q, k = self.apply_rope(q, k, cos, sin)
        q, k = point(name + "q_rope", q), point(name + "k_rope", k)
        out = self.attend_all(q, k, v, context)
        out = point(name + "attn", out)
        partial = self.o_proj.partial(out.flatten(1))
        partial = point(name + "o_partial", partial)
        out = self.o_proj.reduce(partial)
        return point(name + "o_proj", out)

    def apply_rope(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
                   ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q and k, ``[tokens, heads, head_dim]``, in the layout that Hugging Face's function expects."""
        q, k = self.rotate(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
        return q[0].transpose(0, 1), k[0].transpose(0, 1)

    def attend_all(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: AttentionContext
                   ) -> torch.Tensor:
        """Attention of all flattened tokens, ``[tokens, heads here, head_dim]``, batch by batch of the context."""
        out = torch.empty_like(q)
        for rows, keys, values, mask in context.batches(self.layer, k, v):
            batch, _, queries, _ = mask.shape
            mask = mask if self.window is None else within_window(mask, self.window)
            q_rows = q[rows].view(batch, queries, *q.shape[1:]).transpose(1, 2)
            attended = [self.attend(heads, q_rows[:, heads.start:heads.stop], keys[:, kv.start:kv.stop],
                                    values[:, kv.start:kv.stop], mask)
                        for heads, kv in self.groups]
            out[rows] = torch.cat(attended, dim=1).transpose(1, 2).flatten(0, 1)
        return out

    def attend(self, heads: range, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
               ) -> torch.Tensor:
        """Attention of some of this rank's heads; shapes as in :func:`attend`."""
        return attend(q, k, v, mask, self.scaling, **self.options_of(heads))

    def options_of(self, heads: range) -> dict:
        """Options of :func:`attend` for these heads: sinks and a cap, where the model has them."""
        return self.options if self.sinks is None else {"sinks": self.sinks[heads.start:heads.stop], **self.options}

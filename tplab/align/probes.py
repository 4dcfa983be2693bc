"""Bugs beside the museum's: as broken code of the lab's engine, a few lines each, for names alone.

A probe is made with each of its values; the first ones are asked first.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from tplab.patch import Patch, original
from tplab.ranks import all_reduce, rank, world_size


@dataclass(frozen=True)
class Probe:
    """A bug with one of its values."""

    name: str
    title: str
    patches: tuple[Patch, ...]


PROBES: list[tuple] = []  # (name, target, title, values, the function that makes the replacement)


def probe(name: str, target: str, title: str, values: Callable[[object], Iterable] | Iterable = (None,)) -> Callable:
    """Mark ``make(value)``, which returns what replaces ``target``; ``values(config)``: those to be tried."""
    def mark(make):
        PROBES.append((name, target, title, values, make))
        return make
    return mark


def probes(config) -> Iterable[Probe]:
    """Every probe with every value, for a model."""
    for name, target, title, values, make in PROBES:
        for value in values(config) if callable(values) else values:
            wrong = make(value)
            yield Probe(name, title.format(value), tuple(Patch(f"tplab.{one}", wrong) for one in target.split()))


_ATT, _LIN = "model.attention", "shard.linear"
_attend, _softmax, _mask = f"{_ATT}.attend", f"{_ATT}.mask_scores", f"{_ATT}.causal_mask cache.paged.causal_mask"
_rope, _rotary = f"{_ATT}.TensorParallelAttention.apply_rope", "model.rope.Rotary.__call__"


def _was(target: str) -> Callable:
    return original(f"tplab.{target.split()[0]}")


# Attention.

@probe("mask_off_by_one", _mask, "the mask's diagonal is off by {:+}", (1, -1))
def _(shift):
    return lambda positions, keys: _was(_mask)(positions + shift, keys) & ~(
        (torch.arange(keys) == 0) & (positions[..., None] == 0))[:, None]


@probe("softmax_scale", _attend, "scores are multiplied with head_dim ** {}, not with the model's scale",
       (0.0, -1.0, 0.5, -0.5))
def _(power):
    return lambda q, k, v, mask, scaling, **more: _was(_attend)(q, k, v, mask, q.shape[-1] ** power, **more)


@probe("mask_of_another_row", _mask, "all rows of a batch have the mask of its first one")
def _(_):
    return lambda positions, keys: _was(_mask)(positions[:1].expand_as(positions), keys)


@probe("mask_misused", _softmax, "the mask is added as {}, where it must hide", (1.0, -1.0))
def _(value):
    return lambda scores, mask: scores + mask.to(scores.dtype) * value


@probe("mask_inverted", _softmax, "the mask is the wrong way round")
def _(_):
    return lambda scores, mask: scores.masked_fill(~mask, float("-inf"))


@probe("mask_without_past", _mask, "the mask begins at the first key, not behind the cached ones")
def _(_):
    return lambda positions, keys: _was(_mask)(positions - positions[:, :1], keys)


@probe("cache_not_read", _mask, "tokens see their own call alone")
def _(_):
    return lambda positions, keys: _was(_mask)(positions, keys) | (torch.arange(keys) < positions[:, :1, None])[:, None]


@probe("sliding_window", _mask, "each token sees the last {} tokens alone", lambda config: (
    4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 128, 256, 512, 1024) * (not any(config.windows)))
def _(size):
    return lambda positions, keys: _was(_mask)(positions, keys) | (
        torch.arange(keys) <= positions[..., None] - size)[:, None]


# RoPE.

def _head(change: Callable) -> Callable:
    """``change(rotated, x, cos, sin)`` of q and of k."""
    def wrong(self, q, k, cos, sin):
        return tuple(change(y, x, cos, sin) for x, y in zip((q, k), _was(_rope)(self, q, k, cos, sin)))
    return wrong


@probe("rope_partial", _rope, "only the first 1/{} of a head is turned", (2, 4))
def _(share):
    def change(y, x, cos, sin):
        part = x.shape[-1] // share
        front, (cos, sin) = x[..., :part], (table[0, :, None, :part // 2].repeat(1, 1, 2) for table in (cos, sin))
        a, b = front.chunk(2, -1)
        return torch.cat([front * cos + torch.cat([-b, a], -1) * sin, x[..., part:]], -1)
    return _head(change)


@probe("rope_partial", _rope, "only the first 1/{} of the pairs is turned", (2, 4))
def _(share):
    def wrong(self, q, k, cos, sin):
        half = cos.shape[-1] // 2
        still = torch.arange(cos.shape[-1]) % half >= half // share
        return _was(_rope)(self, q, k, cos.masked_fill(still, 1), sin.masked_fill(still, 0))
    return wrong


@probe("rope_direction", _rope, "it is turned the other way round")
def _(_):
    return lambda self, q, k, cos, sin: _was(_rope)(self, q, k, cos, -sin)


@probe("rope_twice", _rope, "it is turned twice")
def _(_):
    return lambda self, q, k, cos, sin: _was(_rope)(self, *_was(_rope)(self, q, k, cos, sin), cos, sin)


@probe("rope_dtype", _rotary, "the frequencies, the angles, cos and sin are computed in {}", [
    (dtype, stages) for dtype in (torch.bfloat16, torch.float16) for stages in ("f", "p", "t", "pfa", "pfat", "a")])
def _(value):
    dtype, stages = value

    def few(x, stage):
        return x.to(dtype).float() if stage in stages else x

    def wrong(self, x, positions, lengths, *kind):
        turn = few(few(positions[:, None].float(), "p") * few(self.embedding.inv_freq[None].float(), "f"), "a")
        turn = torch.cat([turn, turn], -1)[None]
        scale = getattr(self.embedding, "attention_scaling", 1.0)
        return tuple(few(table * scale, "t").to(x.dtype) for table in (turn.cos(), turn.sin()))
    return wrong


@probe("rope_theta", _rotary, "it is right for theta {:g}", (1e3, 1e5, 5e5, 1e6, 1e7))
def _(theta):
    def wrong(self, x, positions, lengths, *kind):
        size = 2 * self.embedding.inv_freq.shape[-1]
        turn = positions[:, None] * (theta ** (-torch.arange(0, size, 2) / size))[None]
        turn = torch.cat([turn, turn], -1)[None]
        return turn.cos().to(x.dtype), turn.sin().to(x.dtype)
    return wrong


# Weights and products.

@probe("gate_up_order", "model.mlp.GatedMLP.gated", "gate and up change places")
def _(_):
    def wrong(self, x):
        up, gate = self.gate_up_proj.split(self.gate_up_proj(x))
        return self.act(gate) * up
    return wrong


@probe("wrong_activation", "model.mlp.GatedMLP.gated", "the activation is {}", ("gelu", "relu", "tanh", "sigmoid"))
def _(name):
    act = {"gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid}[name]

    def wrong(self, x):
        gate, up = self.gate_up_proj.split(self.gate_up_proj(x))
        return act(gate) * up
    return wrong


def _permuted(permute: Callable, parts: str) -> Callable:
    def wrong(self, parameter, *sources):
        rows = [source[part.start:part.stop] for source, part in zip(sources, self.ranges)]
        for i, part in enumerate("qkv"):
            if part in parts:
                heads = rows[i].unflatten(0, (-1, self.head_size))
                rows[i] = heads[:, permute(torch.arange(self.head_size))].flatten(0, 1)
        getattr(self, parameter).data.copy_(torch.cat(rows))
    return wrong


@probe("rope_permuted_rows", f"{_LIN}.QKVParallelLinear.load", "the rows of each head of {0[1]} stand in another order "
       "(Meta's and Hugging Face's differ)", [(way, parts) for way in (0, 1) for parts in ("qk", "k", "q")])
def _(value):
    way, parts = value
    return _permuted(lambda i: i.view(2, -1).T.flatten() if way else i.view(-1, 2).T.flatten(), parts)


@probe("channel_scales", f"{_LIN}.merged_shard", "a rank's rows have the scales of the first rows")
def _(_):
    def wrong(sources, ranges):
        found = []
        for source, rows in zip(sources, ranges):
            whole = source[:]
            if whole.dim() == 1:
                found.append(whole[rows.start:rows.stop])
                continue
            scale = whole.abs().amax(1, keepdim=True)
            found.append(whole[rows.start:rows.stop] * scale[:len(rows)] / scale[rows.start:rows.stop])
        return torch.cat(found)
    return wrong


@probe("shard_of_another_rank", f"{_LIN}.merged_shard", "a rank has the rows of {}", ("the next rank", "rank 0"))
def _(which):
    def wrong(sources, ranges):
        other = (rank() + 1) % world_size() if which == "the next rank" else 0
        return torch.cat([source[other * len(rows):(other + 1) * len(rows)] for source, rows in zip(sources, ranges)])
    return wrong


@probe("bias_missing", f"{_LIN}.MergedColumnParallelLinear.forward", "the bias is left out")
def _(_):
    return lambda self, x: F.linear(x, self.weight)


# Sums, norms.

_reduce = f"{_LIN}.RowParallelLinear.reduce"


@probe("all_reduce_twice", _reduce, "the sum is reduced twice")
def _(_):
    return lambda self, partial: all_reduce(all_reduce(partial))


@probe("all_reduce_twice", "model.decoder.DecoderLayer.scaled", "the sublayer's output is added once for each rank")
def _(_):
    return lambda self, branch: branch * world_size()


@probe("buffer_reused", _reduce, "the first half of the rows is the sum of the second half: both went through one buffer")
def _(_):
    def wrong(self, partial):
        whole, half = all_reduce(partial), -(-len(partial) // 2)
        return torch.cat([whole[half:], whole[len(whole) - half:half], whole[half:]])
    return wrong


@probe("all_reduce_average", _reduce, "the summands are averaged")
def _(_):
    return lambda self, partial: all_reduce(partial) / world_size()


@probe("all_reduce_subset", _reduce, "rank {} is missing in the sum", range(8))
def _(missing):
    return lambda self, partial: all_reduce(partial * (rank() != missing))


@probe("norm_epsilon", "model.norm.RMSNorm.__init__", "its epsilon is {:g}", (1e-6, 1e-5, 1e-3, 1e-8, 0.0))
def _(eps):
    return lambda self, size, own, dtype=torch.float32: _was("model.norm.RMSNorm.__init__")(self, size, eps, dtype)


@probe("norm_missing", "model.norm.RMSNorm.forward", "there is no norm")
def _(_):
    return lambda self, x: x.clone()

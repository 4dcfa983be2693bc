"""More of what third-party engines do: RoPE, attention, sums."""

import torch
from helpers.mistakes import ATTENTION, EMBEDDING, MISTAKES, ROTARY, ROW, mistake
from torch.nn import functional as F

from tplab.patch import Patch, original
from tplab.ranks import all_reduce, rank, world_size

__all__ = ["MISTAKES"]


# RoPE.

def rope(change):
    def apply_rope(self, q, k, cos, sin):
        return change(self, q, k, cos, sin, lambda *args: original(f"{ATTENTION}.apply_rope")(self, *args))
    return Patch(f"{ATTENTION}.apply_rope", apply_rope)


def tables(change):
    """Another cos and sin from the positions and the head's size."""
    def call(self, x, positions, lengths):
        cos, sin = original(ROTARY)(self, x, positions, lengths)
        angles = change(positions, cos.shape[-1], self.config.rope_parameters["rope_theta"])
        angles = torch.cat([angles, angles], -1)[None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return Patch(ROTARY, call)


def frequencies(dim, theta):
    return theta ** (-torch.arange(0, dim, 2) / dim)


def partial(self, q, k, cos, sin, right):
    size = q.shape[-1] // 2
    cos, sin = (torch.cat([table[..., :size // 2]] * 2, -1) for table in (cos, sin))
    turned = right(q[..., :size], k[..., :size], cos, sin)
    return tuple(torch.cat([new, old[..., size:]], -1) for new, old in zip(turned, (q, k)))


def positions_as(change):
    def call(self, x, positions, lengths):
        return original(ROTARY)(self, x, change(positions, lengths), lengths)
    return Patch(ROTARY, call)


mistake("theta 1e6", "rope_theta", tables(lambda p, dim, theta: p[:, None] * frequencies(dim, 1e6)))
mistake("theta 12345", "rope_theta", tables(lambda p, dim, theta: p[:, None] * frequencies(dim, 12345.0)))
mistake("theta 10000", "rope_default_theta", tables(lambda p, dim, theta: p[:, None] * frequencies(dim, 10000.0)))
mistake("exponent over hidden / heads", "rope_theta", tables(
    lambda p, dim, theta: p[:, None] * theta ** (-torch.arange(0, dim, 2) / 16)), model="qwen2")
mistake("positions / 4", "rope_scaling", tables(lambda p, dim, theta: p[:, None] / 4 * frequencies(dim, theta)))
mistake("turned back", "rope_direction", rope(lambda self, q, k, cos, sin, right: right(q, k, cos, -sin)))
mistake("turned twice", "rope_twice", rope(
    lambda self, q, k, cos, sin, right: right(*right(q, k, cos, sin), cos, sin)))
mistake("cos and sin exchanged", "rope_terms", rope(lambda self, q, k, cos, sin, right: right(q, k, sin, cos)))
mistake("cos only", "rope_terms", rope(lambda self, q, k, cos, sin, right: right(q, k, cos, 0 * sin)))
mistake("sin only", "rope_terms", rope(lambda self, q, k, cos, sin, right: right(q, k, 0 * cos, sin)))
mistake("a mirror", "rope_terms", rope(lambda self, q, k, cos, sin, right: tuple(
    x * cos[0, :, None] + x.roll(x.shape[-1] // 2, -1) * sin[0, :, None] for x in (q, k))))
mistake("tables of neighbours", "rope_terms", rope(lambda self, q, k, cos, sin, right: right(
    q, k, *(table[..., :q.shape[-1] // 2].repeat_interleave(2, -1) for table in (cos, sin)))))
mistake("exponents upwards", "rope_terms", tables(
    lambda p, dim, theta: p[:, None] * theta ** (torch.arange(0, dim, 2) / dim)))
mistake("heads viewed", "rope_viewed", (f"{ATTENTION}.apply_rope", lambda self, q, k, cos, sin: tuple(
    x.reshape(q.shape) if x.shape[1] == q.shape[1] else x.reshape(k.shape) for x in self.rotate(
        q.reshape(1, q.shape[1], -1, q.shape[2]), k.reshape(1, k.shape[1], -1, k.shape[2]), cos, sin))))
mistake("half of the head", "rope_partial", rope(partial), model="qwen3")
mistake("bf16 tables", "rope_dtype", rope(lambda self, q, k, cos, sin, right: right(
    q, k, cos.bfloat16().to(q.dtype), sin.bfloat16().to(q.dtype))))
mistake("fp16 tables", "rope_dtype", rope(lambda self, q, k, cos, sin, right: right(
    q, k, cos.half().to(q.dtype), sin.half().to(q.dtype))))
mistake("q and k rounded before they turn", "low_precision", rope(lambda self, q, k, cos, sin, right: right(
    q.bfloat16().to(q), k.bfloat16().to(k), cos, sin)))
mistake("bf16 frequencies", "rope_dtype", tables(
    lambda p, dim, theta: p[:, None] * frequencies(dim, theta).bfloat16().float()))
mistake("bf16 angles", "rope_dtype", tables(
    lambda p, dim, theta: (p[:, None].bfloat16() * frequencies(dim, theta).bfloat16()).float()))
mistake("yarn without its factor", "rope_attention_factor", rope(
    lambda self, q, k, cos, sin, right: right(q, k, *(t / (cos[..., 0] ** 2 + sin[..., 0] ** 2).sqrt()[..., None]
                                                      for t in (cos, sin)))), model="yarn")
mistake("positions from 1", "rope_positions", positions_as(lambda p, lengths: p + 1))
mistake("positions from -1", "rope_positions", positions_as(lambda p, lengths: p - 1))
mistake("positions run on", "rope_positions", positions_as(lambda p, lengths: torch.arange(len(p))))
mistake("positions from the end", "rope_positions", positions_as(lambda p, lengths: torch.cat(
    [torch.arange(n).flip(0) for n in lengths])))


# Attention.

def attending(change):
    """``change(scores before scaling, mask, scaling, v) → out``, heads already repeated; the right scaling given."""
    def attend(q, k, v, mask, scaling):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return change(q @ k.transpose(2, 3), mask, scaling, v)
    return Patch("tplab.model.attention.attend", attend)


def scaled(number):
    return attending(lambda s, mask, scaling, v: softmax((s * number(v)).masked_fill(mask, float("-inf")), v) @ v)


def softmax(scores, v, dim=-1):
    return torch.softmax(scores.float(), dim).to(v.dtype)


def not_transposed(self, q, k, v, context):
    out = original(f"{ATTENTION}.attend_all")(self, q, k, v, context)
    return torch.cat([part.transpose(0, 1).reshape(part.shape) for part in out.split(context.lengths)])


def modulo(self, q, k, v, context):
    return own_heads(self, q, k, v, context, torch.arange(q.shape[1]) % k.shape[1])


def own_heads(self, q, k, v, context, reads):
    from tplab.model import attention
    out = torch.empty_like(q)
    for rows, keys, values, mask in context.batches(self.layer, k, v):
        out[rows] = attention.attend(q[rows].transpose(0, 1)[None], keys[:, reads], values[:, reads], mask,
                                     self.scaling)[0].transpose(0, 1)
    return out


def only_one_by_modulo(which):
    """``repeat`` for ``repeat_interleave``, of the keys alone or of the values alone."""
    def attend(q, k, v, mask, scaling):
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat(1, group, 1, 1) if name == which else x.repeat_interleave(group, 1)
                for name, x in (("k", k), ("v", v)))
        return original("tplab.model.attention.attend")(q, k, v, mask, scaling)
    return Patch("tplab.model.attention.attend", attend)


def one_causal_mask(self, q, k, v, context):
    from tplab.model import NoCache
    return original(f"{ATTENTION}.attend_all")(self, q, k, v, NoCache([len(q)]))


def values_turned(self, q, k, v, context):
    turned = []
    for part in v.split(context.lengths):
        angles = torch.arange(len(part))[:, None] * frequencies(v.shape[-1], 500000.0)
        angles = torch.cat([angles, angles], -1)[None]
        x = part.transpose(0, 1)[None]
        turned.append(self.rotate(x, x, angles.cos().to(x), angles.sin().to(x))[0][0].transpose(0, 1))
    return original(f"{ATTENTION}.attend_all")(self, q, k, torch.cat(turned), context)


def window(size):
    def causal_mask(positions, keys):
        key = torch.arange(keys)
        return ((key > positions[..., None]) | (key <= positions[..., None] - size))[:, None]
    return Patch("tplab.model.attention.causal_mask", causal_mask)


def shifted_mask(shift):
    def causal_mask(positions, keys):
        hidden = torch.arange(keys) > positions[..., None] + shift
        return (hidden & (torch.arange(keys) > 0))[:, None]
    return Patch("tplab.model.attention.causal_mask", causal_mask)


mistake("scores not scaled", "softmax_scale", scaled(lambda v: 1.0))
mistake("scores scaled twice", "softmax_scale", scaled(lambda v: 1 / v.shape[-1]))
mistake("scale of the hidden size", "softmax_scale", scaled(lambda v: 48 ** -0.5), model="qwen3")
mistake("scale of some number", "softmax_scale", scaled(lambda v: 0.2137))
mistake("window of 7", "sliding_window", window(7))
mistake("the next one too", "mask_off_by_one", shifted_mask(1))
mistake("not oneself", "mask_off_by_one", shifted_mask(-1))
mistake("mask times scores", "mask_misused", attending(
    lambda s, mask, scaling, v: softmax(s * scaling * ~mask, v) @ v))
mistake("mask behind the softmax", "mask_misused", attending(
    lambda s, mask, scaling, v: (softmax(s * scaling, v) * ~mask) @ v))
mistake("mask added as 1", "mask_misused", attending(
    lambda s, mask, scaling, v: softmax(s * scaling + mask.to(s), v) @ v))
mistake("no softmax", "softmax_missing", attending(lambda s, mask, scaling, v: (s * scaling * ~mask) @ v))
mistake("weights scaled", "softmax_scale", attending(
    lambda s, mask, scaling, v: softmax(s.masked_fill(mask, float("-inf")), v) * scaling @ v))
mistake("keys for values", "keys_for_values", Patch(
    "tplab.model.attention.attend",
    lambda q, k, v, mask, scaling: original("tplab.model.attention.attend")(q, k, k, mask, scaling)))
mistake("queries back", "attention_missing", Patch(
    "tplab.model.attention.attend", lambda q, k, v, mask, scaling: q.clone()))
mistake("softmax over queries", "softmax_dim", attending(
    lambda s, mask, scaling, v: softmax((s * scaling).masked_fill(mask, float("-inf")), v, -2) @ v))
mistake("heads not transposed", "heads_not_transposed", (f"{ATTENTION}.attend_all", not_transposed))
mistake("KV heads by modulo", "query_to_kv", (f"{ATTENTION}.attend_all", modulo), model="wide")
mistake("values by modulo", "query_to_kv", only_one_by_modulo("v"), model="wide")
mistake("keys by modulo", "query_to_kv", only_one_by_modulo("k"), model="wide")
mistake("KV head 0", "query_to_kv", (f"{ATTENTION}.attend_all", lambda self, q, k, v, context: own_heads(
    self, q, k, v, context, torch.zeros(q.shape[1], dtype=torch.long))), model="wide")
mistake("sequences see each other", "cross_sequence_attention", (f"{ATTENTION}.attend_all", one_causal_mask))
mistake("values turned too", "rope_on_values", (f"{ATTENTION}.attend_all", values_turned))


# Sums.

def reduced(change):
    def reduce(self, partial):
        return change(partial)
    return Patch(f"{ROW}.reduce", reduce)


def only_some(partial):
    return all_reduce(partial if rank() else partial * 0)


def every_bias(self, x):
    return F.linear(x, self.weight, self.bias)


mistake("reduced twice", "all_reduce_twice", reduced(lambda partial: all_reduce(all_reduce(partial))))
mistake("averaged", "all_reduce_average", reduced(lambda partial: all_reduce(partial) / world_size()))
mistake("rank 0 left out", "all_reduce_subset", reduced(only_some))
mistake("embedding not reduced", "all_reduce_missing", (EMBEDDING, lambda self, ids: _own_rows(self, ids)))
mistake("embedding reduced twice", "all_reduce_twice", (EMBEDDING, lambda self, ids: all_reduce(
    original(EMBEDDING)(self, ids))))


def _own_rows(self, ids):
    from tplab.shard.embedding import local_ids
    here, elsewhere = local_ids(ids, self.rows)
    return F.embedding(here, self.weight).masked_fill_(elsewhere[..., None], 0)

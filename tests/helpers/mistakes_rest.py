"""More of what third-party engines do: the residual stream, the MLP, the two ends, digits."""

import torch
from helpers.mistakes import DECODER, EMBEDDING, HEAD, MISTAKES, NORM, ROW, loaded, mistake
from torch.nn import functional as F

from tplab.model.trace import point
from tplab.patch import original
from tplab.ranks import rank, world_size

__all__ = ["MISTAKES"]


# The residual stream.

def layer(residual, output):
    """``residual(x, normed, attention)`` and ``output(x, r, normed, mlp)``: the two additions."""
    def forward(self, hidden, cos, sin, context):
        name = f"layers.{self.layer}."
        normed = self.input_layernorm(hidden)
        point(name + "input_norm", normed)
        r = residual(hidden, normed, self.self_attn(normed, cos, sin, context))
        point(name + "residual", r)
        normed = self.post_attention_layernorm(r)
        point(name + "post_norm", normed)
        out = output(hidden, r, normed, self.mlp(normed))
        point(name + "output", out)
        return out
    return DECODER, forward


def added(x, normed, attention):
    return x + attention


def summed(x, r, normed, mlp):
    return r + mlp


mistake("no first residual", "residual_missing", layer(lambda x, n, a: a, summed))
mistake("no second residual", "residual_missing", layer(added, lambda x, r, n, m: m))
mistake("first residual behind the norm", "residual_wrong_place", layer(lambda x, n, a: n + a, summed))
mistake("second residual behind the norm", "residual_wrong_place", layer(added, lambda x, r, n, m: n + m))
mistake("second residual from before attention", "residual_wrong_place", layer(added, lambda x, r, n, m: x + m))
mistake("attention left out", "sublayer_missing", layer(lambda x, n, a: x, summed))
mistake("residual on every rank", "residual_on_every_rank", layer(lambda x, n, a: world_size() * x + a, summed))


# The MLP.

def mlp(inside, x=None):
    def forward(self, x):
        name = f"layers.{self.layer}."
        hidden = inside(*self.gate_up_proj.split(self.gate_up_proj(x)))
        point(name + "mlp_act", hidden)
        partial = self.down_proj.partial(hidden)
        point(name + "mlp_partial", partial)
        out = self.down_proj.reduce(partial)
        point(name + "mlp", out)
        return out
    return "tplab.model.mlp.TensorParallelMLP.forward", forward


def in_turns(gate, up):
    fused = torch.cat([gate, up], -1)
    return F.silu(fused[..., 0::2]) * fused[..., 1::2]


def in_blocks(gate, up):
    gate, up = torch.stack([gate, up], -1).flatten(-2).chunk(2, -1)
    return F.silu(gate) * up


def one_gate_up_block(sources, ranges):
    if len(sources) != 2:
        return original("tplab.shard.linear.merged_shard")(sources, ranges)
    whole = torch.cat([source[:] for source in sources])
    return whole.roll(-(rank() * len(whole) // world_size()), 0)[:sum(map(len, ranges))]


mistake("gate and up exchanged", "gate_up_order", mlp(lambda gate, up: F.silu(up) * gate))
mistake("gate and up in turns", "gate_up_interleaved", mlp(in_turns))
mistake("gate and up in blocks", "gate_up_interleaved", mlp(in_blocks))
mistake("gate and up as one block", "fused_one_block", ("tplab.shard.linear.merged_shard", one_gate_up_block))
mistake("gelu", "wrong_activation", mlp(lambda gate, up: F.gelu(gate) * up))
mistake("tanh gelu", "wrong_activation", mlp(lambda gate, up: F.gelu(gate, approximate="tanh") * up))
mistake("relu", "wrong_activation", mlp(lambda gate, up: F.relu(gate) * up))
mistake("silu on both", "wrong_activation", mlp(lambda gate, up: F.silu(gate) * F.silu(up)))
mistake("silu of the product", "wrong_activation", mlp(lambda gate, up: F.silu(gate * up)))
mistake("no activation", "wrong_activation", mlp(lambda gate, up: gate * up))


# The two ends.

def head_of(rows):
    """Another matrix as the head: ``rows(embedding or head shard, self)``."""
    def forward(self, hidden):
        return F.linear(hidden, rows(self.weight))
    return HEAD, forward


def tied(layer, model):
    model.lm_head.weight.data.copy_(model.embed_tokens.weight.data)


def head_without_norm(self, input_ids, positions, context):
    hidden = original("tplab.model.decoder.TensorParallelCausalLM.forward")(self, input_ids, positions, context)
    self.unnormed = hidden
    return hidden


mistake("embedding × sqrt(hidden)", "embedding_scale", (EMBEDDING, lambda self, ids: original(EMBEDDING)(
    self, ids) * self.weight.shape[1] ** 0.5))
mistake("embedding of the token before", "ids_shifted", (EMBEDDING, lambda self, ids: original(EMBEDDING)(
    self, ids.roll(1))))
mistake("head tied", "head_tied", loaded(tied))
mistake("head rows reversed", "head_rows", head_of(lambda weight: weight.flip(0)))
mistake("head rows shifted by one", "head_rows", head_of(lambda weight: weight.roll(1, 0)))
mistake("logits of the token before", "rows_shifted", (HEAD, lambda self, x: original(HEAD)(self, x).roll(1, 0)))
mistake("logits capped", "logits_softcap", (HEAD, lambda self, x: 30 * torch.tanh(original(HEAD)(self, x) / 30)))
mistake("logits scaled", "logits_scale", (HEAD, lambda self, x: original(HEAD)(self, x) / 7.3))
mistake("last rows of the head lost", "vocab_rows_missing", (HEAD, lambda self, x: torch.cat([
    original(HEAD)(self, x)[:, :-2], x.new_zeros(len(x), 2)], 1)))


# Anything.

def rounded(target):
    def in_half(self, *args):
        return original(target)(self, *args).bfloat16().float()
    return target, in_half


mistake("norms in bfloat16", "low_precision", rounded(NORM))
mistake("o in bfloat16", "low_precision", rounded(f"{ROW}.partial"))


# What stands elsewhere than it should.

def other_layer(attention_of=None, mlp_of=None, output=None, in_place=False):
    """A decoder layer whose sublayers are given something else, or whose sums are others."""
    def forward(self, hidden, cos, sin, context):
        name = f"layers.{self.layer}."
        normed = self.input_layernorm(hidden)
        point(name + "input_norm", normed)
        attended = self.self_attn(hidden if attention_of == "before" else normed, cos, sin, context)
        r = hidden + attended
        behind = self.post_attention_layernorm(r)
        r = behind if in_place else r
        point(name + "residual", r)
        point(name + "post_norm", behind)
        m = self.mlp({"input_norm": normed, "residual": r}.get(mlp_of, behind))
        out = r + m if output is None else output(r, m, attended)
        point(name + "output", out)
        return out
    return DECODER, forward


mistake("attention of what was not normed", "norm_skipped", other_layer(attention_of="before"))
mistake("MLP of what was not normed", "norm_skipped", other_layer(mlp_of="residual"))
mistake("MLP beside attention", "norm_wrong_input", other_layer(mlp_of="input_norm"))
mistake("attention added twice", "parallel_sublayers", other_layer(output=lambda r, m, a: r + m + a))
mistake("norm in place", "norm_in_place", other_layer(in_place=True))
mistake("norm by the deviation", "norm_by_deviation", (NORM, lambda self, x: self.weight * x * torch.rsqrt(
    x.float().var(-1, keepdim=True) + self.eps).to(x.dtype)))
mistake("norm by the variance", "norm_by_deviation", (NORM, lambda self, x: self.weight * x * torch.rsqrt(
    x.float().var(-1, keepdim=True, correction=0) + self.eps).to(x.dtype)))
mistake("norm by the sum", "norm_by_sum", (NORM, lambda self, x: self.weight * x * torch.rsqrt(
    x.float().pow(2).sum(-1, keepdim=True) + self.eps).to(x.dtype)))
mistake("embedding × 3.7", "embedding_scale", (EMBEDDING, lambda self, ids: original(EMBEDDING)(self, ids) * 3.7))


def in_half(dtype):
    def attend(q, k, v, mask, scaling):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = (q @ k.transpose(2, 3) * scaling).masked_fill(mask, float("-inf"))
        return torch.softmax(scores.to(dtype), -1).to(v.dtype) @ v
    return "tplab.model.attention.attend", attend


mistake("softmax in bfloat16", "softmax_dtype", in_half(torch.bfloat16))
mistake("softmax in float16", "softmax_dtype", in_half(torch.float16))
mistake("mask the wrong way round", "mask_inverted", ("tplab.model.attention.attend", lambda q, k, v, mask, scaling: (
    original("tplab.model.attention.attend")(q, k, v, ~mask, scaling))))


def first_columns(source, columns):
    return source[:, :len(columns)]


mistake("first columns of o and down", "shard_of_another_rank", ("tplab.shard.linear.row_shard", first_columns),
        model="wide")

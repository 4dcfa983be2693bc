"""What strangers' engines do, as patches of the lab's: name → (the diagnosis's name for it, patches, model, ranks)."""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from tplab.model.loader import load_model as right_load_model
from tplab.model.trace import point
from tplab.patch import Patch, original
from tplab.ranks import all_reduce, rank, world_size

ATTENTION = "tplab.model.attention.TensorParallelAttention"
DECODER = "tplab.model.decoder.DecoderLayer.forward"
EMBEDDING = "tplab.shard.embedding.VocabParallelEmbedding.forward"
HEAD = "tplab.shard.embedding.ParallelLMHead.forward"
NORM = "tplab.model.norm.RMSNorm.forward"
ROTARY = "tplab.model.rope.Rotary.__call__"
ROW = "tplab.shard.linear.RowParallelLinear"
SPLIT = "tplab.shard.linear.QKVParallelLinear.split_heads"


class Mistake(NamedTuple):
    fault: str | None
    patches: list[Patch]
    model: str = "llama"
    point: str | None = None


MISTAKES: dict[str, Mistake] = {}


def mistake(name, fault, *patches, model="llama", point=None):
    MISTAKES[name] = Mistake(fault, [one if isinstance(one, Patch) else Patch(*one) for one in patches], model, point)


# Norms.

def norm(change, only=None):
    """A patch of every norm (or of those of ``only`` features): ``change(self, x, y)``, y being x normalized."""
    def forward(self, x):
        if only and x.shape[-1] != only:
            return original(NORM)(self, x)
        y = x.float()
        return change(self, x, y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
    return Patch(NORM, forward)


def with_eps(eps):
    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return Patch(NORM, forward)


def eps_outside(self, x):
    return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 0.01) * self.weight


def layer_norm(self, x):
    return F.layer_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


def over_all_heads(self, x):
    dims = (-1, -2) if x.dim() == 3 else (-1,)
    y = x.float()
    return self.weight * (y * torch.rsqrt(y.pow(2).mean(dims, keepdim=True) + self.eps)).to(x.dtype)


mistake("eps 1e-2", "norm_epsilon", with_eps(1e-2))
mistake("eps outside the root", "norm_epsilon", (NORM, eps_outside))
mistake("no norm weight", "norm_weight_missing", norm(lambda self, x, y: y))
mistake("1 + weight", "norm_plus_one", norm(lambda self, x, y: y * (1 + self.weight)))
mistake("LayerNorm", "layer_norm", (NORM, layer_norm))
mistake("no norm", "norm_missing", norm(lambda self, x, y: x))
mistake("weight without norm", "norm_missing", norm(lambda self, x, y: x * self.weight))
mistake("norm twice", "norm_twice", (NORM, lambda self, x: original(NORM)(self, original(NORM)(self, x))))
mistake("q norm over all heads", "norm_over_all_heads", (NORM, over_all_heads), model="qwen3")
mistake("no q norm", "norm_missing", norm(lambda self, x, y: x, only=12), model="qwen3")


# Loading.

def loaded(change, layer=0):
    """The ranks' models with something changed: ``change(the layer, the model)``."""
    def load_model(ckpt, plan, *args):
        model = right_load_model(ckpt, plan, *args)
        with torch.no_grad():
            change(model.layers[layer], model)
        return model
    return Patch("tplab.align.gather.load_model", load_model)


def swap(a, b):
    kept = a.data.clone()
    a.data.copy_(b.data)
    b.data.copy_(kept)


def fill(parameter, make):
    parameter.data.copy_(make(parameter.data))


def random_like(data):
    generator = torch.Generator().manual_seed(5 + rank())
    return (torch.rand(data.shape, generator=generator) - 0.5).to(data)


def square(part, module):
    """The loader's slices of one module taken from the transposed weight."""
    def row_shard(source, columns):
        return source[:].T[:, columns.start:columns.stop] if len(set(source.shape)) == 1 else original(
            "tplab.shard.linear.row_shard")(source, columns)

    def column_shard(source, rows):
        if len(source.shape) == 2 and len(set(source.shape)) == 1:
            source = source[:].T
        return source[rows.start:rows.stop]
    return Patch(f"tplab.shard.linear.{part}_shard", {"row": row_shard, "column": column_shard}[part])


def other_ranks(part):
    """A loader in which the ranks' parts of square weights have gone round by one."""
    def row_shard(source, columns):
        size = len(columns)
        start = (rank() + 1) % world_size() * size if source.shape[1] % (size * world_size()) == 0 else columns.start
        return source[:, start:start + size]
    return Patch(f"tplab.shard.linear.{part}_shard", row_shard)


def of_layer(*modules):
    def change(layer, model):
        for module in modules:
            for mine, theirs in zip(layer.get_submodule(module).parameters(),
                                    model.layers[2].get_submodule(module).parameters()):
                mine.data.copy_(theirs.data)
    return loaded(change)


mistake("norm weights exchanged", "norm_weight_exchanged",
         loaded(lambda layer, model: swap(layer.input_layernorm.weight, layer.post_attention_layernorm.weight)))
mistake("another layer's norm", "wrong_layer", of_layer("input_layernorm"))
mistake("another layer's qkv", "wrong_layer", of_layer("self_attn.qkv_proj"), point="layers.0.q")
mistake("another layer's o", "wrong_layer", of_layer("self_attn.o_proj"))
mistake("another layer's gate and up", "wrong_layer", of_layer("mlp.gate_up_proj"))
mistake("another layer's down", "wrong_layer", of_layer("mlp.down_proj"))
mistake("qkv of zeros", "weight_not_loaded", loaded(lambda layer, model: fill(layer.self_attn.qkv_proj.weight,
                                                                               torch.zeros_like)))
mistake("qkv at random", "weight_not_loaded", loaded(lambda layer, model: fill(layer.self_attn.qkv_proj.weight,
                                                                                random_like)))
mistake("o at random", "weight_not_loaded", loaded(lambda layer, model: fill(layer.self_attn.o_proj.weight,
                                                                              random_like)))
mistake("gate and up of zeros", "weight_not_loaded", loaded(lambda layer, model: fill(
    layer.mlp.gate_up_proj.weight, torch.zeros_like)), model="qwen2")
mistake("no qkv bias", "bias_missing", loaded(lambda layer, model: fill(layer.self_attn.qkv_proj.bias,
                                                                         torch.zeros_like)))
mistake("no o bias", "bias_missing", loaded(lambda layer, model: fill(layer.self_attn.o_proj.bias, torch.zeros_like)))
mistake("no gate and up bias", "bias_missing", loaded(lambda layer, model: fill(layer.mlp.gate_up_proj.bias,
                                                                                 torch.zeros_like)))
mistake("no down bias", "bias_missing", loaded(lambda layer, model: fill(layer.mlp.down_proj.bias, torch.zeros_like)))
mistake("qkv bias twice", "bias_twice", loaded(lambda layer, model: fill(layer.self_attn.qkv_proj.bias,
                                                                          lambda bias: 2 * bias)))
mistake("o transposed", "weight_transposed", square("row", "o"), model="square")
mistake("q transposed", "shard_dim1", square("column", "q"), model="square")
mistake("o of the next rank", "shard_of_another_rank", other_ranks("row"), model="wide")


def first_bias_rows(sources, ranges):
    if len(sources[0].shape) == 1 and len(sources) == 3:
        return torch.cat([source[:len(rows)] for source, rows in zip(sources, ranges)])
    return original("tplab.shard.linear.merged_shard")(sources, ranges)


mistake("first rows of the bias", "bias_first_rows", ("tplab.shard.linear.merged_shard", first_bias_rows))


# The fused [q|k|v].

def split_as(order):
    """q, k, v cut out of the fused output in another way: ``order(self, fused as heads) → q, k, v``."""
    def split_heads(self, qkv):
        return order(self, qkv.unflatten(-1, (-1, self.head_size)))
    return Patch(SPLIT, split_heads)


def in_groups(self, x):
    kv = self.num_kv_heads
    x = x.unflatten(1, (kv, -1))
    return x[:, :, :-2].flatten(1, 2), x[:, :, -2], x[:, :, -1]


def v_first(self, x):
    v, k, q = x.split([self.num_kv_heads, self.num_kv_heads, self.num_heads], 1)
    return q, k, v


def k_first(self, x):
    k, q, v = x.split([self.num_kv_heads, self.num_heads, self.num_kv_heads], 1)
    return q, k, v


def metas_rows(self, x):
    q, k, v = x.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)
    return *(part.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for part in (q, k)), v


mistake("qkv interleaved per group", "qkv_interleaved", split_as(in_groups), model="wide")
mistake("[v|k|q]", "qkv_order", split_as(v_first))
mistake("[k|q|v]", "qkv_order", split_as(k_first))
mistake("Meta's rows", "rope_permuted_rows", split_as(metas_rows))


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
mistake("half of the head", "rope_partial", rope(partial), model="qwen3")
mistake("bf16 tables", "rope_dtype", rope(lambda self, q, k, cos, sin, right: right(
    q, k, cos.bfloat16().to(q.dtype), sin.bfloat16().to(q.dtype))))
mistake("fp16 tables", "rope_dtype", rope(lambda self, q, k, cos, sin, right: right(
    q, k, cos.half().to(q.dtype), sin.half().to(q.dtype))))
mistake("bf16 frequencies", "rope_dtype", tables(
    lambda p, dim, theta: p[:, None] * frequencies(dim, theta).bfloat16().float()))
mistake("bf16 angles", "rope_dtype", tables(
    lambda p, dim, theta: (p[:, None].bfloat16() * frequencies(dim, theta).bfloat16()).float()))
mistake("yarn without its factor", "rope_attention_factor", rope(
    lambda self, q, k, cos, sin, right: right(q, k, *(t / (cos[..., 0] ** 2 + sin[..., 0] ** 2).sqrt()[..., None]
                                                      for t in (cos, sin)))), model="yarn")
mistake("positions from 1", "rope_positions", positions_as(lambda p, lengths: p + 1))
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
mistake("softmax over queries", "softmax_dim", attending(
    lambda s, mask, scaling, v: softmax((s * scaling).masked_fill(mask, float("-inf")), v, -2) @ v))
mistake("heads not transposed", "heads_not_transposed", (f"{ATTENTION}.attend_all", not_transposed))
mistake("KV heads by modulo", "query_to_kv", (f"{ATTENTION}.attend_all", modulo), model="wide")
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


# Anything.

def rounded(target):
    def in_half(self, *args):
        return original(target)(self, *args).bfloat16().float()
    return target, in_half


mistake("norms in bfloat16", "low_precision", rounded(NORM))
mistake("o in bfloat16", "low_precision", rounded(f"{ROW}.partial"))

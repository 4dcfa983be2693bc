"""What third-party engines do, as patches of the lab's: norms, loading, [q|k|v]; and the table of all."""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from tplab.model.loader import load_model as right_load_model
from tplab.patch import Patch, original
from tplab.ranks import rank, world_size

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

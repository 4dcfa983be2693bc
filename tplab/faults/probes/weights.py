"""Probes of weights: which rows and columns a rank has, of which layer, and what a product makes of them."""

import torch
from torch.nn import functional as F

from tplab.faults.probes.probe import probe, was
from tplab.ranks import rank, world_size

_COLUMNS, _FORWARD = "shard.linear.row_shard", "shard.linear.MergedColumnParallelLinear.forward"
_ROWS, _MERGED = "shard.linear.column_shard", "shard.linear.merged_shard"
_SPLIT, _PARTIAL = "shard.linear.QKVParallelLinear.split_heads", "shard.linear.RowParallelLinear.partial"

probe("bias_missing", "linear", f"{_FORWARD} {_PARTIAL}", "the bias is left out",
      lambda self, x: F.linear(x, self.weight))

probe("bias_twice", "linear", _FORWARD, "the bias is added twice",
      lambda self, x: was(_FORWARD)(self, x) + (0 if self.bias is None else self.bias))

probe("bias_first_rows", "linear", _MERGED, "every rank has the first rows of the bias",
      lambda sources, ranges: torch.cat([source[:len(rows)] for source, rows in zip(sources, ranges)]) if len(
          sources[0].shape) == 1 else was(_MERGED)(sources, ranges))

probe("weight_not_loaded", "linear", _FORWARD, "the weight is zero",
      lambda self, x: F.linear(x, torch.zeros_like(self.weight), self.bias))

probe("weight_not_loaded", "linear", _PARTIAL, "the weight is zero",
      lambda self, x: F.linear(x, torch.zeros_like(self.weight), self.bias if self.adds_bias else None))


@probe("wrong_layer", "linear norm experts", "model.loader.by_parameter", "the weights are those of layer {}",
       each=lambda config: range(config.num_layers))
def _(layer):
    def wrong(parts):
        right = was("model.loader.by_parameter")(parts)
        moved = {path: f"layers.{layer}.{path.split('.', 2)[2]}" for path in right if path.startswith("layers.")}
        return right | {path: right[other] for path, other in moved.items() if other in right}
    return wrong


def _square(source):
    return source[:].T if len(source.shape) == 2 and len(set(source.shape)) == 1 else source


probe("weight_transposed", "linear", _COLUMNS, "a square weight is transposed",
      lambda source, columns: _square(source)[:, columns.start:columns.stop])

probe("weight_transposed", "linear", _ROWS, "a square weight is transposed",
      lambda source, rows: _square(source)[rows.start:rows.stop])


def _first_of(which: str, part: range, whole: int) -> int:
    """Where another rank's equal part of ``whole`` begins."""
    other = (rank() + 1) % world_size() if which == "the next rank" else 0
    return min(other * len(part), whole - len(part))


_WHOSE = ("the next rank", "rank 0")


@probe("shard_of_another_rank", "linear", _COLUMNS, "a rank has the weight's columns of {}", each=_WHOSE)
def _(which):
    def wrong(source, columns):
        start = _first_of(which, columns, source.shape[1])
        return source[:, start:start + len(columns)]
    return wrong


@probe("shard_of_another_rank", "linear", _MERGED, "a rank has the weight's rows of {}", each=_WHOSE)
def _(which):
    def wrong(sources, ranges):
        starts = [_first_of(which, rows, source.shape[0]) for source, rows in zip(sources, ranges)]
        return torch.cat([source[start:start + len(rows)] for source, rows, start in zip(sources, ranges, starts)])
    return wrong


def _scaled(source, rows):
    whole = source[:]
    scale = whole.abs().flatten(1).amax(1, keepdim=True) if whole.dim() > 1 else torch.ones_like(whole)
    return whole[rows.start:rows.stop] * scale[:len(rows)] / scale[rows.start:rows.stop]


probe("channel_scales", "linear", _MERGED, "a rank's rows have the scales of the first rows",
      lambda sources, ranges: torch.cat([_scaled(source, rows) for source, rows in zip(sources, ranges)]))


# The fused [q|k|v].

@probe("qkv_order", "linear", _SPLIT, "the fused output is split as {}", each=("vkq", "kqv", "qvk", "kvq", "vqk"))
def _(order):
    def wrong(self, qkv):
        sizes = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        heads = qkv.unflatten(-1, (-1, self.head_size)).split([sizes[part] for part in order], 1)
        return tuple(heads[order.index(part)] for part in "qkv")
    return wrong


@probe("qkv_interleaved", "linear", _SPLIT, "the fused output is split group by group, and it stands in blocks")
def _(self, qkv):
    x = qkv.unflatten(-1, (self.num_kv_heads, -1, self.head_size))
    return x[:, :, :-2].flatten(1, 2), x[:, :, -2], x[:, :, -1]


@probe("qkv_interleaved", "linear", _SPLIT, "the fused output is split as blocks, and it stands group by group")
def _(self, qkv):
    q, k, v = was(_SPLIT)(self, qkv)
    x = torch.cat([q.unflatten(1, (k.shape[1], -1)), k[:, :, None], v[:, :, None]], 2).flatten(1, 2)
    return x.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], 1)


def _permuted(order, parts: str):
    """q, k and v with the numbers of each head of ``parts`` in another order."""
    def wrong(self, qkv):
        heads = dict(zip("qkv", was(_SPLIT)(self, qkv)))
        at = order(torch.arange(self.head_size))
        return tuple(x[..., at] if part in parts else x for part, x in heads.items())
    return wrong


_ORDERS = {"Meta's": lambda i: i.view(2, -1).T.flatten(), "Hugging Face's": lambda i: i.view(-1, 2).T.flatten()}

probe("rope_permuted_rows", "linear", _SPLIT, "the rows of each head have {0[0]} order, and should not",
      lambda value: _permuted(_ORDERS[value[0]], value[1].replace("and", "")),
      each=[(whose, parts) for whose in _ORDERS for parts in ("q and k", "k", "q")])

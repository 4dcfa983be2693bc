"""``make_batch_invariant(model)``: a loaded model whose sums have one order, by other methods on its layers."""

from collections import defaultdict
from functools import partial
from types import MethodType

import torch
from torch import nn

from tplab.invariant.kernels import Product, attend, inverse_rms, silu
from tplab.invariant.tree import leaves_of_columns, leaves_of_heads, nodes_within, tree_sum
from tplab.model import TensorParallelCausalLM
from tplab.model.norm import RMSNorm
from tplab.model.rope import Rotary
from tplab.ranks import all_gather, rank
from tplab.shard import RowParallelLinear


def make_batch_invariant(model: TensorParallelCausalLM) -> None:
    """From now on each token's numbers are the same in any batch, whole or in chunks, and on 1, 2, 3, 4, 6 or 8 ranks.

    The weights of products are kept only in the form in which :class:`tplab.invariant.kernels.Product` takes them.
    :func:`tplab.invariant.why_not` must return None for the model.
    """
    plan = model.plan
    model.rotary = RotaryTables(model.rotary)
    heads, columns = leaves_of_heads(plan.num_heads, plan.head_dim), leaves_of_columns(plan.intermediate_size)
    of_heads = [shard.q_heads for shard in plan.ranks]
    of_columns = [within(columns, shard.mlp) for shard in plan.ranks]
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        in_one_order(attention.qkv_proj)
        in_one_order(mlp.gate_up_proj)
        tree_parallel(attention.o_proj, heads, of_heads)
        tree_parallel(mlp.down_proj, columns, of_columns)
        attention.attend = MethodType(_attend, attention)
        del mlp.act
        mlp.act = silu
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.inverse_rms = partial(inverse_rms, eps=module.eps)
    in_one_order(model.lm_head, keep_weight=model.lm_head.weight is model.embed_tokens.weight)


class RotaryTables:
    """A model's cosines and sines, one position at a time: libraries compute the end of an array differently."""

    def __init__(self, rotary: Rotary):
        self.rotary, self.tables = rotary, defaultdict(dict)

    def __call__(self, x, positions, lengths, *layer_type):
        wanted, known = positions.tolist(), self.tables[layer_type]
        for position in set(wanted) - known.keys():
            known[position] = self.rotary(x, torch.tensor([position]), [1], *layer_type)
        return tuple(torch.cat(rows, dim=1) for rows in zip(*map(known.get, wanted)))


def _take_weight(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight.data
    layer.weight.data = weight.new_empty(0)
    return weight


def in_one_order(layer: nn.Module, keep_weight: bool = False) -> None:
    """A layer whose outputs are dealt out over the ranks: each output is a sum of its own."""
    layer.product = Product(layer.weight.data if keep_weight else _take_weight(layer))
    layer.forward = MethodType(_forward, layer)


def _forward(self, x: torch.Tensor) -> torch.Tensor:
    y, bias = self.product(x)[0], getattr(self, "bias", None)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def within(leaves: list[range], columns: range) -> range:
    """Which of the leaves a rank's columns are."""
    first, *rest = [n for n, leaf in enumerate(leaves) if columns.start <= leaf.start and leaf.stop <= columns.stop]
    return range(first, first + len(rest) + 1)


def tree_parallel(layer: RowParallelLinear, leaves: list[range], parts: list[range]) -> None:
    """A layer whose inputs are dealt out: its sum is the tree over ``leaves``, of which a rank has one of ``parts``."""
    here, nodes = parts[rank()], [nodes_within(0, len(leaves), part) for part in parts]
    start = leaves[here.start].start
    layer.product = Product(
        _take_weight(layer), [range(leaves[n].start - start, leaves[n].stop - start) for n in here],
        [(first - here.start, last - here.start) for first, last in nodes[rank()]], max(map(len, leaves)))
    layer.sizes, layer.count = [len(part) for part in nodes], len(leaves)
    layer.nodes = [node for part in nodes for node in part]
    layer.partial, layer.reduce = layer.product, MethodType(_reduce, layer)


def _reduce(self, partial: torch.Tensor) -> torch.Tensor:
    """The nodes of all ranks → ``[tokens, output_size]``, bias and rounding at the end."""
    nodes = all_gather(partial, dim=0, sizes=self.sizes)
    total = tree_sum(0, self.count, dict(zip(self.nodes, nodes, strict=True)))
    return (total if self.bias is None else total + self.bias.float()).to(self.product.dtype)


def _attend(self, heads, q, k, v, mask) -> torch.Tensor:
    return attend(q, k, v, mask, self.scaling)

"""Mistakes of matrix products: other rows, another weight, another bias, another input; and of the MLP's inside."""

import itertools
from collections.abc import Callable

import torch
from torch.nn import functional as F

from tplab.align import arithmetic
from tplab.align.diagnose import numbers, places
from tplab.align.diagnose.case import Case
from tplab.align.diagnose.table import Family, Mistake
from tplab.align.diagnose.wrong import At, has_bias, right, several_ranks
from tplab.align.points import POINTS, layer_of, layout, made_by

LINEAR = made_by("linear", "head")
HEADS = ("q", "k", "v")
COLUMNS = (*HEADS, "gate", "up")
MATRICES = (*COLUMNS, "o_partial", "mlp_partial")


# Products: other rows, other places.

def _of_kv(rule: Callable) -> Callable:
    """The KV heads that each rank holds, by another rule; all ranks have to fit, those that are right, too: they tell
    rules apart that give the wrong ranks the same rows."""
    def change(at: At) -> torch.Tensor:
        shard = at.case.plan.ranks[at.rank]
        return at.case.reference(at.op)[:, rule(shard, at.case.plan.num_kv_heads)]
    return change


def _first(shard, kv_heads: int) -> list[int]:
    return list(range(len(shard.kv_heads)))


def _modulo(shard, kv_heads: int) -> list[int]:
    return [shard.rank % kv_heads] if len(shard.kv_heads) == 1 else list(shard.kv_heads)


def _whole(at: At, parts) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([at.matrix(part) for part in parts]), torch.cat([at.vector(part) for part in parts])


def _start(at: At) -> int:
    """Where this rank's part of the op begins among its parts of the fused weight."""
    parts = places.fused(at.op)
    return sum(len(at.features(part)) for part in parts[:parts.index(at.op)])


def _one_block(at: At) -> dict:
    weight, bias = _whole(at, places.fused(at.op))
    start = at.rank * len(weight) // at.case.plan.tensor_parallel_size + _start(at)
    rows = (start + torch.arange(len(at.features()))) % len(weight)
    return {"weight": weight, "bias": bias, "features": rows.tolist()}


def _divided_twice(at: At) -> dict:
    rows = at.features()
    first = int(rows[0]) if len(rows) else 0
    return {"features": (rows - first + first // at.case.plan.tensor_parallel_size).tolist()}


def _by_column(at: At) -> dict:
    parts = places.fused(at.op)
    weight, bias = (torch.cat([whole[at.features(part)] for part, whole in zip(parts, of)])
                    for of in zip(*((at.matrix(part), at.vector(part)) for part in parts)))
    return {"weight": weight.T.reshape(weight.shape), "bias": bias,
            "features": (_start(at) + torch.arange(len(at.features()))).tolist()}


def _orders(at: At) -> dict[str, torch.Tensor]:
    """The ways in which this rank's fused ``[q|k|v]`` may be filled or split otherwise: what it is → the features of
    ``[q|k|v]`` that end up as q, k and v."""
    dim, heads, kv_heads = at.case.config.head_dim, len(at.indices("q")), len(at.indices("k"))
    sizes = dict(zip(HEADS, (heads * dim, kv_heads * dim, kv_heads * dim)))
    every = torch.arange(sum(sizes.values()))
    blocks, found = dict(zip(HEADS, every.split(list(sizes.values())))), {}
    for order in itertools.permutations(HEADS):
        if order != HEADS:
            found[f"it is filled as [{'|'.join(order)}]"] = torch.cat([blocks[part] for part in order])
            read = dict(zip(order, every.split([sizes[part] for part in order])))
            found[f"it was read as [{'|'.join(order)}]"] = torch.cat([read[part] for part in HEADS])
    if kv_heads and heads % kv_heads == 0:
        groups = every.view(kv_heads, -1, dim)
        read = torch.cat([groups[:, :-2].flatten(), groups[:, -2].flatten(), groups[:, -1].flatten()])
        found["it was read group by group, [q … q k v] for each KV head"] = read
        found["it is filled group by group, [q … q k v] for each KV head"] = read.argsort()
    halves = torch.cat([torch.arange(0, dim, 2), torch.arange(1, dim, 2)])
    for inside, says in ((halves, "neighbours lie half a head apart"), (halves.argsort(), "halves lie in turns")):
        turned = every.view(-1, dim)[:, inside]
        turned[-kv_heads:] = every.view(-1, dim)[-kv_heads:]
        found[f"the rows of each head of q and k stand in another order ({says}), as Meta's checkpoints and Hugging "
              "Face's differ"] = turned.flatten()
    return found


def _in_order(at: At, says: str) -> torch.Tensor:
    whole = torch.cat([at.make(part).flatten(1) for part in HEADS], 1)
    features = _orders(at).get(says)
    if features is None:
        return torch.full_like(whole, float("nan"))  # this rank's heads cannot stand like that
    here = whole[:, features[_start(at):_start(at) + len(at.features())]]
    return here.unflatten(1, (-1, at.case.config.head_dim))


def _order(name: str, kind: Callable[[str], bool]) -> Family:
    return Family(HEADS, Mistake(name, "The weights behind {name} are right, but in the fused [q|k|v] they have the "
                                 "wrong places: {text}.", _in_order,
                                 lambda case: {says: says for says in _orders(right(case, 0)) if kind(says)}))


CUTS = (
    Family(("k", "v"), Mistake(
        "qkv_order", "k holds the values and v the keys: the output of the fused projection was split in another order "
        "than [q|k|v].", lambda at: at.case.right({"k": "v", "v": "k"}[at.op], at.rank))),
    places.kv_rule("kv_first_rows", _of_kv(_first), lambda case: True, "Every rank holds the first rows of {op}_proj, "
                   "whatever its rank: the KV heads of all ranks but rank 0 are missing."),
    places.kv_rule("kv_replica_modulo", _of_kv(_modulo), lambda case: case.plan.num_kv_heads < len(case.plan.ranks),
                   "Rank r holds KV head r % {c.num_kv_heads}. Ranks that share a KV head are neighbours: the head of "
                   "rank r is r // replicas."),
    Family(HEADS, Mistake(
        "fused_one_block", "Each rank's {op} is the right number of rows of [q|k|v], cut out of it as one block. Cut "
        "q, k and v apart first, then each for itself.", _one_block)),
    Family(("gate", "up"), Mistake(
        "fused_one_block", "Each rank's {op} is the right number of rows of [gate|up], cut out of it as one block. Cut "
        "gate and up apart first, then each for itself.", _one_block)),
    Family(COLUMNS, Mistake(
        "divided_twice", "Every rank has the right number of rows of {op}, but they begin at the rank's offset divided "
        "by {tp}: the offset was this rank's already.", _divided_twice)),
    Family(COLUMNS, Mistake(
        "shard_dim1", "{op} is what comes out when {op}_proj.weight is taken for [in, out] and cut along dim 1. A "
        "Linear's weight is [out_features, in_features]: a column-parallel layer keeps rows, dim 0.",
        lambda at: at.in_out())),
    places.cut_along_dim1_anywhere,
    Family(HEADS, Mistake(
        "qkv_written_by_column", "Each rank has cut the right rows of q, k, v and has written them side by side, as "
        "columns, into a fused weight that is read by row. A part's place is a row offset, dim 0.", _by_column)),
    Family(("gate", "up"), Mistake(
        "written_by_column", "Each rank has cut the right rows of gate and up and has written them side by side, as "
        "columns, into a fused weight that is read by row. A part's place is a row offset, dim 0.", _by_column)),
    _order("qkv_order", lambda says: "[" in says and "group" not in says),
    _order("qkv_interleaved", lambda says: "group" in says),
    _order("rope_permuted_rows", lambda says: "Meta" in says),
    places.in_other_places,
)


# Products: another weight, another bias, another input.

def _biased(case: Case) -> bool:
    return case.op != "logits" and all(has_bias(case, op) for op in case.ops)


def _added(name: str, times: int, says: str, sum_says: str) -> tuple[Mistake, Mistake]:
    """A bias taken ``times`` times, by the product and by the sum behind it."""
    def partial(case: Case) -> str:
        return case.made_from(case.op)[0]
    return (Mistake(name, "{name} is right but for the bias of {module}: " + says + ".",
                    lambda at: {"bias": times * at.vector()}, when=_biased),
            Mistake(name, "{name} is right but for the bias of {module}: " + sum_says + ".",
                    lambda at: at.expected() + (times - 1) * at.vector(at.case.made_from(at.op)[0]),
                    when=lambda case: has_bias(case, partial(case)) and case.op == case.point))


_MISSING = _added("bias_missing", 0, "the bias was left out", "no rank adds it")
_TWICE = _added("bias_twice", 2, "it is added twice", "it is added twice")


def _of_layers(case: Case) -> dict:
    if case.op == "logits":
        return {}
    own = f"layers.{{}}.{POINTS[case.op].module}.bias"
    return {(layer, whose): str(layer) for layer in range(case.config.num_layers) if f"layers.{layer}" != case.layer
            for whose in sorted({layer, int(case.layer.split('.')[1])} if has_bias(case, case.op) and own else {layer})}


def _of_layer(at: At, value: tuple[int, int]) -> dict:
    frame, (layer, whose) = at.frame, value

    def raw(layer: int, kind: str):
        name = f"{frame.module(f'layers.{layer}.', at.op)}.{kind}"
        return frame.weights.raw(name).to(frame.dtype) if name in frame.weights else None
    bias = raw(whose, "bias")
    return {"weight": raw(layer, "weight")} | ({} if bias is None else {"bias": bias})


def _other_modules(case: Case) -> dict[str, str]:
    at = right(case, 0)
    return {} if len(case.ops) > 1 or case.op == "logits" else {
        other: POINTS[other].module for other in LINEAR if other not in ("logits", case.op)
        and POINTS[other].needs(case.config, layer_of(case.first.name))
        and {other, case.op} not in ({"k", "v"}, {"gate", "up"}) and at.matrix(other).shape == at.matrix().shape}


def _square(case: Case) -> bool:
    return all(len({*right(case, 0).matrix(op).shape}) == 1 for op in case.ops)


def _first_scales(at: At) -> dict:
    weight, features = at.matrix().clone(), at.features()
    largest = weight.abs().amax(1, keepdim=True)
    weight[features] *= largest[:len(features)] / largest[features]
    return {"weight": weight}


def _scaled(case: Case) -> bool:
    return case.op in MATRICES and all(right(case, 0).frame.weights.scales(
        f"{right(case, 0).frame.module(f'{case.layer}.', op)}.weight") is not None for op in case.ops)


def _first_blocks(at: At) -> dict:
    """The weight with scales that are counted from this rank's first row or column."""
    weight, features = at.matrix().clone(), at.features()
    scales = at.frame.weights.scales(f"{at.frame.module(at.layer, at.op)}.weight")
    if layout(at.op) == "partial":
        weight, scales = weight.T, scales.T
    weight[features] *= scales[:len(features)] / scales[features]
    return {"weight": weight.T if layout(at.op) == "partial" else weight}


PRODUCTS = (
    Family(LINEAR, _MISSING[0], _TWICE[0]),
    Family(COLUMNS, Mistake(
        "bias_first_rows", "The ranks add the first rows of the bias of {module}, whatever their rank: the weight was "
        "cut and the bias was not.", lambda at: {"bias": at.vector().roll(int(at.features()[0]))}, when=_biased)),
    Family(("o_proj", "mlp"), _MISSING[1], _TWICE[1]),
    Family(("o_partial", "mlp_partial"), Mistake(
        "row_bias_everywhere", "The sum of the ranks' parts is too large by the same vector for every token: the bias "
        "of {module}, which every rank adds. It belongs to the sum, so one rank adds it.",
        lambda at: at.make(bias=0.0) + at.vector(), when=lambda case: several_ranks(case) and _biased(case))),
    places.shard_of_another_rank,
    Family(LINEAR, Mistake(
        "wrong_layer", "{name} is right for another layer's weight: that of {module} of layer {text}.", _of_layer,
        _of_layers, number="layer")),
    Family(LINEAR, Mistake(
        "wrong_weight", "{name} is right for the weight of {text}, where {module} belongs.",
        lambda at, other: {"weight": at.matrix(other), "bias": at.vector(other)}, _other_modules)),
    Family(LINEAR, Mistake(
        "weight_transposed", "{name} is what comes out of {module} with the square weight transposed: it is "
        "[out_features, in_features].", lambda at: {"weight": at.matrix().T}, when=_square)),
    Family((*COLUMNS, "logits"), Mistake(
        "norm_skipped", "{name} was made from what stands before the norm: the norm's output was not used.",
        lambda at: {"x": at("residual" if at.op in ("gate", "up") else "before")}),
        Mistake("norm_wrong_input", "{name} was made from what attention got, beside attention instead of behind it.",
                lambda at: {"x": at("input_norm")}, when=lambda case: case.op in ("gate", "up"))),
    Family(LINEAR, Mistake(
        "weight_not_loaded", "{name} is what a weight of zeros gives: that of {module} was made and never filled.",
        lambda at: {"weight": 0 * at.matrix()}, when=lambda case: case.op != "logits"), last=True),
    numbers.unrelated_weight,
    Family(MATRICES, Mistake(
        "block_scales_of_other_rows", "{name} is right but for the scales of {module}: they are those of the first "
        "blocks, whichever part of the weight the rank has.", _first_blocks, when=_scaled)),
    Family(COLUMNS, Mistake(
        "channel_scales", "{name} is right but for a factor for each output: the ranks have their own rows of "
        "{module}, and the scales of the first rows.", _first_scales, when=lambda case: 0 not in case.wrong_ranks)),
)


# The MLP's inside.

def _fused_act(change: Callable) -> Callable:
    """The activation of columns that were split in another way than they were filled."""
    def made(at: At) -> torch.Tensor:
        act = arithmetic.activation(at.case.config.hidden_act)
        first, second = change(at.make("gate"), at.make("up"))
        return act(first) * second
    return made


def _turns(gate, up):
    whole = torch.cat([gate, up], 1)
    return whole[:, 0::2], whole[:, 1::2]


def _blocks(gate, up):
    return torch.stack([gate, up], -1).flatten(1).chunk(2, 1)


def _act(at: At) -> Callable:
    return arithmetic.activation(at.case.config.hidden_act)


ACTIVATIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "relu²": lambda x: F.relu(x) ** 2, "no activation": lambda x: x}

INSIDE = (
    Family("mlp_act", Mistake(
        "gate_up_order", "{op} is act(up) × gate: the two halves of the fused projection were taken for each other. "
        "Its order is [gate|up].", lambda at: {"act": lambda gate, up: _act(at)(up) * gate})),
    Family(("gate", "up"), Mistake(
        "gate_up_order", "{op} is what {text} should be: the two were taken for each other.",
        lambda at, other: at.make(other), lambda case: {other: other for other in ("gate", "up") if other != case.op}),
        own=True),
    numbers.another_activation(ACTIVATIONS),
    Family("mlp_act", Mistake(
        "gate_up_interleaved", "The fused tensor behind {op} was split in another way than it was filled: it holds "
        "[gate|up], and was read as gate 0, up 0, gate 1, up 1, ….", _fused_act(_turns)), Mistake(
        "gate_up_interleaved", "The fused tensor behind {op} was split in another way than it was filled: it holds "
        "gate 0, up 0, gate 1, up 1, …, and was read as [gate|up].", _fused_act(_blocks))),
)

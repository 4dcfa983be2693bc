"""Hypotheses about matrix products: with which weight and which bias, if not with the right ones?"""

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import LINEAR, best, distance, explains, has_bias, linear, matrix, misfit, right, vector
from tplab.align.points import layout


def _module(case: Case) -> str:
    return " and ".join(LINEAR[op][0] for op in case.ops)


@hypothesis(*LINEAR)
def another_bias(case: Case) -> Diagnosis | None:
    """Was a bias left out, added twice, or cut at another place?"""
    if not all(has_bias(case, op) for op in case.ops):
        return None
    for times, fault, says in ((0, "bias_missing", "the bias was left out"), (2, "bias_twice", "it is added twice")):
        if explains(case, lambda at, op, times=times: linear(at, op, bias=times * vector(case, op))):
            return case.diagnosis(fault, f"{case.first.name} is right but for the bias of {_module(case)}: {says}.")
    if layout(case.op) != "partial" and explains(
            case, lambda at, op: linear(at, op, bias=vector(case, op).roll(int(at.features(op)[0])))):
        return case.diagnosis("bias_first_rows", f"The ranks add the first rows of the bias of {_module(case)}, "
                              "whatever their rank: the weight was cut and the bias was not.")


@hypothesis("o_proj", "mlp")
def sum_without_its_bias(case: Case) -> Diagnosis | None:
    """Is it right but for the bias, which no rank has added?"""
    partial = f"{case.op.removesuffix('_proj')}_partial"
    if not has_bias(case, partial) or case.op != case.point:
        return None
    bias, module = vector(case, partial), LINEAR[partial][0]
    for times, fault, says in ((-1, "bias_missing", "no rank adds it"), (1, "bias_twice", "it is added twice")):
        if explains(case, lambda at, op, times=times: right(case, at.rank)(op) + times * bias):
            return case.diagnosis(fault, f"{case.first.name} is right but for the bias of {module}: {says}.")


@hypothesis(*LINEAR)
def shard_of_another_rank(case: Case) -> Diagnosis | None:
    """Does a rank hold the part of the weight that belongs to another?"""
    tp = case.recording.world_size
    if {"k", "v"} & {*case.ops} and case.config.num_kv_heads < tp:
        return None  # ranks that share a KV head hold the same by right
    taken = list(range(tp))
    alike = all(len({len(right(case, rank).features(op)) for rank in range(tp)}) == 1 for op in case.ops)
    # Where the point is made from all ranks' parts, these cannot be looked at one by one.
    for shift in range(1, tp if alike and case.op != case.point else 1):
        if explains(case, lambda at, op, shift=shift: linear(at, op, features=right(
                case, (at.rank + shift) % tp).features(op))):
            return case.diagnosis("shard_of_another_rank", f"Rank 0 multiplies with rank {shift}'s part of "
                                  f"{_module(case)}, and so on in a circle.", rank=0, taken=shift)
    for rank in case.wrong_ranks if case.op == case.point else ():
        for other in (other for other in range(tp) if other != rank):
            theirs = {op: right(case, other).features(op) for op in case.ops}
            if all(len(theirs[op]) == len(right(case, rank).features(op)) for op in case.ops) and misfit(
                    case, lambda at, op, theirs=theirs: linear(at, op, features=theirs[op]), [rank]) <= case.tolerance:
                taken[rank] = other
                break
        else:
            return None
    first = next((rank for rank, other in enumerate(taken) if rank != other), None)
    if first is not None:
        return case.diagnosis("shard_of_another_rank", f"Rank {first} multiplies with rank {taken[first]}'s part of "
                              f"{_module(case)} (the ranks' parts: {taken}).", rank=first, taken=taken[first])


@hypothesis(*LINEAR)
def weight_of_another_layer(case: Case) -> Diagnosis | None:
    """Is it right for the weight of another layer?"""
    if case.op == "logits":
        return None
    found = best(case, {(layer, whose): lambda at, op, layer=layer, whose=whose: linear(
        at, op, weight=matrix(case, op, layer), bias=vector(case, op, whose))
        for layer in (f"layers.{number}" for number in range(case.config.num_layers)) if layer != case.layer
        for whose in {layer, case.layer if has_bias(case, case.op) else layer}})
    if found:
        layer = int(found[0].split(".")[1])
        return case.diagnosis("wrong_layer", f"{case.first.name} is right for another layer's weight: that of "
                              f"{_module(case)} of layer {layer}.", layer=layer)


@hypothesis(*LINEAR)
def weight_of_another_module(case: Case) -> Diagnosis | None:
    """Is it right for the weight of another module of the layer?"""
    if len(case.ops) > 1 or case.op == "logits":
        return None
    own = matrix(case, case.op)
    others = {other: weight for other in LINEAR if other not in ("logits", case.op)
              and {other, case.op} not in ({"k", "v"}, {"gate", "up"})
              and (weight := matrix(case, other)).shape == own.shape}
    found = best(case, {other: lambda at, op, other=other: linear(at, op, weight=others[other], bias=vector(
        case, other)) for other in others})
    if found:
        return case.diagnosis("wrong_weight", f"{case.first.name} is right for the weight of {LINEAR[found][0]}, where "
                              f"{_module(case)} belongs.")


@hypothesis(*LINEAR)
def weight_read_the_other_way(case: Case) -> Diagnosis | None:
    """Was a square weight taken for [in, out]?"""
    if all(len({*matrix(case, op).shape}) == 1 for op in case.ops) and explains(
            case, lambda at, op: linear(at, op, weight=matrix(case, op).T)):
        return case.diagnosis("weight_transposed", f"{case.first.name} is what comes out of {_module(case)} with the "
                              "square weight transposed: it is [out_features, in_features].")


@hypothesis("q", "k", "v", "gate", "up", "logits")
def product_of_something_else(case: Case) -> Diagnosis | None:
    """Was something else than the norm's output multiplied?"""
    says = {"before": ("norm_skipped", "what stands before the norm: the norm's output was not used")}
    if case.op in ("gate", "up"):
        says = {"residual": says["before"], "input_norm": ("norm_wrong_input", "what attention got, beside attention "
                                                           "instead of behind it")}
    source = best(case, {source: lambda at, op, source=source: linear(at, op, x=at(source)) for source in says})
    if source:
        return case.diagnosis(says[source][0], f"{case.first.name} was made from {says[source][1]}.")


@hypothesis(*LINEAR, last=True)
def weight_never_loaded(case: Case) -> Diagnosis | None:
    """Is it a product with zeros, or with a matrix that has nothing to do with the checkpoint's?"""
    if case.op == "logits":
        return None
    if explains(case, lambda at, op: linear(at, op, weight=0 * matrix(case, op))):
        return case.diagnosis("weight_not_loaded", f"{case.first.name} is what a weight of zeros gives: that of "
                              f"{_module(case)} was made and never filled.")
    if case.op == case.point and len(case.ops) == 1 and (likeness := _unrelated(case)) is not None:
        return case.diagnosis("weight_not_loaded", f"{case.first.name} is a linear function of its input, as it should "
                              f"be, but its matrix has nothing to do with that of {_module(case)} (correlation "
                              f"{likeness:z.2f}): it is not the checkpoint's.", correlation=likeness)


def _unrelated(case: Case) -> float | None:
    """The correlation between the matrix that the ranks multiplied with, read off input and output, and the right one;
    None if it is not small, or there are too few tokens to tell."""
    ours, theirs = [], []
    for rank in case.wrong_ranks:
        at, y = right(case, rank), case.shard(case.op, rank).flatten(1).double()
        x = at(LINEAR[case.op][1]).flatten(1).double()
        x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        if len(x) < x.shape[1] + 2 or not torch.isfinite(x).all() or not torch.isfinite(y).all():
            return None
        solved = torch.linalg.lstsq(x, y).solution
        if not distance(y, x @ solved) <= case.tolerance:
            return None
        features, weight = at.features(case.op), matrix(case, case.op)
        ours.append(solved[:-1].flatten())
        theirs.append((weight[:, features] if layout(case.op) == "partial" else weight[features]).T.double().flatten())
    a, b = torch.cat(ours), torch.cat(theirs)
    likeness = ((a @ b) / (a.norm() * b.norm()).clamp(min=1e-30)).item()
    # A shuffled weight is as little alike as a random one, but its numbers are the same.
    shuffled = (a.abs().sort().values - b.abs().sort().values).abs().max() <= 0.02 * b.abs().max()
    return likeness if abs(likeness) < 0.3 and not shuffled else None




@hypothesis("q", "k", "v", "gate", "up")
def scales_of_other_rows(case: Case) -> Diagnosis | None:
    """Was each row of the weight divided by its own scale, and multiplied with that of the ranks' first rows?"""
    def scaled(at, op):
        weight, features = matrix(case, op).clone(), at.features(op)
        largest = weight.abs().amax(1, keepdim=True)
        weight[features] *= largest[:len(features)] / largest[features]
        return linear(at, op, weight=weight)
    if 0 not in case.wrong_ranks and explains(case, scaled):
        return case.diagnosis("channel_scales", f"{case.first.name} is right but for a factor for each output: the "
                              f"ranks have their own rows of {_module(case)}, and the scales of the first rows.")

"""Mistakes of matrix products: another weight, another bias, other scales, another input."""

import torch

from tplab.align.diagnose.altered import At, distance, has_bias, likeness, module, several_ranks, unaltered
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.cuts import COLUMNS, PRODUCTS, head_rows, shard_of_another_rank
from tplab.align.diagnose.table import Family, Mistake, procedure
from tplab.align.points import POINTS, layer_of, layout, made_by

MATRICES = (*COLUMNS, "o_partial", "mlp_partial")


def _biased(case: Case) -> bool:
    return case.op != "logits" and all(has_bias(case, op) for op in case.ops)


def _added(name: str, times: int, says: str, sum_says: str) -> tuple[Mistake, Mistake]:
    """A bias taken ``times`` times, by the product and by the sum behind it."""
    return (Mistake(name, "{name} is right but for the bias of {module}: " + says + ".",
                    lambda at: {"bias": times * at.vector()}, when=_biased),
            Mistake(name, "{name} is right but for the bias of {module}: " + sum_says + ".",
                    lambda at: at.expected() + (times - 1) * at.vector(at.case.made_from(at.op)[0]),
                    when=lambda case: has_bias(case, case.made_from(case.op)[0]) and case.op == case.point))


_MISSING = _added("bias_missing", 0, "the bias was left out", "no rank adds it")
_TWICE = _added("bias_twice", 2, "it is added twice", "it is added twice")


def _of_layers(case: Case) -> dict[tuple[int, int], str]:
    """The other layers, whose weight a product may have, each with the layers whose bias it may have."""
    own, others = layer_of(case.first.name), range(case.config.num_layers if case.op != "logits" else 0)
    return {(layer, whose): str(layer) for layer in others if layer != own
            for whose in sorted({layer, own} if has_bias(case, case.op) else {layer})}


def _of_layer(at: At, value: tuple[int, int]) -> dict:
    names = {kind: f"{at.frame.module(f'layers.{layer}.', at.op)}.{kind}"
             for kind, layer in zip(("weight", "bias"), value)}
    weights = at.frame.weights
    return {kind: weights.raw(name).to(at.frame.dtype) for kind, name in names.items() if name in weights}


def _other_modules(case: Case) -> dict[str, str]:
    at = unaltered(case, 0)
    return {} if len(case.ops) > 1 or case.op == "logits" else {
        other: POINTS[other].module for other in PRODUCTS if other not in ("logits", case.op)
        and POINTS[other].needs(case.config, layer_of(case.first.name))
        and {other, case.op} not in ({"k", "v"}, {"gate", "up"}) and at.matrix(other).shape == at.matrix().shape}


def _scales(at: At) -> torch.Tensor | None:
    """What each number of a quantised weight was multiplied with; None for another weight."""
    return at.frame.weights.scales(f"{at.frame.module(at.layer, at.op)}.weight")


def _scaled(case: Case) -> bool:
    return all(_scales(At(case, 0, case.frame, op)) is not None for op in case.ops)


def _with_first(at: At, scales: torch.Tensor) -> dict:
    """The weight with scales ``[out, in]`` (or ``[out, 1]``) that are counted from this rank's first row or column."""
    weight, features, by_column = at.matrix(), at.features(), layout(at.op) == "partial"
    weight, scales = (weight.T.clone(), scales.T) if by_column else (weight.clone(), scales)
    weight[features] *= scales[:len(features)] / scales[features]
    return {"weight": weight.T if by_column else weight}


@procedure(*made_by("linear"), names="weight_not_loaded", last=True)
def unrelated_weight(case: Case) -> Diagnosis | None:
    """Is it a linear function of its input, by a matrix that has nothing to do with the checkpoint's?"""
    if case.op != case.point or len(case.ops) > 1:
        return None
    solved, stored, by_column = [], [], layout(case.op) == "partial"
    for rank in case.wrong_ranks:
        at = unaltered(case, rank)
        x, y = at.given().flatten(1).double(), at.held().flatten(1).double()
        x = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
        if len(x) < x.shape[1] + 2 or not torch.isfinite(x).all() or not torch.isfinite(y).all():
            return None  # too few tokens to tell
        matrix = torch.linalg.lstsq(x, y).solution
        if not distance(y, x @ matrix) <= case.tolerance:
            return None
        solved.append(matrix[:-1].T.flatten())
        stored.append((at.matrix()[:, at.features()] if by_column else at.matrix()[at.features()]).double().flatten())
    a, b = torch.cat(solved), torch.cat(stored)
    alike = likeness(a, b)
    # A shuffled weight is as little alike as a random one, but its numbers are the same.
    shuffled = (a.abs().sort().values - b.abs().sort().values).abs().max() <= 0.02 * b.abs().max()
    if abs(alike) < 0.3 and not shuffled:
        return case.diagnosis("weight_not_loaded", f"{case.first.name} is a linear function of its input, as it should "
                              f"be, but its matrix has nothing to do with that of {module(case)} (correlation "
                              f"{alike:z.2f}): it is not the checkpoint's.", correlation=alike)


WEIGHTS = (
    Family(PRODUCTS, _MISSING[0], _TWICE[0]),
    Family(COLUMNS, Mistake(
        "bias_first_rows", "The ranks add the first rows of the bias of {module}, whatever their rank: the weight was "
        "cut and the bias was not.", lambda at: {"bias": at.vector().roll(int(at.features()[0]))}, when=_biased)),
    Family(("o_proj", "mlp"), _MISSING[1], _TWICE[1]),
    Family(("o_partial", "mlp_partial"), Mistake(
        "row_bias_everywhere", "The sum of the ranks' parts is too large by the same vector for every token: the bias "
        "of {module}, which every rank adds. It belongs to the sum, so one rank adds it.",
        lambda at: at.make(bias=0.0) + at.vector(), when=lambda case: several_ranks(case) and _biased(case))),
    shard_of_another_rank,
    head_rows,
    Family(PRODUCTS, Mistake(
        "wrong_layer", "{name} is right for another layer's weight: that of {module} of layer {text}.", _of_layer,
        _of_layers, numbers="layer")),
    Family(PRODUCTS, Mistake(
        "wrong_weight", "{name} is right for the weight of {text}, where {module} belongs.",
        lambda at, other: {"weight": at.matrix(other), "bias": at.vector(other)}, _other_modules)),
    Family(PRODUCTS, Mistake(
        "weight_transposed", "{name} is what comes out of {module} with the square weight transposed: it is "
        "[out_features, in_features].", lambda at: {"weight": at.matrix().T},
        when=lambda case: all(len({*unaltered(case, 0).matrix(op).shape}) == 1 for op in case.ops))),
    Family((*COLUMNS, "logits"), Mistake(
        "norm_skipped", "{name} was made from what stands before the norm: the norm's output was not used.",
        lambda at: {"x": at("residual" if at.op in ("gate", "up") else "before")}),
        Mistake("norm_wrong_input", "{name} was made from what attention got, beside attention instead of behind it.",
                lambda at: {"x": at("input_norm")}, when=lambda case: case.op in ("gate", "up"))),
    Family(PRODUCTS, Mistake(
        "weight_not_loaded", "{name} is what a weight of zeros gives: that of {module} was made and never filled.",
        lambda at: {"weight": 0 * at.matrix()}, when=lambda case: case.op != "logits"), last=True),
    unrelated_weight,
    Family(MATRICES, Mistake(
        "block_scales_of_other_rows", "{name} is right but for the scales of {module}: they are those of the first "
        "blocks, whichever part of the weight the rank has.", lambda at: _with_first(at, _scales(at)), when=_scaled)),
    Family(COLUMNS, Mistake(
        "channel_scales", "{name} is right but for a factor for each output: the ranks have their own rows of "
        "{module}, and the scales of the first rows.",
        lambda at: _with_first(at, at.matrix().abs().amax(1, keepdim=True)),
        when=lambda case: 0 not in case.wrong_ranks)),
)


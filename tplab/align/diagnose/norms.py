"""Hypotheses about norms: what comes in is right, what comes out is not."""

import torch

from tplab.align.arithmetic import rms_norm
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import NORMS, OnRank, best, explains, fitted, right


def _input(at: OnRank, op: str) -> torch.Tensor:
    return at(NORMS[op][1])


def _weight(at: OnRank, op: str) -> torch.Tensor:
    return at.case.weight(f"{NORMS[op][0]}.weight")


@hypothesis(*NORMS)
def norm_left_out(case: Case) -> Diagnosis | None:
    """Is it what came in?"""
    if explains(case, _input):
        return case.diagnosis("norm_missing", f"{case.op} is what the norm was given, unchanged: it is not applied.")
    if explains(case, lambda at, op: _input(at, op) * _weight(at, op)):
        return case.diagnosis("norm_missing", f"{case.op} is the norm's input times its weight: it was never divided "
                              "by its root mean square.")


@hypothesis(*NORMS)
def another_epsilon(case: Case) -> Diagnosis | None:
    """Does another epsilon fit?"""
    eps = case.config.rms_norm_eps
    squares = _input(right(case, case.wrong_ranks[0]), case.op).float().pow(2).mean(-1)
    if not squares.max() > 1.05 * squares.min():
        return None  # all rows are as large: any factor would pass for an epsilon

    def inside(number):
        return lambda at, op: rms_norm(_input(at, op), _weight(at, op), number)

    def outside(number):
        return lambda at, op: _weight(at, op) * _input(at, op) / (
            _input(at, op).pow(2).mean(-1, keepdim=True).sqrt() + number)
    for where, family in (("", inside), (" outside of the square root", outside)):
        found = fitted(case, family, eps / 1e6, max(eps, squares.max().item()) * 10)
        if found is not None:
            return case.diagnosis("norm_epsilon", f"{case.op} is right for an epsilon of {found:.2g}{where}; the "
                                  f"checkpoint says {eps:g}.", epsilon=found)


@hypothesis(*NORMS)
def another_kind_of_norm(case: Case) -> Diagnosis | None:
    """Is it a norm without its weight, with 1 + weight, one that subtracts the mean, or one applied twice?"""
    eps = case.config.rms_norm_eps

    def normed(at, op, x=None, weight=None):
        return rms_norm(_input(at, op) if x is None else x, _weight(at, op) if weight is None else weight, eps)

    def centred(at, op):
        return normed(at, op, _input(at, op) - _input(at, op).mean(-1, keepdim=True))

    def by_deviation(at, op):
        x = _input(at, op)
        return _weight(at, op) * x * torch.rsqrt(x.float().var(-1, keepdim=True) + eps).to(x.dtype)
    kind = best(case, {
        ("norm_weight_missing", "normalized, but not multiplied with the norm's weight"):
            lambda at, op: normed(at, op, weight=torch.ones_like(_weight(at, op))),
        ("norm_plus_one", "multiplied with 1 + weight, as Gemma does; this checkpoint's weight is the factor itself"):
            lambda at, op: normed(at, op, weight=1 + _weight(at, op)),
        ("layer_norm", "what a LayerNorm gives, which subtracts the mean; this model has RMSNorm"): centred,
        ("norm_by_deviation", "divided by the standard deviation, where the mean is left out, not the mean square"):
            by_deviation,
        ("norm_twice", "normalized twice"): lambda at, op: normed(at, op, x=normed(at, op))})
    if kind is not None:
        return case.diagnosis(kind[0], f"{case.op} is {kind[1]}.")


@hypothesis("q_norm", "k_norm")
def norm_over_all_heads(case: Case) -> Diagnosis | None:
    """Was the mean square taken over all heads of a rank together?"""
    def over_all(at, op):
        x = _input(at, op).float()
        x = x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + case.config.rms_norm_eps)
        return _weight(at, op) * x.to(at.frame.dtype)
    if explains(case, over_all):
        return case.diagnosis("norm_over_all_heads", f"{case.op} was divided by the root mean square of all heads of a "
                              "token together; each head has its own.")


@hypothesis(*NORMS)
def weight_of_another_norm(case: Case) -> Diagnosis | None:
    """Was it multiplied with the weight of another norm?"""
    if len(case.ops) > 1:
        return None
    weights, own = case.frame.weights, f"{NORMS[case.op][0]}.weight"
    mine = case.weight(own)
    others = {name: weights.raw(name).to(mine.dtype) for name in weights.parts
              if name.endswith("norm.weight") and weights.parts[name].shape == mine.shape}
    found = best(case, {name: lambda at, op, other=other: rms_norm(_input(at, op), other, case.config.rms_norm_eps)
                        for name, other in others.items() if not torch.equal(other, mine)})
    if found is not None:
        return case.diagnosis("wrong_layer" if found.endswith(own) else "norm_weight_exchanged", f"{case.op} is right "
                              f"but for its weight: it was multiplied with {found}.")


@hypothesis("post_norm")
def norm_of_something_else(case: Case) -> Diagnosis | None:
    """Is it the norm of another tensor than the residual stream?"""
    says = {"before": "the layer's input: attention's output has not been added yet",
            "o_proj": "attention's output alone, without the residual stream"}
    source = best(case, {name: lambda at, op, name=name: rms_norm(at(name), _weight(at, op), case.config.rms_norm_eps)
                         for name in says})
    if source is not None:
        return case.diagnosis("norm_wrong_input", f"{case.op} is the norm of {says[source]}.")

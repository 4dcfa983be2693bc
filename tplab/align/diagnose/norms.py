"""Mistakes of norms."""

from collections.abc import Callable

import torch

from tplab.align.diagnose.altered import At, ratio, several_ranks, unaltered
from tplab.align.diagnose.case import Case
from tplab.align.diagnose.ends import scale_says
from tplab.align.diagnose.table import Family, Mistake
from tplab.align.points import POINTS, existing, inputs, layer_of, made_by

NORM_POINTS = made_by("norm")


def _plus_one(case: Case) -> bool:
    return case.config.norm == "GemmaRMSNorm"


def _factor(at: At) -> torch.Tensor:
    """What the normalized is multiplied with."""
    return at.weight() + _plus_one(at.case)


def _divided(by: Callable) -> Callable:
    """The norm with another measure of size in the place of the mean square."""
    def change(at: At) -> torch.Tensor:
        x = at.given()
        return _factor(at) * x * torch.rsqrt(by(x.float()) + at.case.config.rms_norm_eps).to(x.dtype)
    return change


def _over_own_heads(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean((-2, -1), keepdim=True)


def _squares(case: Case) -> torch.Tensor:
    return unaltered(case, case.wrong_ranks[0]).given().float().pow(2).mean(-1)


def _epsilons(case: Case) -> tuple[float, float]:
    eps = case.config.rms_norm_eps
    return eps / 1e6, max(eps, _squares(case).max().item()) * 10


def _rows_differ(case: Case) -> bool:
    """Whether rows are of unlike size: otherwise any factor would pass for an epsilon."""
    return bool(_squares(case).max() > 1.05 * _squares(case).min())


def _other_norm(name: str, same: bool) -> Mistake:
    """The weight of another norm: of the same place in another layer, or of another place."""
    def values(case: Case) -> dict[str, str]:
        at, weights, place = unaltered(case, 0), case.frame.weights, POINTS[case.op].module + ".weight"
        own = at.weight()
        return {other: other for other in weights.parts if len(case.ops) == 1 and other.endswith("norm.weight")
                and other.endswith(place) == same and weights.parts[other].shape == own.shape
                and not torch.equal(weights.raw(other).to(own.dtype), own)}
    return Mistake(name, "{op} is right but for its weight: it was multiplied with {text}.",
                   lambda at, other: {"weight": at.frame.weights.raw(other).to(at.frame.dtype)}, values)


# A norm that works in place on the residual stream.

IN_PLACE = ("The residual stream holds what {text} made of it: the norm works in place on the tensor that is kept "
            "(float() of a float32 tensor makes no copy).")


def _norm_behind(case: Case) -> str:
    """The norm that is given the sum of this point."""
    if case.point == "residual":
        return f"{case.layer}.post_norm"
    behind = layer_of(case.first.name) + 1
    return f"layers.{behind}.input_norm" if behind < case.config.num_layers else "norm"


def _streams(case: Case) -> dict[str, str]:
    """What may have gone into the sum, the stream or what an earlier norm in place left there; by which norm."""
    behind, stream = _norm_behind(case), case.made_from(case.op)[0]
    return dict.fromkeys((stream, "input_norm" if case.op == "residual" else "post_norm"),
                         behind.rpartition(".")[2]) if existing(behind, case.config) == behind else {}


def _scales_of_the_stream(case: Case) -> dict[float, str]:
    """By how much the embeddings were multiplied on their way into the first norm, by the sum behind it."""
    if case.layer != "layers.0" or not case.has("residual") or not case.has("o_proj"):
        return {}
    at = unaltered(case, case.wrong_ranks[0])
    times = ratio(at("residual") - at("o_proj"), at("before"))
    return {times: scale_says(case, times)} if abs(times - 1) >= 1e-3 else {}


NORMS = (
    Family(("input_norm", "post_norm", "norm"), Mistake(
        "norm_in_place", IN_PLACE, lambda at, _: at.given(), lambda case: {"": case.op},
        # The stream was already called wrong because of this norm.
        when=lambda case: inputs(case.first.name, case.config)[0] in case.report.guilty), own=True),
    Family(("residual", "output"), Mistake("norm_in_place", IN_PLACE, lambda at, stream: at.frame.make(
        _norm_behind(at.case), at.rank, x=at(stream) + at(at.case.made_from(at.op)[1])), _streams), own=True),
    Family(NORM_POINTS, Mistake("norm_missing", "{op} is what the norm was given, unchanged: it is not applied.",
                                lambda at: at.given()),
           Mistake("norm_missing", "{op} is the norm's input times its weight: it was never divided by its root mean "
                   "square.", lambda at: at.given() * _factor(at))),
    Family("input_norm", Mistake(
        "embedding_scale", "{op} was made of embeddings that were multiplied with {text}; this model does not.",
        lambda at, times: {"x": times * at.given()}, _scales_of_the_stream, numbers="times")),
    Family(NORM_POINTS, Mistake(
        "norm_epsilon", "{op} is right without an epsilon, or with one too small to be seen; the checkpoint says "
        "{eps:g}.", {"eps": 0.0}, when=_rows_differ), Mistake(
        "norm_epsilon", "{op} is right for an epsilon of {value:.2g}; the checkpoint says {eps:g}.",
        lambda at, eps: {"eps": eps}, fit=_epsilons, numbers="epsilon", when=_rows_differ), Mistake(
        "norm_epsilon", "{op} is right for an epsilon of {value:.2g} outside of the square root; the checkpoint says "
        "{eps:g}.", lambda at, eps: _factor(at) * at.given() / (at.given().pow(2).mean(-1, keepdim=True).sqrt() + eps),
        fit=_epsilons, numbers="epsilon", when=_rows_differ)),
    Family(NORM_POINTS, Mistake("norm_weight_missing", "{op} is normalized, but not multiplied with the norm's weight.",
                                lambda at: {"weight": torch.full_like(at.weight(), not _plus_one(at.case))}),
           Mistake("norm_plus_one", "{op} is multiplied with 1 + weight, as Gemma does; this checkpoint's weight is "
                   "the factor itself.", {"kind": "GemmaRMSNorm"}, when=lambda case: not _plus_one(case)),
           Mistake("norm_plus_one_forgotten", "{op} is multiplied with the weight; this model's factor is 1 + weight.",
                   {"kind": "WideRMSNorm"}, when=_plus_one),
           Mistake("layer_norm", "{op} is what a LayerNorm gives, which subtracts the mean; this model has RMSNorm.",
                   lambda at: {"x": at.given() - at.given().mean(-1, keepdim=True)}),
           Mistake("norm_by_deviation", "{op} is divided by the standard deviation, where the mean is left out, not "
                   "the mean square.", _divided(lambda x: x.var(-1, keepdim=True))),
           Mistake("norm_by_deviation", "{op} is divided by the root of the variance, where the mean is left out, not "
                   "the mean square.", _divided(lambda x: x.var(-1, keepdim=True, correction=0))),
           Mistake("norm_by_sum", "{op} is divided by the root of the sum of squares; it should be their mean.",
                   _divided(lambda x: x.pow(2).sum(-1, keepdim=True))),
           Mistake("norm_twice", "{op} is normalized twice.", lambda at: {"x": at.expected()})),
    Family(("q_norm", "k_norm"), Mistake(
        "norm_over_all_heads", "{op} was divided by the root mean square of all heads of a token together; each head "
        "has its own.", _divided(_over_own_heads), when=lambda case: not case.config.full_width_qk_norm), Mistake(
        "qk_norm_own_heads", "{op} was divided by the root mean square of the heads that are on its rank; this norm "
        "goes over all heads of the model, so the ranks' sums of squares must be added up.", _divided(_over_own_heads),
        when=lambda case: case.config.full_width_qk_norm and several_ranks(case)), Mistake(
        "qk_norm_each_head", "{op} was normalized head by head; this norm goes over all heads of the model together.",
        _divided(lambda x: x.pow(2).mean(-1, keepdim=True)), when=lambda case: case.config.full_width_qk_norm)),
    Family(NORM_POINTS, _other_norm("wrong_layer", True), _other_norm("norm_weight_exchanged", False)),
    Family("post_norm", Mistake("norm_wrong_input", "{op} is the norm of {text}.", lambda at, name: {"x": at(name)}, {
        "before": "the layer's input: attention's output has not been added yet",
        "o_proj": "attention's output alone, without the residual stream",
        "input_norm": "the first norm's result; right is the residual stream"})),
)


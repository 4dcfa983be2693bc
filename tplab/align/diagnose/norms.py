"""Mistakes of norms, of the two ends of the model, and of any point at all."""

from collections.abc import Callable

import torch

from tplab.align.arithmetic import soft_cap
from tplab.align.diagnose import numbers, places, steps
from tplab.align.diagnose.case import Case
from tplab.align.diagnose.table import Family, Mistake
from tplab.align.diagnose.wrong import At, coarser, in_calls, right, rounded, several_ranks
from tplab.align.points import POINTS, made_by
from tplab.checkpoint.layout import EMBEDDING

NORMS = made_by("norm")


# Anything.

def shifted(at: At, value: tuple[int, bool]) -> torch.Tensor:
    return in_calls(at.case, right(at.case, at.rank)(at.op), lambda x: x.roll(value[0], 0), value[1])


def _shifts(name: str, when: Callable) -> Mistake:
    return Mistake(name, "Each row of {name} is right for the token {text} it.", shifted,
                   {(shift, apart): where for shift, where in ((1, "before"), (-1, "behind"))
                    for apart in (False, True)}, number="shift",
                   when=lambda case: len(case.positions) > 2 and when(case))


ANYTHING = (
    Family(tuple(POINTS), _shifts("ids_shifted", lambda case: case.point == "embed"),
           _shifts("rows_shifted", lambda case: case.point != "embed"), own=True),
    Family(tuple(POINTS), Mistake(
        "low_precision", "{name} fits {op} in {text}: it was computed, or passed on, with so few digits.",
        lambda at, dtype: rounded(at.expected(), dtype), coarser, when=lambda case: case.op != case.point)),
    numbers.too_few_digits,
)


# The two ends.

def _global_rows(at: At) -> torch.Tensor:
    ids, looked_up = at.case.ids, at.case.ids.clone()
    for shard in at.case.plan.ranks:
        mine = (ids >= shard.vocab.start) & (ids < shard.vocab.stop)
        looked_up[mine] = shard.vocab.start + ids[mine].clamp(max=len(shard.vocab) - 1)
    return looked_up


def _misread(case: Case) -> dict[int, str]:
    """How many tokens that concerns, if any."""
    wrong = int((_global_rows(right(case, 0)) != case.ids).sum())
    return {wrong: f"{wrong} of {len(case.ids)}"} if wrong else {}


def _own_rows(at: At) -> torch.Tensor:
    return at.expected() * torch.isin(at.case.ids, torch.tensor([*at.case.plan.ranks[at.rank].vocab]))[:, None]


def _shifted_on(at: At, value: tuple[int, int]) -> torch.Tensor:
    rank, shift = value
    ids, own = at.case.ids, torch.tensor([*at.case.plan.ranks[rank].vocab])
    shifted = in_calls(at.case, ids, lambda x: x.roll(shift, 0))
    return (at.expected() * ~torch.isin(ids, own)[:, None]
            + at.make(ids=shifted) * torch.isin(shifted, own)[:, None])


def _capped(case: Case) -> bool:
    return case.config.final_logit_softcapping is not None


ENDS = (
    Family("embed", Mistake(
        "vocab_offset", "{text} tokens, all of ranks from 1 on, got another token's embedding: the row "
        "number inside a rank's shard is the token id minus the shard's first row.",
        lambda at, _: {"ids": _global_rows(at)}, _misread, number="tokens")),
    steps.rejected_draft_kept,
    steps.rows_in_other_orders,
    Family("embed", Mistake(
        "all_reduce_missing", "Each rank has the embeddings of its own tokens, and zeros for the others: the "
        "all-reduce behind the embedding is missing, or its result was dropped.", _own_rows, when=several_ranks)),
    Family("embed", Mistake(
        "ids_shifted", "The embeddings of rank {value[0]}'s rows were looked up for the token {text} each, the others "
        "for the right one.", _shifted_on, lambda case: {(rank, shift): where for shift, where in ((1, "before"), (
            -1, "behind")) for rank in case.frame.ranks if several_ranks(case)}, number="rank")),
    Family("embed", Mistake(
        "embedding_unscaled", "The embedding was not multiplied with {c.embedding_multiplier:.5g}, as this model does.",
        {"times": 1.0}, when=lambda case: case.config.embedding_multiplier != 1)),
    numbers.embedding_times,
    Family("logits", Mistake(
        "logits_capped_twice", "The logits are right, and then capped again: to within {c.final_logit_softcapping:g}.",
        lambda at: soft_cap(at.expected(), at.case.config.final_logit_softcapping), when=_capped), Mistake(
        "logits_uncapped", "The logits are not capped; this model keeps them within {c.final_logit_softcapping:g}.",
        {"cap": 0}, when=_capped)),
    Family("logits", Mistake(
        "head_tied", "The logits were made with the embedding as the head; this checkpoint has an lm_head.weight of "
        "its own, and does not tie them.", lambda at: {"weight": at.frame.weights.raw(EMBEDDING)},
        when=lambda case: not case.config.tie_word_embeddings)),
    numbers.rows_that_nobody_has,
    numbers.logits_times,
    places.ranks_exchanged,
    places.head_rows,
    numbers.empty_head,
    numbers.unrelated_head,
)


# Norms.

def _plus_one(case: Case) -> bool:
    return case.config.norm == "GemmaRMSNorm"


def _factor(at: At) -> torch.Tensor:
    """What the normalized is multiplied with."""
    return at.weight() + _plus_one(at.case)


def _outside(at: At, eps: float) -> torch.Tensor:
    return _factor(at) * at.given() / (at.given().pow(2).mean(-1, keepdim=True).sqrt() + eps)


def _divided(by: Callable) -> Callable:
    """The norm with another measure of size in the place of the mean square."""
    def change(at: At) -> torch.Tensor:
        x = at.given()
        return _factor(at) * x * torch.rsqrt(by(x.float()) + at.case.config.rms_norm_eps).to(x.dtype)
    return change


def _over_own_heads(x: torch.Tensor) -> torch.Tensor:
    return x.pow(2).mean((-2, -1), keepdim=True)


def _squares(case: Case) -> torch.Tensor:
    return right(case, case.wrong_ranks[0]).given().float().pow(2).mean(-1)


def _epsilons(case: Case) -> tuple[float, float]:
    eps = case.config.rms_norm_eps
    return eps / 1e6, max(eps, _squares(case).max().item()) * 10


def _rows_differ(case: Case) -> bool:
    """Whether rows are of unlike size: otherwise any factor would pass for an epsilon."""
    return bool(_squares(case).max() > 1.05 * _squares(case).min())


def _other_norms(case: Case) -> dict[str, str]:
    at = right(case, 0)
    own, weights = at.weight(), case.frame.weights
    return {name: name for name in weights.parts if len(case.ops) == 1 and name.endswith("norm.weight")
            and weights.parts[name].shape == own.shape and not torch.equal(weights.raw(name).to(own.dtype), own)}


def _other_norm(name: str, same: bool) -> Mistake:
    def values(case: Case) -> dict[str, str]:
        own = POINTS[case.op].module + ".weight"
        return {other: other for other in _other_norms(case) if other.endswith(own) == same}
    return Mistake(name, "{op} is right but for its weight: it was multiplied with {text}.",
                   lambda at, other: {"weight": at.frame.weights.raw(other).to(at.frame.dtype)}, values)


NORMING = (
    numbers.norm_in_place,
    Family(NORMS, Mistake("norm_missing", "{op} is what the norm was given, unchanged: it is not applied.",
                          lambda at: at.given()),
           Mistake("norm_missing", "{op} is the norm's input times its weight: it was never divided by its root mean "
                   "square.", lambda at: at.given() * _factor(at))),
    numbers.scaled_into_the_first_norm,
    Family(NORMS, Mistake("norm_epsilon", "{op} is right for an epsilon of {value:.2g}; the checkpoint says {eps:g}.",
                          lambda at, eps: {"eps": eps}, fit=_epsilons, number="epsilon", when=_rows_differ),
           Mistake("norm_epsilon", "{op} is right for an epsilon of {value:.2g} outside of the square root; the "
                   "checkpoint says {eps:g}.", _outside, fit=_epsilons, number="epsilon", when=_rows_differ)),
    Family(NORMS, Mistake("norm_weight_missing", "{op} is normalized, but not multiplied with the norm's weight.",
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
        "goes over all heads of the model, so the ranks must tell each other.", _divided(_over_own_heads),
        when=lambda case: case.config.full_width_qk_norm and several_ranks(case)), Mistake(
        "qk_norm_each_head", "{op} was normalized head by head; this norm goes over all heads of the model together.",
        _divided(lambda x: x.pow(2).mean(-1, keepdim=True)), when=lambda case: case.config.full_width_qk_norm)),
    Family(NORMS, _other_norm("wrong_layer", True), _other_norm("norm_weight_exchanged", False)),
    Family("post_norm", Mistake("norm_wrong_input", "{op} is the norm of {text}.", lambda at, name: {"x": at(name)}, {
        "before": "the layer's input: attention's output has not been added yet",
        "o_proj": "attention's output alone, without the residual stream"})),
)

"""Mistakes of experts: which of them, by what weights, on which rank, and how often their sum is taken."""

from dataclasses import replace

from tplab.align.diagnose.altered import At, several_ranks
from tplab.align.diagnose.case import Case
from tplab.align.diagnose.table import Family, Mistake


def _routed(name: str, says: str, when, **changed) -> Mistake:
    return Mistake(name, says, lambda at: {"moe": replace(at.case.config.experts, **changed)}, when=lambda case: when(
        case.config.experts))


def _dealt_out(case: Case) -> bool:
    return case.plan.enable_expert_parallel and several_ranks(case)


def _shared(case: Case) -> bool:
    moe = case.config.experts
    return bool(moe and moe.layers[int(case.layer.split(".")[1])] and moe.shared_intermediate_size)


def _shared_here(at: At):
    """The experts' sum over the ranks, and this rank's part of the shared one."""
    parts = {rank: at.frame.make(at.full("moe_partial"), rank, shared=False) for rank in at.frame.ranks}
    return sum(parts.values()) + at.frame.make(at.full("moe_partial"), at.rank) - parts[at.rank]


EXPERTS = (
    Family("moe_partial", _routed(
        "router_softmax_order", "The experts' weights are a softmax over the chosen ones; in this model it stands "
        "before the choice, over all experts.", lambda moe: moe.softmax_first and not moe.renormalize,
        softmax_first=False),
        _routed("router_softmax_order", "The experts' weights are shares among all experts; in this model the softmax "
                "stands behind the choice, over the chosen ones.", lambda moe: not moe.softmax_first,
                softmax_first=True),
        _routed("router_not_renormalised", "The weights of a token's experts do not add up to 1: they were not divided "
                "by their sum.", lambda moe: moe.softmax_first and moe.renormalize, renormalize=False),
        Mistake("experts_off_by_offset", "A rank takes the model's expert ids for its own: id 0 means its first "
                "expert, whichever that is.", lambda at: {"held": dict(enumerate(at.frame.experts_on(at.rank)))},
                when=_dealt_out),
        Mistake("top_k_of_own_experts", "Each rank chose the best {c.experts.top_k} of its own experts; they must "
                "be the best of all.", lambda at: {"among": list(at.frame.experts_on(at.rank))}, when=lambda case: (
                    _dealt_out(case) and all(len(shard.experts) >= case.config.experts.top_k
                                             for shard in case.plan.ranks))),
        Mistake("expert_bias_everywhere", "Every rank adds the experts' last biases to its columns' part; they "
                "belong to the sum, so one rank adds them.", {"share": 1.0},
                when=lambda case: case.config.experts.bias and several_ranks(case)),
        Mistake("shared_expert_missing", "The shared expert is left out.", {"shared": False}, when=_shared)),
    Family("mlp", Mistake(
        "shared_expert_not_reduced", "The experts' sum is right; the shared expert's part is each rank's own, and was "
        "never added up.", _shared_here, when=lambda case: _shared(case) and several_ranks(case))),
)

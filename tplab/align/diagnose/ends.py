"""Mistakes of the two ends of the model, the embedding and the head."""

import torch

from tplab.align.arithmetic import soft_cap
from tplab.align.diagnose import steps
from tplab.align.diagnose.altered import At, in_calls, likeness, multiple, several_ranks, unaltered
from tplab.align.diagnose.any_point import BESIDE
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.table import Family, Mistake, procedure
from tplab.checkpoint.layout import EMBEDDING

# The embedding.

def _global_rows(case: Case) -> torch.Tensor:
    ids, looked_up = case.ids, case.ids.clone()
    for shard in case.plan.ranks:
        mine = (ids >= shard.vocab.start) & (ids < shard.vocab.stop)
        looked_up[mine] = shard.vocab.start + ids[mine].clamp(max=len(shard.vocab) - 1)
    return looked_up


def _misread(case: Case) -> dict[int, str]:
    """How many tokens that concerns, if any."""
    wrong = int((_global_rows(case) != case.ids).sum())
    return {wrong: f"{wrong} of {len(case.ids)}"} if wrong else {}


def _own_rows(at: At, rank: int, ids: torch.Tensor) -> torch.Tensor:
    """Which of these tokens have their row on a rank, ``[rows, 1]``."""
    return torch.isin(ids, torch.tensor([*at.case.plan.ranks[rank].vocab]))[:, None]


def _shifted_on(at: At, value: tuple[int, int]) -> torch.Tensor:
    rank, shift = value
    ids, shifted = at.case.ids, in_calls(at.case, at.case.ids, lambda x: x.roll(shift, 0))
    return at.expected() * ~_own_rows(at, rank, ids) + at.make(ids=shifted) * _own_rows(at, rank, shifted)


def _times(at: At, times: float) -> torch.Tensor:
    return at.expected() * times


def _known_times(case: Case) -> tuple[float, ...]:
    """What a sum over the ranks is multiplied with if it is taken twice, or averaged."""
    tp = case.recording.world_size
    return (tp, 1 / tp) if tp > 1 else ()


def scale_says(case: Case, times: float) -> str:
    """A number that embeddings were multiplied with, in words."""
    root = case.config.hidden_size ** 0.5
    known = {root: f"sqrt({case.config.hidden_size}), the root of the hidden size, as Gemma does",
             1 / root: f"1 / sqrt({case.config.hidden_size})"}
    return next((text for number, text in known.items() if abs(times / number - 1) < 1e-4), f"{times:.5g}")


def _scales(case: Case) -> dict[float, str]:
    times = multiple(case)
    return {} if not times or any(abs(times / known - 1) < 1e-4 for known in _known_times(case)) else {
        times: scale_says(case, times)}


# The head.

def _caps(case: Case) -> tuple[float, float]:
    at = unaltered(case, case.wrong_ranks[0])
    return at.held().abs().max().item() * 1.0001, at.expected().abs().max().item() * 100


@procedure("logits", names="vocab_rows_missing")
def rows_on_no_rank(case: Case) -> Diagnosis | None:
    """Are all logits right, but for tokens whose row of the head is on no rank?"""
    should, ours = map(case.looked_at, (case.reference(), case.ours("logits")))
    lost = (ours == 0).all(0) | torch.isneginf(ours).all(0)
    if lost.any() and not lost.all() and case.fits(ours[:, ~lost], should[:, ~lost]):
        tokens = lost.nonzero().flatten().tolist()
        return case.diagnosis("vocab_rows_missing", f"The logits are right but for {len(tokens)} of "
                              f"{case.config.vocab_size} tokens, of which {tokens[0]} is the first: theirs are "
                              f"{ours[0, tokens[0]]:g} everywhere. No rank has these rows of the head.",
                              tokens=len(tokens))


@procedure("logits", names="head_random", last=True)
def unrelated_head(case: Case) -> Diagnosis | None:
    """Have the logits anything to do with Hugging Face's?"""
    ours, should = (case.looked_at(x).double() for x in (case.ours("logits"), case.reference()))
    alike = likeness(ours - ours.mean(), should - should.mean())
    if ours.any() and abs(alike) < 0.3 and case.looked_at(case.guilty_rows).all():
        return case.diagnosis("head_random", "The final norm is right, and the logits have nothing to do with Hugging "
                              f"Face's (correlation {alike:z.2f}): the head's weights are not the checkpoint's.",
                              correlation=alike)


def _empty(name: str, tied: bool, more: str = "") -> Mistake:
    return Mistake(name, "All logits are 0 although the final norm is right: the head's weight was made and never "
                   f"filled.{more}", lambda at: 0 * at.expected(),
                   when=lambda case: case.config.tie_word_embeddings == tied)


ENDS = (
    Family("embed", Mistake(
        "vocab_offset", "{text} tokens, all of them on ranks 1 and up, got another token's embedding: the row "
        "number inside a rank's shard is the token id minus the shard's first row.",
        lambda at, _: {"ids": _global_rows(at.case)}, _misread, numbers="tokens")),
    steps.rejected_draft_kept,
    steps.rows_in_other_orders,
    Family("embed", Mistake(
        "all_reduce_missing", "Each rank has the embeddings of its own tokens, and zeros for the others: the "
        "all-reduce behind the embedding is missing, or its result was dropped.",
        lambda at: at.expected() * _own_rows(at, at.rank, at.case.ids), when=several_ranks)),
    Family("embed", Mistake(
        "ids_shifted", "The embeddings of rank {value[0]}'s rows were looked up for the token {text} each, the others "
        "for the right one.", _shifted_on, lambda case: {
            (rank, shift): where for shift, where in BESIDE for rank in case.frame.ranks if several_ranks(case)},
        numbers="rank")),
    Family("embed", Mistake(
        "embedding_unscaled", "The embedding was not multiplied with {c.embedding_multiplier:.5g}, as this model does.",
        {"times": 1.0}, when=lambda case: case.config.embedding_multiplier != 1)),
    Family("embed", Mistake(
        "all_reduce_twice", "The embedding is {value:g} times the right one: it was reduced twice, or every rank "
        "looked all tokens up before the sum.", _times, lambda case: dict.fromkeys(_known_times(case)[:1], ""),
        numbers="times"), Mistake(
        "all_reduce_average", "The embedding is {value:g} times the right one: the ranks' parts were averaged.",
        _times, lambda case: dict.fromkeys(_known_times(case)[1:], ""), numbers="times"), Mistake(
        "embedding_scale", "The embedding was multiplied with {text}; this model does not.", _times, _scales,
        numbers="times")),
    Family("logits", Mistake(
        "logits_capped_twice", "The logits are right, and then capped again: to within {c.final_logit_softcapping:g}.",
        lambda at: soft_cap(at.expected(), at.case.config.final_logit_softcapping),
        when=lambda case: case.config.final_logit_softcapping), Mistake(
        "logits_uncapped", "The logits are not capped; this model keeps them within {c.final_logit_softcapping:g}.",
        {"cap": 0}, when=lambda case: case.config.final_logit_softcapping)),
    Family("logits", Mistake(
        "head_tied", "The logits were made with the embedding as the head; this checkpoint has an lm_head.weight of "
        "its own, and does not tie them.", lambda at: {"weight": at.frame.weights.raw(EMBEDDING)},
        when=lambda case: not case.config.tie_word_embeddings)),
    rows_on_no_rank,
    Family("logits", _empty("tie_ignored", True, " This model ties it to the embedding."),
           _empty("weight_not_loaded", False)),
    Family("logits", Mistake("logits_scale", "The logits are {value:.6g} times the right ones.", _times,
                             lambda case: {multiple(case): ""} if multiple(case) > 0 else {}, numbers="times"),
           Mistake("logits_softcap", "The logits are c × tanh(logits / c) with c = {value:.3g}; this model does not "
                   "cap them.", lambda at, cap: soft_cap(at.expected(), cap), fit=_caps, numbers="cap",
                   when=lambda case: multiple(case) > 0)),
    unrelated_head,
)

"""Hypotheses about the two ends of the model: token ids to embeddings, hidden states to logits."""

import itertools

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis


@hypothesis("embed")
def offset_not_subtracted(case: Case) -> Diagnosis | None:
    """Did ranks look their tokens up at the global row number, cut off at the end of their shard?"""
    looked_up = case.ids.clone()
    for shard in case.plan.ranks:
        mine = (case.ids >= shard.vocab.start) & (case.ids < shard.vocab.stop)
        looked_up[mine] = shard.vocab.start + case.ids[mine].clamp(max=len(shard.vocab) - 1)
    wrong = int((looked_up != case.ids).sum())
    if wrong and case.fits(case.ours("embed"), case.weight("model.embed_tokens.weight")[looked_up]):
        return case.diagnosis("vocab_offset", f"{wrong} of {len(case.ids)} tokens, all of ranks from 1 on, got another "
                              "token's embedding: the row number inside a rank's shard is the token id minus the "
                              "shard's first row.", tokens=wrong)


@hypothesis("embed")
def rows_in_other_orders(case: Case) -> Diagnosis | None:
    """Do other ranks hold the sequences of a step in another order than rank 0?"""
    weight, ours = case.weight("model.embed_tokens.weight"), case.ours("embed")
    row_of = {place: row for row, place in enumerate(case.places)}
    for step in case.report.decode.steps if case.report.decode else ():
        sequences = [[(s.request_id, s.segment.start + i) for i in range(s.segment.count)] for s in step.requests]
        here = ours[[row_of[place] for places in sequences for place in places]]
        here_ids = case.token_ids(sum(sequences, []))
        if case.fits(here, weight[here_ids]):
            continue
        for order in itertools.islice(itertools.permutations(sequences), 1, 120):
            order_ids = case.token_ids(sum(order, []))
            for ranks in (case.plan.ranks[1:], case.plan.ranks[1::2]):
                guess = torch.zeros_like(here)
                for shard in case.plan.ranks:
                    ids = order_ids if shard in ranks else here_ids
                    guess += weight[ids] * ((ids >= shard.vocab.start) & (ids < shard.vocab.stop))[:, None]
                if case.fits(here, guess):
                    names = [[places[0][0] for places in some] for some in (sequences, order)]
                    return case.diagnosis(
                        "row_order", f"In step {step.step_number} rank 0 holds the sequences in the order {names[0]}, "
                        f"rank {ranks[0].rank} in the order {names[1]}: the all-reduce adds up embeddings of unlike "
                        "tokens.", step=step.step_number, rank=ranks[0].rank)
        return None


@hypothesis("logits")
def empty_head(case: Case) -> Diagnosis | None:
    """Are all logits zero?"""
    if case.ours("logits").any():
        return None
    tied = case.config.tie_word_embeddings
    return case.diagnosis("tie_ignored" if tied else None, "All logits are 0 although the final norm is right: the "
                          "head's weight was made and never filled." + " This model ties it to the embedding." * tied)


@hypothesis("logits")
def ranks_exchanged(case: Case) -> Diagnosis | None:
    """Are these Hugging Face's logits, with the ranks' parts in another place?"""
    parts = [case.reference("logits")[:, shard.vocab.start:shard.vocab.stop] for shard in case.plan.ranks]
    if all(any(case.fits(held, part) for part in parts) for held in case.shards("logits")):
        return case.diagnosis(None, "Every rank's logits are right, but they stand in another rank's place.")


@hypothesis("logits")
def unrelated_head(case: Case) -> Diagnosis | None:
    """Have the logits anything to do with Hugging Face's?"""
    ours, right = (x - x.mean() for x in (case.ours("logits").double(), case.reference("logits").double()))
    likeness = ((ours * right).sum() / (ours.norm() * right.norm()).clamp(min=1e-30)).item()
    if case.ours("logits").any() and abs(likeness) < 0.3:
        return case.diagnosis("head_random", "The final norm is right, and the logits have nothing to do with Hugging "
                              f"Face's (correlation {likeness:.2f}): the head's weights are not the checkpoint's.",
                              correlation=likeness)

"""Hypotheses about the two ends of the model: token ids to embeddings, hidden states to logits."""

import itertools

import torch

from tplab.align.diagnose.case import Case, Diagnosis


def offset_not_subtracted(case: Case) -> Diagnosis | None:
    """Did ranks look their tokens up at the global row number, cut off at the end of their shard?"""
    ids = case.ids
    looked_up, owners = ids.clone(), torch.zeros_like(ids)
    for shard in case.plan.ranks:
        mine = (ids >= shard.vocab.start) & (ids < shard.vocab.stop)
        looked_up[mine] = shard.vocab.start + ids[mine].clamp(max=len(shard.vocab) - 1)
        owners[mine] = shard.rank
    wrong = int((looked_up != ids).sum())
    if wrong and case.fits(case.ours("embed"), case.tensor("model.embed_tokens.weight")[looked_up]):
        return case.found("vocab_offset", f"{wrong} of {len(ids)} tokens, all of ranks from 1 on, got another token's "
                          "embedding: the row number inside a rank's shard is the token id minus the shard's first "
                          "row.",
                          tokens=wrong)
    return None


def empty_head(case: Case) -> Diagnosis | None:
    """Are all logits zero?"""
    if case.ours("logits").any():
        return None
    tied = case.config.tie_word_embeddings
    return case.found("tie_ignored" if tied else None, "All logits are 0 although the final norm is right: the head's "
                      "weight was made and never filled." + " This model ties it to the embedding." * tied)


def other_order(case: Case) -> Diagnosis | None:
    """Are these Hugging Face's logits, with the ranks' parts in another place?"""
    parts = [case.right("logits")[:, shard.vocab.start:shard.vocab.stop] for shard in case.plan.ranks]
    held = case.shards("logits")
    if all(any(case.fits(mine, part) for part in parts) for mine in held):
        return case.found(None, "Every rank's logits are right, but they stand in another rank's place.")
    return None


def unrelated_head(case: Case) -> Diagnosis | None:
    """Have the logits anything to do with Hugging Face's?"""
    ours, right = (x - x.mean() for x in (case.ours("logits").double(), case.right("logits").double()))
    likeness = ((ours * right).sum() / (ours.norm() * right.norm()).clamp(min=1e-30)).item()
    if case.ours("logits").any() and abs(likeness) < 0.3:
        return case.found("head_random",
                          "The final norm is right, and the logits have nothing to do with Hugging Face's "
                          f"(correlation {likeness:.2f}): the head's weights are not the checkpoint's.",
                          correlation=likeness)
    return None


def rows_in_other_orders(case: Case) -> Diagnosis | None:
    """Do other ranks hold the sequences of a step in another order than rank 0?"""
    facts = case.report.decode
    if facts is None:
        return None
    weight, ours = case.tensor("model.embed_tokens.weight"), case.ours("embed")
    row_of = {place: row for row, place in enumerate((prompt, position) for prompt, positions in enumerate(case.rows)
                                                     for position in positions)}
    for step in facts.steps:
        places = [[(s.number, position) for position in range(s.segment.start, s.segment.start + s.segment.count)]
                  for s in step.sequences]
        here = ours[[row_of[place] for places_of_one in places for place in places_of_one]]
        here_ids = _tokens(case, places)
        if case.fits(here, weight[here_ids]):
            continue
        for order in itertools.islice(itertools.permutations(places), 1, 120):
            for ranks in (case.plan.ranks[1:], case.plan.ranks[1::2]):
                guess = torch.zeros_like(here)
                for shard in case.plan.ranks:
                    ids = _tokens(case, order) if shard in ranks else here_ids
                    guess += weight[ids] * ((ids >= shard.vocab.start) & (ids < shard.vocab.stop))[:, None]
                if case.fits(here, guess):
                    names = [[one[0][0] for one in some] for some in (places, order)]
                    return case.found("row_order",
                                      f"In step {step.number} rank 0 holds the sequences in the order {names[0]}, "
                                      f"rank {ranks[0].rank} in the order {names[1]}: the all-reduce adds up "
                                      "embeddings of "
                                      "unlike tokens.", step=step.number, rank=ranks[0].rank)
        return None
    return None


def _tokens(case: Case, places) -> torch.Tensor:
    return torch.tensor([case.report.ids[number][position] for one in places for number, position in one])


HYPOTHESES = {"embed": (offset_not_subtracted, rows_in_other_orders),
              "logits": (empty_head, other_order, unrelated_head)}

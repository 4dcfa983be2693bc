"""Hypotheses about the two ends of the model: token ids to embeddings, hidden states to logits."""

import itertools

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import best, explains, fitted, linear, right
from tplab.checkpoint.layout import EMBEDDING


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


@hypothesis("embed")
def embeddings_not_added_up(case: Case) -> Diagnosis | None:
    """Does each rank have the embeddings of its own rows only, or a multiple of what is right?"""
    tp = case.recording.world_size
    if tp == 1:
        return None

    def own_rows(at, op):
        here = torch.isin(case.ids, torch.tensor([*case.plan.ranks[at.rank].vocab]))
        return right(case, at.rank)(op) * here[:, None]
    if explains(case, own_rows):
        return case.diagnosis("all_reduce_missing", "Each rank has the embeddings of its own tokens, and zeros for the "
                              "others: the all-reduce behind the embedding is missing, or its result was dropped.")
    says = {tp: ("all_reduce_twice", "it was reduced twice, or every rank looked all tokens up before the sum"),
            1 / tp: ("all_reduce_average", "the ranks' parts were averaged")}
    times = best(case, {times: lambda at, op, times=times: right(case, at.rank)(op) * times for times in says})
    if times:
        return case.diagnosis(says[times][0], f"The embedding is {times:g} times the right one: {says[times][1]}.",
                              times=times)


@hypothesis("embed")
def scaled_embeddings(case: Case) -> Diagnosis | None:
    """Was the embedding multiplied with a number?"""
    root = case.config.hidden_size ** 0.5
    times = {root: f"sqrt({case.config.hidden_size}), the root of the hidden size, as Gemma does", 1 / root: "1 / sqrt("
             f"{case.config.hidden_size})"}
    found = best(case, {number: lambda at, op, number=number: right(case, at.rank)(op) * number for number in times})
    if found:
        return case.diagnosis("embedding_scale", f"The embedding was multiplied with {times[found]}; this model does "
                              "not.", times=found)


@hypothesis("logits")
def head_of_the_embedding(case: Case) -> Diagnosis | None:
    """Is the head the embedding, although this model does not tie them?"""
    if not case.config.tie_word_embeddings and explains(case, lambda at, op: linear(
            at, op, weight=case.frame.weights.raw(EMBEDDING).to(case.frame.dtype))):
        return case.diagnosis("head_tied", "The logits were made with the embedding as the head; this checkpoint has "
                              "an lm_head.weight of its own, and does not tie them.")


@hypothesis("logits")
def rows_that_nobody_has(case: Case) -> Diagnosis | None:
    """Are all logits right, but for tokens whose row of the head is on no rank?"""
    should, ours = case.reference("logits"), case.ours("logits")
    lost = (ours == 0).all(0) | torch.isneginf(ours).all(0)
    if lost.any() and not lost.all() and case.fits(ours[:, ~lost], should[:, ~lost]):
        tokens = lost.nonzero().flatten().tolist()
        return case.diagnosis("vocab_rows_missing", f"The logits are right but for {len(tokens)} of "
                              f"{case.config.vocab_size} tokens, of which {tokens[0]} is the first: theirs are "
                              f"{ours[0, tokens[0]]:g} everywhere. No rank has these rows of the head.",
                              tokens=len(tokens))


@hypothesis("logits")
def changed_logits(case: Case) -> Diagnosis | None:
    """Were right logits scaled, or capped?"""
    should, ours = case.reference("logits").double(), case.ours("logits").double()
    if not torch.isfinite(ours).all() or not ours.any():
        return None
    times = ((ours * should).sum() / (should * should).sum()).item()
    if times > 0 and explains(case, lambda at, op: right(case, at.rank)(op) * times):
        return case.diagnosis("logits_scale", f"The logits are {times:.4g} times the right ones.", times=times)
    cap = fitted(case, lambda cap: lambda at, op: cap * torch.tanh(right(case, at.rank)(op) / cap),
                 ours.abs().max().item() * 1.0001, should.abs().max().item() * 100)
    if cap is not None:
        return case.diagnosis("logits_softcap", f"The logits are c × tanh(logits / c) with c = {cap:.3g}; this model "
                              "does not cap them.", cap=cap)


@hypothesis("logits")
def ranks_exchanged(case: Case) -> Diagnosis | None:
    """Are these Hugging Face's logits, with the ranks' parts in another place?"""
    parts = [case.reference("logits")[:, shard.vocab.start:shard.vocab.stop] for shard in case.plan.ranks]
    if all(any(case.fits(held, part) for part in parts) for held in case.shards("logits")):
        return case.diagnosis("shard_of_another_rank", "Every rank's logits are right, but they stand in another "
                              "rank's place.")


@hypothesis("logits")
def head_rows_elsewhere(case: Case) -> Diagnosis | None:
    """Is every logit right, for another token?"""
    should, rows = case.reference("logits").double(), []
    for rank, held in enumerate(case.shards("logits")):
        wanted = torch.tensor(right(case, rank).indices("logits"))
        some = torch.arange(len(wanted))[::max(1, len(wanted) // 256)]
        for column in some.tolist():
            gap = (should - held[:, column:column + 1].double()).abs().amax(0)
            place = int(gap.argmin())
            if len(should) < 2 or not gap[place] <= case.tolerance * held.abs().max():
                return None
            rows.append((rank, int(wanted[column]), place))
    wrong = [row for row in rows if row[1] != row[2]]
    owner = {token: shard.rank for shard in case.plan.ranks for token in shard.vocab}
    if not wrong or len({(rank, owner[place], place - wanted) for rank, wanted, place in rows}) == len(case.shards(
            "logits")) > 1 and {owner[place] for *_, place in rows} == {*owner.values()}:
        return None  # where whole shards are exchanged, no row of the head is
    if all(place in case.plan.ranks[rank].vocab for rank, _, place in rows):
        rank, wanted, place = wrong[0]
        return case.diagnosis("head_rows", f"The head's rows are right, but stand in another order: rank {rank} has "
                              f"token {place}'s logit where token {wanted}'s belongs.", wanted=wanted, row=place)
    rank, wanted, place = wrong[0]
    return case.diagnosis("head_rows", f"Every logit is right, but for another token: rank {rank} has token {place}'s "
                          f"where token {wanted}'s belongs.", wanted=wanted, row=place)


@hypothesis("logits")
def empty_head(case: Case) -> Diagnosis | None:
    """Are all logits zero?"""
    if case.ours("logits").any():
        return None
    tied = case.config.tie_word_embeddings
    return case.diagnosis("tie_ignored" if tied else "weight_not_loaded", "All logits are 0 although the final norm is "
                          "right: the head's weight was made and never filled."
                          + " This model ties it to the embedding." * tied)


@hypothesis("logits", last=True)
def unrelated_head(case: Case) -> Diagnosis | None:
    """Have the logits anything to do with Hugging Face's?"""
    ours, right = (x - x.mean() for x in (case.ours("logits").double(), case.reference("logits").double()))
    likeness = ((ours * right).sum() / (ours.norm() * right.norm()).clamp(min=1e-30)).item()
    if case.ours("logits").any() and abs(likeness) < 0.3:
        return case.diagnosis("head_random", "The final norm is right, and the logits have nothing to do with Hugging "
                              f"Face's (correlation {likeness:z.2f}): the head's weights are not the checkpoint's.",
                              correlation=likeness)

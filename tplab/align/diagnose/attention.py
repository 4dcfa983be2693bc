"""Hypotheses about attention itself: q, k and v are right, what was made of them is not."""

from collections.abc import Iterator

import torch

from tplab.align.arithmetic import attend
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import attention, explains


def prompts(case: Case) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Prompt by prompt: its number, tplab's attention output, the rows' positions, their queries."""
    parts = (tensor.split(case.lengths) for tensor in (case.ours("attn"), case.positions, case.reference("q_rope")))
    for prompt, (ours, positions, q) in enumerate(zip(*parts)):
        if len(ours):
            yield prompt, ours, positions, q


def keys_and_values(case: Case, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v of all tokens of a prompt, a head for each query head that a rank holds."""
    heads = torch.tensor(case.query_heads) // case.group
    return case.keys(prompt, "k_rope")[:, heads], case.keys(prompt, "v")[:, heads]


def sees_all(case: Case) -> bool:
    """Whether the rows that had later keys beside them saw these, too. (A decoding row has none, but its batch may have
    padding, which no rule knows.)"""
    checked = False
    for prompt, ours, positions, q in prompts(case):
        k, v = keys_and_values(case, prompt)
        keys = case.num_keys(prompt)
        rows = keys > positions + 1
        visible = torch.arange(len(k))[None] < keys[rows][:, None]
        if rows.any() and not case.fits(ours[rows], attend(q[rows], k, v, visible, case.scaling)):
            return False
        checked = checked or bool(rows.any())
    return checked


@hypothesis("attn")
def zero_times_infinity(case: Case) -> Diagnosis | None:
    """NaN out of finite q, k and v: in which rows?"""
    nan = torch.isnan(case.ours(case.point)).flatten(1).any(1)  # attention's own, or a row of it behind o_proj
    if not nan.any():
        return None
    numbers = {"nan_share": case.first.nan / case.first.size, "nan": case.first.nan}
    share = f"{numbers['nan_share']:.0%} NaN"
    rows = {place: row for row, place in enumerate(case.places)}
    # A decoding token has no later ones to be hidden: an engine that reads its cache masks only what it reads at once.
    masked = {s: row for (s, p), row in rows.items() if (s, p) not in case.decoded} or {s: row for (s, _), row in
                                                                                        rows.items()}
    last = [rows[s, max(p for t, p in rows if t == s)] for s in {s for s, _ in rows}]
    if nan[last].all() and int(nan.sum()) == len(last) < len(nan):
        return case.diagnosis("mask_inverted", f"{share}: only the last token of each text, from which nothing is "
                              "hidden. The mask is the wrong way round, and hides all that this token may see.",
                              **numbers)
    if nan[list(masked.values())].all():
        return case.diagnosis("nan_mask", f"{share} although q, k and v are finite, also for the last token, from "
                              "which nothing is hidden: something multiplies 0 by -inf. Use a boolean mask and "
                              "masked_fill.", **numbers)
    return case.diagnosis(None, f"{share}, but not for the last token: in {int(nan.sum())} rows every key is hidden, "
                          "and a softmax over nothing but -inf is 0 / 0.", **numbers)


@hypothesis("attn")
def sees_the_future(case: Case) -> Diagnosis | None:
    """Does attention without a mask, or with one that is a step off, give these numbers?"""
    def everything(query, key, keys):
        return key < keys
    if (sees_all(case) if case.has("attn") else explains(case, lambda at, op: attention(at, rule=everything))):
        return case.diagnosis("no_mask", "Attention fits a softmax over all keys there are: tokens see the future. No "
                              "mask is applied.")
    for shift, says in ((1, "each token also sees the next one"), (-1, "no token sees itself")):
        def off(query, key, keys, shift=shift):
            return (key < keys) & (key <= query + shift) | (query + key == 0)
        if explains(case, lambda at, op, off=off: attention(at, rule=off)):
            return case.diagnosis("mask_off_by_one", f"The mask's diagonal is one off: {says}.", shift=shift)


@hypothesis("attn")
def copies_taken_for_heads(case: Case) -> Diagnosis | None:
    """Does a rank's KV head j turn out to be copy j of repeated heads?"""
    heads = list(range(case.config.num_heads))
    for rank in case.frame.ranks:
        q, kv = case.indices("attn", rank), case.indices("k_rope", rank)
        if not {head // case.group for head in q} <= set(kv):
            return None  # there are query heads whose KV head is not here, so something else is wrong
        for head in q:
            heads[head] = kv[kv.index(head // case.group) // (len(q) // len(kv))]
    if explains(case, lambda at, op: attention(at, heads=torch.tensor(heads))):
        return case.diagnosis("repeated_kv_stored", "Query heads read copies of a rank's first KV heads where its "
                              "other ones should stand: keys and values were repeated for the query heads before they "
                              "were stored.")

"""Hypotheses about attention itself: q, k and v are right, what was made of them is not."""

import torch

from tplab.align.case import Case, Diagnosis


def _attended(case: Case, visible) -> torch.Tensor:
    """Attention as Hugging Face computes it, with another rule: ``visible(queries, keys)`` → boolean."""
    q, k, v = case.right("q_rope"), case.right("k_rope"), case.right("v")
    group = q.shape[1] // k.shape[1]
    out, start = [], 0
    for length in case.lengths:
        rows = slice(start, start + length)
        queries = q[rows].transpose(0, 1)
        keys, values = (t[rows].repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
        at = torch.arange(length)
        scores = queries @ keys.transpose(1, 2) * case.plan.head_dim ** -0.5
        scores = scores.masked_fill(~visible(at[:, None], at[None]), float("-inf"))
        out.append((torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ values).transpose(0, 1))
        start += length
    return torch.cat(out)


def zero_times_infinity(case: Case) -> Diagnosis | None:
    """NaN out of finite q, k and v: from which rows?"""
    nan = torch.isnan(case.ours("attn")).flatten(1).any(1)
    if not nan.any():
        return None
    share = case.first.nan / case.first.size
    last = torch.tensor(case.lengths).cumsum(0) - 1
    if nan[last].all():
        return case.found("nan_mask", f"{share:.0%} NaN although q, k and v are finite, also for the last token, from "
                          "which nothing is hidden: something multiplies 0 by -inf. Use a boolean mask and masked_fill.",
                          nan_share=share, nan=case.first.nan)
    return case.found(None, f"{share:.0%} NaN, but not for the last token: in {int(nan.sum())} rows every key is hidden, "
                      "and a softmax over nothing but -inf is 0 / 0.", nan_share=share, nan=case.first.nan)


def sees_the_future(case: Case) -> Diagnosis | None:
    """Does attention without a mask, or with one that is a step off, give these numbers?"""
    ours = case.ours("attn")
    if case.fits(ours, _attended(case, lambda query, key: torch.ones_like(query == key))):
        return case.found("no_mask", "Attention fits a softmax over the whole prompt: tokens see the future. No mask is "
                          "applied.", relative=case.first.relative)
    for shift, says in ((1, "each token also sees the next one"), (-1, "no token sees itself")):
        if case.fits(ours, _attended(case, lambda query, key: (key <= query + shift) | (query + key == 0))):
            return case.found(None, f"The mask's diagonal is one off: {says}.", shift=shift)
    return None


HYPOTHESES = {"attn": (zero_times_infinity, sees_the_future)}

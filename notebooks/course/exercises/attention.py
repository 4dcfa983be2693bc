"""Notebook 04: grouped attention, and the mask of a prompt, a chunk and a token."""

import torch

from course.exercises.rotation import numbers
from course.judge.attempt import Attempt, for_each, saying
from course.judge.compare import agree
from course.judge.verdict import Setting, at, exercise
from tplab.model.attention import attend, causal_mask


@exercise("my_attend", "04", takes="q, k, v, mask, scaling", place="attends",
          patches=at("tplab.model.attention.attend"))
def my_attend(attempt: Attempt, setting: Setting):
    """Several KV heads, several query heads for each, more keys than queries, two sequences; then in the engine."""
    def check(case):
        (batch, kv_heads, group, queries, keys, dim), starts, dtype = case
        scaling = 0.3 if case != shown else dim ** -0.5  # what was shown has the usual one
        given = [numbers(batch, heads, rows, dim, seed=seed).to(dtype) for seed, (heads, rows) in enumerate((
            (kv_heads * group, queries), (kv_heads, keys), (kv_heads, keys)), 1)]
        mask = causal_mask(torch.tensor(starts)[:, None] + torch.arange(queries), keys)
        found = attempt.tensor(*given, mask, scaling, dims="batch, heads, queries, head_dim", shape=given[0].shape,
                               dtype=dtype).float()
        q, k, v = (one.float() for one in given)
        right = attend(q, k, v, mask, scaling)
        nan = next((f"{found.isnan().double().mean():.0%} NaN; your line {line} is the first that makes some"
                    for line, one in attempt.made[0] if one.isnan().any() and found.isnan().any()), "")
        k_each, v_each = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = q @ k_each.mT * scaling
        masked = scores.masked_fill(mask, float("-inf"))
        k_steps, v_steps = ({f"{name} for each query head": one} if group > 1 else {} for name, one in (
            ("k", k_each), ("v", v_each)))
        with saying(f"{kv_heads} KV heads, {group} query heads each, {queries} queries, {keys} keys: "):
            agree(found, right, {
                f"query head 1 reads KV head {1 % kv_heads}. Neighbours belong together: in which order must the "
                "copies lie?": attend(q, *(x.repeat(1, group, 1, 1) for x in (k, v)), mask, scaling),
                **{f"the scores are multiplied with {what}, and scaling ({scaling:.3g}) is given for that":
                   attend(q, k, v, mask, factor) for what, factor in {
                       "1, not at all": 1, "1 / scaling": 1 / scaling, "scaling ** 2": scaling ** 2,
                       "head_dim ** -0.5": dim ** -0.5}.items()},
                "the mask is not used: tokens see the future": attend(q, k, v, mask & False, scaling),
                "True in the mask means: must not look. Yours looks just there": (
                    (turned := attend(q, k, v, ~mask, scaling)), turned.nan_to_num(0)),
                "queries are counted from key 0 on, as is_causal and triu(1) do; the mask knows where they stand":
                    attend(q, k, v, torch.ones_like(mask).triu(1), scaling),
                "the mask comes after the softmax, so the weights that are left do not add up to 1":
                    scores.softmax(-1).masked_fill(mask, 0) @ v_each,
                "the weights of all queries of a key add up to 1, and those of all keys of a query must":
                    masked.softmax(-2) @ v_each,
            } if dtype == exact else {}, nan, dims="sequence, query head, query" * (not nan), made=attempt.made[0],
                parts={f"the value of key {at}": v_each[:, :, at:at + 1] for at in range(keys)} | {"the query": q},
                steps={**k_steps, "the scaled scores": scores, "the masked scores": masked,
                       "the weights": masked.softmax(-1), **v_steps}, within=1e-4 if dtype == exact else 0.05)

    exact, shown = torch.float32, ((1, 1, 4, 5, 5, 16), (0,), torch.float32)
    for_each((((2, 3, 2, 4, 7, 9), (3, 2), exact), ((1, 2, 3, 1, 6, 8), (4,), exact),
              ((2, 4, 1, 3, 3, 6), (0, 0), exact), ((1, 5, 2, 3, 5, 6), (1,), torch.bfloat16)), check,
             lambda case: f"{case[0][1]} KV heads", shown=("one KV head, a square mask and the usual scaling,", shown))
    setting.align(dtype="float32" if setting.dtype == "float64" else setting.dtype)


@exercise("my_mask", "04", takes="positions, keys", place="makes the mask",
          patches=at("tplab.model.attention.causal_mask", "tplab.cache.paged.causal_mask"),
          agreed="on {ranks}, prompts in chunks and tokens behind them agree with Hugging Face")
def my_mask(attempt: Attempt, setting: Setting):
    """A chunk, a whole prompt, one token, two sequences of other lengths; then in the engine."""
    def check(case):
        kind, positions, keys = case
        positions = torch.tensor(positions)
        found = attempt.tensor(positions, keys, dims="batch, 1, queries, keys", shape=(*positions.shape[:1], 1,
                            positions.shape[1], keys), dtype=torch.bool)
        right = causal_mask(positions, keys)
        (row, _, query, _), *_ = [*(found != right).nonzero().tolist(), [0] * 4]
        position, whose = int(positions[row, query]), f" of sequence {row}" * (len(positions) > 1)
        seen = (~found[row, 0, query]).nonzero().flatten().tolist()
        agree(found, right, {}, f"{kind}, keys 0 to {keys - 1}: the query at position {position}{whose} may look at "
              f"keys 0 to {position}; yours looks at {seen or 'none'}")

    prompt = "a prompt of 5", [[0, 1, 2, 3, 4]], 5
    for_each((("a chunk at positions 3 to 5", [[3, 4, 5]], 6), prompt, ("a token at position 6", [[6]], 7),
              ("queries at 1, 3, 2 and at 4, 6, 7", [[1, 3, 2], [4, 6, 7]], 9),
              ("two sequences, at positions 2 and 5", [[2], [5]], 6)), check, lambda case: case[0],
             shown=(prompt[0], prompt))
    setting.align_in_chunks()

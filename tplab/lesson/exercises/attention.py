"""Notebook 04: grouped attention, and the mask of a prompt, a chunk and a token."""

import torch

from tplab.lesson.attempt import Attempt, for_each, saying
from tplab.lesson.compare import agree
from tplab.lesson.exercises.rotation import numbers
from tplab.lesson.verdict import Setting, at, exercise
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
                    for line, one in attempt.made[0] if one.isnan().any()), "")
        k_each, v_each = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = q @ k_each.mT * scaling
        masked = scores.masked_fill(mask, float("-inf"))
        k_steps, v_steps = ({f"{name} for each query head": one} if group > 1 else {} for name, one in (
            ("k", k_each), ("v", v_each)))
        with saying(f"{kv_heads} KV heads, {group} query heads each, {queries} queries, {keys} keys: "):
            agree(found.nan_to_num(), right, attention_ways(q, k, v, mask, scaling) if dtype == exact else {},
                  nan, dims="" if nan else "sequence, query head, query", made=attempt.made[0],
                  parts={} if nan else {f"the value of key {at}": v_each[:, :, at:at + 1] for at in range(keys)} | {
                      "the query": q}, steps={
                      **k_steps, "the scaled scores": scores, "the masked scores": masked,
                      "the weights": masked.softmax(-1), **v_steps}, within=1e-4 if dtype == exact else 0.05)

    exact, shown = torch.float32, ((1, 1, 4, 5, 5, 16), (0,), torch.float32)
    for_each((((2, 3, 2, 4, 7, 9), (3, 2), exact), ((1, 2, 3, 1, 6, 8), (4,), exact),
              ((2, 4, 1, 3, 3, 6), (0, 0), exact), ((1, 5, 2, 3, 5, 6), (1,), torch.bfloat16)), check,
             lambda case: f"{case[0][1]} KV heads", shown=("one KV head, as on fable's two ranks,", shown))
    setting.align(dtype="float32" if setting.dtype == "float64" else setting.dtype)


def attention_ways(q, k, v, mask, scaling: float) -> dict:
    """What comes out if one mistake is made: ``{sentence: numbers}``."""
    kv_heads = k.shape[1]
    group = q.shape[1] // kv_heads
    k_each, v_each = (x.repeat_interleave(group, 1) for x in (k, v))
    k_copy, v_copy = (x.repeat(1, group, 1, 1) for x in (k, v))
    factors = {"1, not at all": 1, "1 / scaling": 1 / scaling, "scaling ** 2": scaling ** 2,
               "scaling ** 0.5": scaling ** 0.5, "head_dim ** -0.5": q.shape[-1] ** -0.5}

    def hidden(scores):
        return scores.masked_fill(mask, float("-inf"))

    def weighed(scores, values=v_each, dim=-1):
        return (torch.softmax(scores, dim) @ values).nan_to_num()

    raw = q @ k_each.mT
    scores = raw * scaling
    return {
        f"query head 1 reads KV head {1 % kv_heads}. Neighbours belong together: in which order must the copies lie?":
            weighed(hidden(q @ k_copy.mT * scaling), v_copy),
        **{f"the scores are multiplied with {what}, and scaling ({scaling:.3g}) is given for that":
           weighed(hidden(raw * factor)) for what, factor in factors.items()},
        "the mask is not used: tokens see the future": weighed(scores),
        "True in the mask means: must not look. Yours looks just there":
            weighed(scores.masked_fill(~mask, float("-inf"))),
        "the mask comes after the softmax, so the weights that are left do not add up to 1":
            torch.softmax(scores, -1).masked_fill(mask, 0) @ v_each,
        "the mask is added to the scores, as 0 and 1: a score that is 1 lower, or higher, is not hidden":
            (weighed(scores + mask.float()), weighed(scores + (~mask).float())),
        "hidden scores become 0, or low and not low enough: exp of them is not 0":
            tuple(weighed(scores.masked_fill(mask, low)) for low in (0, -1, -2, -3, -5, -10, -20)),
        "is_causal lines up query 0 with key 0, and with a cache they stand apart: the mask knows where each one is":
            weighed(scores.masked_fill(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), float("-inf"))),
        **{f"the softmax runs over the {over}: which numbers must add up to 1?":
           tuple(weighed(hidden(each), dim=dim) for each in (scores, raw))
           for over, dim in {"queries": -2, "heads": 1, "sequences": 0}.items()}}


@exercise("my_mask", "04", takes="positions, keys", place="makes the mask",
          patches=at("tplab.model.attention.causal_mask", "tplab.cache.paged.causal_mask"),
          agreed="on {ranks}, prompts in chunks and tokens behind them agree with Hugging Face")
def my_mask(attempt: Attempt, setting: Setting):
    """A whole prompt, a chunk, one token, two sequences of other lengths; then in the engine."""
    def check(case):
        kind, positions, keys = case
        positions = torch.tensor(positions)
        found = attempt.tensor(positions, keys, dims="batch, 1, queries, keys", shape=(*positions.shape[:1], 1,
                            positions.shape[1], keys), dtype=torch.bool)
        right, wide = causal_mask(positions, keys), torch.ones(positions.shape[1], keys, dtype=torch.bool)
        (row, _, query, _), *_ = [*(found != right).nonzero().tolist(), [0] * 4]
        position, whose = int(positions[row, query]), f" of sequence {row}" * (len(positions) > 1)
        seen = (~found[row, 0, query]).nonzero().flatten().tolist()
        with saying(f"{kind}, keys 0 to {keys - 1}: "):
            agree(found, right, {
                "True means: must not look. Yours hides what may be seen": ~right,
                "nothing is hidden: these queries see what comes after them. Does a cache make a mask needless?":
                    torch.zeros_like(right), "everything is hidden": torch.ones_like(right),
                "the last query does not always stand at the last key, as triu(keys - queries + 1) has it: see "
                "positions": wide.triu(keys - len(wide) + 1).expand_as(right),
                "no token sees itself": causal_mask(positions - 1, keys),
                "each token also sees the next one": causal_mask(positions + 1, keys),
                "rows are taken for positions: the first query of a chunk does not stand at 0":
                    wide.triu(1).expand_as(right),
                "every sequence has the mask of the first one": right[:1].expand_as(right),
                "the past is hidden, and the future is seen: is the comparison wrong way round, or have queries and "
                "keys changed places?": (torch.arange(keys) < positions[..., None])[:, None],
            }, f"the query at position {position}{whose} may look at keys 0 to {position}; yours looks at "
               f"{seen or 'none'}")

    for_each((("a prompt of 5", [[0, 1, 2, 3, 4]], 5), ("a chunk at positions 3 to 5", [[3, 4, 5]], 6),
              ("a token at position 6", [[6]], 7),
              ("queries at 1, 3, 2 and at 4, 6, 7", [[1, 3, 2], [4, 6, 7]], 9),
              ("two sequences, at positions 2 and 5", [[2], [5]], 6)), check, lambda case: case[0])
    setting.align_in_chunks()

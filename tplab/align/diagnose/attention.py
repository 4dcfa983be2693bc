"""Mistakes of attention: scale, mask, weights, heads, and what is seen of a cache."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from tplab.align.arithmetic import as_dtype, attend, rotated, soft_cap
from tplab.align.diagnose import steps
from tplab.align.diagnose.altered import At, coarser, distance, in_calls, several_ranks
from tplab.align.diagnose.cache_rows import stale_rows
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.table import Changed, Family, Mistake, procedure
from tplab.align.operations import Attended

# What is read: scales, windows, heads.


def _copies(case: Case) -> list[int] | None:
    """The KV head of each query head if a rank's KV head j is taken for copy j of repeated ones."""
    heads = list(range(case.config.num_heads))
    for rank in case.frame.ranks:
        q, kv = case.indices("attn", rank), case.indices("k_rope", rank)
        if not {case.frame.kv_heads[head] for head in q} <= set(kv):
            return None  # there are query heads whose KV head is not here, so something else is wrong
        for head in q:
            heads[head] = kv[kv.index(case.frame.kv_heads[head]) // max(len(q) // len(kv), 1)]
    return heads


def _scales(case: Case) -> dict[float, str]:
    config, dim = case.config, case.config.head_dim
    known = {1.0: "1: they were not scaled", 1 / dim: f"1 / {dim}: they were scaled twice",
             dim ** 0.5: f"sqrt({dim}): they were multiplied where they should be divided",
             config.hidden_size ** -0.5: f"1 / sqrt({config.hidden_size}), of the hidden size",
             (config.hidden_size / config.num_heads) ** -0.5:
                 f"1 / sqrt({config.hidden_size} / {config.num_heads}), of hidden size / heads"}
    if config.scaling != dim ** -0.5:
        known[dim ** -0.5] = f"1 / sqrt({dim}), of a head's size"
    return {number: text for number, text in known.items() if abs(number / config.scaling - 1) > 1e-3}


def _window(case: Case) -> int:
    return case.frame.window(f"{case.layer}.")


def _windows(case: Case) -> dict[int, str]:
    longest = max(case.recording.num_keys)
    known = {*range(1, min(longest, 65)), *(2 ** n for n in range(6, 16) if 2 ** n < longest)} - {_window(case)}
    return dict.fromkeys(sorted(known), _window_says(case))


def _window_says(case: Case) -> str:
    return f"this layer's window has {_window(case)}" if _window(case) else "this layer has no sliding window"


def _other_windows(case: Case) -> dict[int, str]:
    """Those of other layers, and none at all."""
    return {size: f"{f'the last {size} tokens only' if size else 'all tokens before it'}; {_window_says(case)}"
            for size in {0, *(size or 0 for size in case.config.windows)} - {_window(case)}}


def _unscaled(at: At, value: tuple) -> dict:
    """Keys and values stored as ``x / scale``, and read without it."""
    scale, dtype, which = value

    def stored(x):
        return (x if dtype is None else as_dtype(dtype, x, scale)) / scale

    def read(x):
        return x if dtype is None else as_dtype(dtype, x, scale)
    return {"keys": lambda one: stored(one.k) if "keys" in which else read(one.k),
            "values": lambda one: stored(one.v) if "values" in which else read(one.v)}


def _scaled_caches(case: Case) -> dict:
    return {(scale, dtype, which): f"{which} come out {1 / scale:g} times as large{how}"
            for dtype, how in ((torch.float8_e4m3fn, ", of an fp8 (e4m3) cache"), (torch.float8_e5m2, ", of an fp8 "
                                                                                  "(e5m2) cache"), (None, ""))
            for scale in (0.5, 0.25, 0.125, 0.0625, 2.0, 4.0) for which in ("keys and values", "values", "keys")}


def _turned_values(at: At, one: Attended) -> torch.Tensor:
    tables = at.rotary(torch.arange(len(one.v)))
    return rotated(at.case.config.model_type, one.v, tables["cos"], tables["sin"])


def _exchanged(at: At) -> dict:
    """Keys and values change places before the keys are turned."""
    if at.op == "k_rope":
        return {"x": at("v")}
    heads = at.indices("k_rope")

    def raw_keys(one):
        every = at.frame.keys(one.number, at.full("k"), at.rank, heads)
        needed = sorted({at.frame.kv_heads[head] for head in at.indices("attn")})
        return every[:, [list(heads).index(head) for head in needed]]
    turned = {} if at.case.has("k_rope") else {"keys": lambda one: _turned_values(at, one)}
    return {"values": raw_keys} | turned


def _flattened(at: At) -> torch.Tensor:
    heads = sorted({at.frame.kv_heads[head] for head in at.indices("attn")})
    parts = [(one.q, one.k[one.positions], one.v[one.positions])
             for one in at.frame.sequences(at.layer, at.rank, heads)]
    q, k, v = (torch.cat(part) for part in zip(*parts))
    out, reads = torch.empty_like(q), [heads.index(at.frame.kv_heads[head]) for head in at.indices("attn")]
    for rows in at.case.calls:
        n = torch.arange(len(rows))
        out[rows] = attend(q[rows], k[rows][:, reads], v[rows][:, reads], n[None] <= n[:, None], at.case.config.scaling)
    return out


def calls(query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """For each query, at which position its call began and of how many tokens of the sequence it is; from positions
    and numbers of keys, which differ from call to call, ``[n, 1]``."""
    _, call, sizes = keys.flatten().unique(return_inverse=True, return_counts=True)
    starts = torch.full_like(sizes, len(query) + int(query.max())).scatter_reduce(0, call, query.flatten(), "amin")
    return starts[call][:, None], sizes[call][:, None]


def decoded_lost(query, key, keys):
    starts, sizes = calls(query, keys)
    alone = query[(sizes == 1) & (starts > 0)]
    return (key <= query) & (~torch.isin(key, alone) | (key >= starts))


def _past(name: str, says: str, rule: Callable) -> Mistake:
    return Mistake(name, "Keys and values are right, but " + says + ".", {"rule": rule},
                   when=lambda case: len(set(case.recording.num_keys)) > 1)


def _shown_by_the_first(case: Case) -> dict[tuple, str]:
    """A decoded row whose batch begins with a sequence of another length: its place, that length; its own length."""
    own, first = case.positions + 1, case.beside[:, 0]
    rows = ((first > 0) & (first != own)).nonzero().flatten()[:1].tolist()
    return {(*case.places[row][::-1], int(first[row])): str(int(own[row])) for row in rows}


def _first_decoded(case: Case) -> torch.Tensor:
    return case.decoded & (case.decoded.cumsum(0) == 1)


def _too_early(at: At, _) -> dict:
    """What slots hold when decoded tokens are written one slot too early, call by call."""
    case = at.case

    def moved(one, x):
        last, decoded = int(one.positions[-1]), case.positions[case.decoded & (case.sequences == one.number)].tolist()
        if len(one.q) > 1 or last not in decoded:
            return x
        return torch.cat([x[[slot + (slot + 1 in decoded) for slot in range(last)]], torch.zeros_like(x[:1])])
    return {"longest": 0 * case.beside[:, 1], "keys": lambda one: moved(one, one.k),
            "values": lambda one: moved(one, one.v)}


@procedure("attn", names="query_to_kv")
def other_kv_heads(case: Case) -> Diagnosis | None:
    """Which KV head does each query head read: its keys and its values, or only one of the two?"""
    own, kv_heads = case.frame.kv_heads, case.config.num_kv_heads
    for what, parts in (("", ("keys_of", "values_of")), ("the values of ", ("values_of",)),
                        ("the keys of ", ("keys_of",))) if case.point == "attn" else ():
        if wrong := {head: kv for head, kv in _read(case, parts, own).items() if kv != own[head]}:
            head, kv = next(iter(wrong.items()))
            modulo, zero = ({h: reads for h in range(len(own)) if (reads := pattern(h)) != own[h]}
                            for pattern in (lambda h: h % kv_heads, lambda h: 0))
            says = (f"h reads {what}KV head h % kv_heads; " if wrong == modulo else
                    f"all query heads read {what}KV head 0; " if wrong == zero else "")
            return case.diagnosis("query_to_kv", f"K and V are right, but {says}query head {head} reads {what}KV head "
                                  f"{kv}; in grouped attention, head h reads h // group, here {own[head]} "
                                  f"({len(wrong)} of {len(own)} query heads read another one than theirs).",
                                  head=head, reads=kv)


def _read(case: Case, parts: tuple[str, ...], own: list[int]) -> dict[int, int]:
    """The KV head that each query head of the wrong ranks reads, of these parts; none if that explains not all of them.
    """
    reads = {}
    for rank in case.wrong_ranks:
        at, held = At(case, rank, case.frame, "attn"), case.shard("attn", rank)
        guesses = {kv: at.make(**{part: [kv] * len(own) for part in parts}) for kv in range(case.config.num_kv_heads)}
        for local, head in enumerate(at.indices("attn")):
            gaps = {kv: distance(*(case.looked_at(x[:, local]) for x in (held, guess)))
                    for kv, guess in guesses.items()}
            reads[head] = min(gaps, key=lambda kv: (gaps[kv] > case.tolerance, kv != own[head], gaps[kv]))
            if gaps[reads[head]] > case.tolerance:
                return {}
    return reads


# The mask and the weights.

def softmax(scores: torch.Tensor, dim: int = -1) -> torch.Tensor:
    return torch.softmax(scores.float(), dim)


def _masked(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~visible, float("-inf"))


def _weighed(name: str, says: str, weigh: Callable) -> Mistake:
    return Mistake(name, says + ".", {"weigh": weigh})


def _off_by_one(shift: int, says: str) -> Mistake:
    return Mistake("mask_off_by_one", "The mask's diagonal is one off: " + says + ".", lambda at, shift: {
        "rule": lambda query, key, keys: (key < keys) & (key <= query + shift) | (query + key == 0)}, {shift: ""},
        numbers="shift")


def _nan(case: Case) -> dict[tuple[float, int], str]:
    """How much of attention is NaN, and in words."""
    share = case.first.nan / case.first.size
    return {(share, case.first.nan): f"{share:.0%} NaN"}


def _inverted(says: str, change: Callable) -> Mistake:
    return Mistake("mask_inverted", "{text}: " + says + ". The mask is the wrong way round, and hides all that a token "
                   "may see.", change, _nan, numbers="nan_share nan", when=lambda case: case.first.nan > 0)


def _nan_rows(case: Case) -> torch.Tensor:
    """Attention's own rows that are NaN, or those of a point behind it."""
    return case.ours(case.point).flatten(1).isnan().any(1)


@procedure("attn", names="nan_mask")
def zero_times_infinity(case: Case) -> Diagnosis | None:
    """Is even the last token NaN, from which nothing is hidden, and not it alone?"""
    # A decoding token has no later ones to be hidden: an engine that reads its cache masks only what it reads at once.
    masked = ~case.decoded if (~case.decoded).any() else case.decoded
    ends = {int(case.sequences[row]): row for row in masked.nonzero().flatten().tolist()}
    nan, rows = _nan_rows(case), list(ends.values())
    (numbers, share), = _nan(case).items()
    if nan[rows].all() and (nan[masked].sum() > len(rows) or masked.sum() == len(rows)):
        return case.diagnosis("nan_mask", f"{share} although q, k and v are finite, also for the last token, from "
                              "which nothing is hidden: something multiplies 0 by -inf. Use a boolean mask and "
                              "masked_fill.", **dict(zip(("nan_share", "nan"), numbers)))


@procedure("attn", last=True)
def nothing_to_see(case: Case) -> Diagnosis | None:
    """Are some rows NaN?"""
    (numbers, share), = _nan(case).items()
    if rows := int(_nan_rows(case).sum()):
        return case.diagnosis(None, f"{share}: in {rows} rows every key is hidden, and a softmax over nothing but -inf "
                              "is 0 / 0.", **dict(zip(("nan_share", "nan"), numbers)))


NO_MASK = Mistake("no_mask", "Attention fits a softmax over all keys there are: tokens see the future. No key is "
                  "hidden.", {"rule": lambda query, key, keys: key < keys},
                  rows=lambda case: case.num_keys > case.positions + 1)  # a decoded row has no later keys
NEXT_TOO = _off_by_one(1, "each token also sees the next one")
MISUSED = tuple(_weighed("mask_misused", "The mask was " + says, weigh) for says, weigh in (
    ("multiplied with the scores, and a score of 0 is not a weight of 0",
     lambda scores, visible: softmax(scores * visible)),
    ("applied behind the softmax, so the weights that are left do not add up to 1",
     lambda scores, visible: softmax(scores) * visible),
    ("added as 1 for what is hidden; it must be minus infinity",
     lambda scores, visible: softmax(scores + (~visible).to(scores))),
    ("added as -1 for what is hidden; it must be minus infinity",
     lambda scores, visible: softmax(scores - (~visible).to(scores)))))
OVER_QUERIES = _weighed("softmax_dim", "The softmax was taken over the queries; a query's weights over its keys must "
                        "add up to 1", lambda scores, visible: softmax(_masked(scores, visible), 1))


def _filled_up(*mistakes: Mistake) -> Family:
    """The same where the keys of a decode step's sequences are filled up to the longest's with their newest."""
    def other(one: Mistake) -> Mistake:
        return replace(one, change=lambda at, *value: Changed(one, *value)(at) | {"longest": at.case.beside[:, 1]},
                       rows=None, when=lambda case: one.when(case) and bool(case.beside.any()))
    return Family("attn", *map(other, mistakes), last=True)


ATTENTION = (
    Family("attn", _inverted("the last token of each call, from which nothing is hidden", lambda at, _: {
        "rule": lambda query, key, keys: (key > query) & (key < keys)}), _inverted(
        "decoded tokens, from which nothing but padding is hidden", lambda at, _: {
            "rule": lambda query, key, keys: key > query, "longest": at.case.beside[:, 1]})),
    zero_times_infinity,
    Family("attn", NO_MASK),
    Family("attn", NEXT_TOO, _off_by_one(-1, "no token sees itself")),
    Family("attn", Mistake(
        "repeated_kv_stored", "Query heads read copies of a rank's first KV heads where its other ones should stand: "
        "keys and values were repeated for the query heads before they were stored.",
        lambda at: {"keys_of": _copies(at.case), "values_of": _copies(at.case)},
        when=lambda case: _copies(case) is not None)),
    Family("attn", Mistake(
        "softmax_scale", "Attention fits scores that are multiplied with {text}. Right is {scale}.",
        lambda at, scaling: {"scaling": scaling}, _scales, numbers="scale"), Mistake(
        "softmax_scale", "Attention fits scores that are multiplied with {value:.4g}, which is 1 / "
        "sqrt({inverse:.4g}). Right is {scale}.", lambda at, scaling: {"scaling": scaling},
        numbers="scale", fit=lambda case: (case.config.head_dim ** -1.5, case.config.head_dim ** 0.5))),
    Family("attn", Mistake(
        "window_one_too_wide", "Each token sees the last {value} tokens, itself among them; {text}: it was counted "
        "without the token itself.", lambda at, size: {"window": size}, lambda case: {
            _window(case) + 1: _window_says(case)} if _window(case) else {}, numbers="window"), Mistake(
        "window_wrong_layers", "Each token sees {text}. Other layers do; which layer it is was taken wrongly.",
        lambda at, size: {"window": size}, _other_windows, numbers="window",
        when=lambda case: any(case.config.windows)),
        Mistake("window_from_chunk_start", "A chunk's tokens count the window from its first token, not the text's.",
                lambda at: {"window": 0, "rule": lambda query, key, keys: (key <= query) & (
                    key > query - calls(query, keys)[0] - _window(at.case))}, when=lambda case: bool(_window(case)))),
    Family("attn", Mistake(
        "sliding_window", "Each token sees the last {value} tokens only; {text}.",
        lambda at, size: {"window": size}, _windows, numbers="window")),
    Family("attn", Mistake(
        "sinks_of_rank_0", "Each rank's heads have the sinks of the model's first heads: all were read, and not cut.",
        lambda at: {"sinks": at.frame.weights[f"model.{at.layer}self_attn.sinks"][:len(at.indices("attn"))]},
        when=lambda case: case.config.sinks), Mistake(
        "sinks_once_per_rank", "Each head's sink counts {tp} times, once for each rank.",
        lambda at: {"sinks": at.frame.sinks(at.layer, at.rank) + math.log(at.case.recording.world_size)},
        when=lambda case: case.config.sinks and several_ranks(case)), Mistake(
        "sinks_missing", "The heads' sinks take no part in the softmax.",
        lambda at: {"sinks": torch.full_like(at.frame.sinks(at.layer, at.rank), float("-inf"))},
        when=lambda case: case.config.sinks)),
    Family("attn", Mistake(
        "capped_after_mask", "Scores were capped after they were masked: what is hidden has minus {c."
        "attn_logit_softcapping:g} for a score, not minus infinity.", lambda at: {
            "cap": 0, "weigh": lambda scores, visible: softmax(soft_cap(
                _masked(scores, visible), at.case.config.attn_logit_softcapping))},
        when=lambda case: case.config.attn_logit_softcapping), Mistake(
        "scores_uncapped", "Scores are not capped; this model keeps them within {c.attn_logit_softcapping:g}.",
        {"cap": 0}, when=lambda case: case.config.attn_logit_softcapping)),
    Family("attn", *MISUSED),
    _filled_up(NO_MASK, NEXT_TOO, *MISUSED, OVER_QUERIES),
    Family("attn", _weighed("softmax_missing", "Queries, keys and values are right; the scores were taken for weights: "
                            "there is no softmax", lambda scores, visible: scores * visible),
           Mistake("softmax_scale", "Queries, keys and values are right; the weights were scaled, where the scores "
                   "should be.", lambda at: {"scaling": 1.0, "weigh": lambda scores, visible: (
                       softmax(_masked(scores, visible)) * at.case.config.scaling)}),
           Mistake("softmax_dtype", "Queries, keys and values are right; the softmax was taken in {text}. It belongs "
                   "in float32.", lambda at, dtype: {"weigh": lambda scores, visible: torch.softmax(
                       _masked(scores, visible).to(dtype), -1)}, coarser),
           Mistake("keys_for_values", "Queries, keys and values are right; the weights were given to the keys; they "
                   "belong to the values.", {"values": lambda one: one.k}),
           Mistake("attention_missing", "Queries, keys and values are right; the queries come out as they went in.",
                   lambda at: at("q_rope"))),
    Family(("k_rope", "attn"), Mistake(
        "qkv_order", "Keys and values change places behind the projection: what attention takes for keys are the "
        "rotated values, and it hands on the keys. Is the fused output split as q | k | v?", _exchanged,
        # Before the rotation, keys of a cache are nowhere: for passes that compute all that they look at.
        when=lambda case: not case.config.qk_norm and torch.equal(case.num_keys, case.sequences.bincount()[
            case.sequences]))),
    Family("attn", Mistake(
        "cross_sequence_attention", "Each token sees everything before it in the batch, other sequences included: they "
        "were laid behind each other under one causal mask.", _flattened,
        when=lambda case: len(case.sequences.unique()) > 1)),
    Family("attn", Mistake(
        "heads_not_transposed", "Attention's numbers are right, their places are not: [heads, tokens, head_dim] was "
        "taken for [tokens, heads, head_dim]; transpose before you reshape.",
        lambda at: in_calls(at.case, at.expected(), lambda x: x.transpose(0, 1).reshape(x.shape), apart=True)), Mistake(
        "heads_not_transposed", "Attention's numbers are right, their places are not: a token's numbers stand as "
        "[head_dim, heads], not as [heads, head_dim].",
        lambda at: at.expected().transpose(1, 2).reshape(at.expected().shape))),
    Family("attn", Mistake("rope_on_values", "Attention fits values that were rotated; RoPE turns q and k alone.",
                           lambda at: {"values": lambda one: _turned_values(at, one)})),
    other_kv_heads,
    Family("attn", Mistake(
        "mask_of_another_row", "Token {value[0]} of prompt {value[1]}, decoded beside others, sees {value[2]} keys, as "
        "many as the first sequence of its batch; it may see {text}.", lambda at, _: {
            "rule": lambda query, key, keys: (key <= query) | (len(query) == 1), "longest": at.case.beside[:, 0]},
        _shown_by_the_first, numbers="position")),
    steps.strange_blocks,
    Family("attn", Mistake(
        "slot_off_by_one", "Token {value[0]} of prompt {value[1]}, the first to be decoded, finds its own slot empty "
        "and its predecessor's overwritten with its own key: it was written one slot too early.", _too_early,
        lambda case: dict.fromkeys([case.places[row][::-1] for row in _first_decoded(case).nonzero().flatten()], ""),
        numbers="position", rows=_first_decoded)),
    Family("attn", _past("cache_not_read", "each token sees those of its own call only; what is in the cache is not "
                         "read",
                         lambda query, key, keys: (key <= query) & (key >= calls(query, keys)[0])),
           _past("mask_without_past", "row i of a call sees the keys 0 to i, as if nothing were in the cache; the "
                 "mask's diagonal must begin behind the cached tokens",
                 lambda query, key, keys: key <= query - calls(query, keys)[0]),
           _past("no_mask", "the first call is masked, the later ones are not: their tokens see the future",
                 lambda query, key, keys: torch.where(calls(query, keys)[0] > 0, key < keys, key <= query)),
           _past("cache_rows_lost", "tokens that were decoded are seen by none after them: they were not kept",
                 decoded_lost),
           _past("cache_rows_lost", "the tokens of the first call alone were kept", lambda query, key, keys:
                 (key <= query) & ((key < keys.min()) | (key >= calls(query, keys)[0])))),
    Family("attn", OVER_QUERIES),
    Family("attn", Mistake("cache_scale_ignored", "What attention reads is not scaled as it was stored: {text}.",
                           _unscaled, _scaled_caches, numbers="scale"), last=True),
    stale_rows,
    nothing_to_see,
)

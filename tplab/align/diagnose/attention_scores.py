"""Hypotheses about what attention makes of right queries, keys and values: scale, mask, weights, order."""

import torch

from tplab.align.arithmetic import attend
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import attention, best, distance, explains, fitted, right, rotated, tables


@hypothesis("attn")
def another_softmax_scale(case: Case) -> Diagnosis | None:
    """Were the scores multiplied with something else than 1 / sqrt(head_dim)?"""
    config, dim = case.config, case.config.head_dim
    known = {"1: they were not scaled": 1.0, f"1 / {dim}: they were scaled twice": 1 / dim,
             f"sqrt({dim}): they were multiplied where they should be divided": dim ** 0.5,
             f"1 / sqrt({config.hidden_size}), of the hidden size": config.hidden_size ** -0.5,
             f"1 / sqrt({config.hidden_size} / {config.num_heads}), of hidden size / heads":
                 (config.hidden_size / config.num_heads) ** -0.5}
    says = best(case, {says: lambda at, op, number=number: attention(at, scaling=number)
                               for says, number in known.items() if abs(number * dim ** 0.5 - 1) > 1e-3})
    if says is None:
        found = fitted(case, lambda number: lambda at, op: attention(at, scaling=number), dim ** -1.5, dim ** 0.5)
        if found is None:
            return None
        says, known = f"{found:.4g}, which is 1 / sqrt({found ** -2:.4g})", {}
    number = known.get(says) or found
    return case.diagnosis("softmax_scale", f"Attention fits scores that are multiplied with {says}. Right is "
                          f"1 / sqrt({dim}), of a head's size.", scale=number)


@hypothesis("attn")
def window(case: Case) -> Diagnosis | None:
    """Does every token see only the last few?"""
    longest = max(case.recording.num_keys)
    sizes = sorted({*range(1, min(longest, 65)), *(2 ** n for n in range(6, 16) if 2 ** n < longest)})
    def seen(at, size):
        return attention(at, rule=lambda query, key, keys: (key <= query) & (key > query - size))
    size = best(case, {size: lambda at, op, size=size: seen(at, size) for size in sizes})
    if size:
        return case.diagnosis("sliding_window", f"Each token sees the last {size} tokens only; this model has no "
                              "sliding window.", window=size)


@hypothesis("attn")
def another_use_of_the_mask(case: Case) -> Diagnosis | None:
    """Were the hidden scores set to something else than minus infinity, or the hidden weights to 0 afterwards?"""
    def softmax(scores):
        return torch.softmax(scores.float(), -1)
    ways = {
        "multiplied with the scores, and a score of 0 is not a weight of 0":
            lambda scores, visible: softmax(scores * visible),
        "applied behind the softmax, so the weights that are left do not add up to 1":
            lambda scores, visible: softmax(scores) * visible,
        "added as 1 for what is hidden; it must be minus infinity":
            lambda scores, visible: softmax(scores + (~visible).to(scores)),
        "added as -1 for what is hidden; it must be minus infinity":
            lambda scores, visible: softmax(scores - (~visible).to(scores)),
    }
    if (says := best(case, {says: lambda at, op, weigh=weigh: attention(at, weigh=weigh)
                                    for says, weigh in ways.items()})) is not None:
        return case.diagnosis("mask_misused", f"The mask was {says}.")


@hypothesis("attn")
def weights_or_values_of_another_kind(case: Case) -> Diagnosis | None:
    """Is there no softmax, were the weights scaled instead of the scores, are keys taken for values, or nothing at all?
    """
    def unscaled(scores, visible):
        return torch.softmax((scores / case.scaling).masked_fill(~visible, float("-inf")).float(), -1)
    ways = {
        ("softmax_missing", "the scores were taken for weights: there is no softmax"):
            lambda at, op: attention(at, weigh=lambda scores, visible: scores * visible),
        ("softmax_scale", "the weights were scaled, where the scores should be"):
            lambda at, op: attention(at, weigh=lambda scores, visible: unscaled(scores, visible) * case.scaling),
        ("keys_for_values", "the weights were given to the keys; they belong to the values"):
            lambda at, op: attention(at, values=lambda one: one.k),
        ("attention_missing", "the queries come out as they went in"): lambda at, op: at("q_rope"),
    }
    if (found := best(case, ways)) is not None:
        return case.diagnosis(found[0], f"Queries, keys and values are right; {found[1]}.")


@hypothesis("k_rope", "attn")
def keys_and_values_exchanged(case: Case) -> Diagnosis | None:
    """k and v are right where they were made: did they change places on the way to the rotation and to attention?"""
    def exchanged(at, op):
        if op == "k_rope":
            return rotated(case, at("v"), *tables(at))
        keys = iter([case.keys(prompt, "k") for prompt, rows in enumerate(case.lengths) if rows])
        return attention(at, values=lambda one: next(keys))
    # Before the rotation, keys of a cache are nowhere: what follows is for passes that compute all they look at.
    whole = all(case.num_keys(prompt).eq(rows).all() for prompt, rows in enumerate(case.lengths))
    together = [case] if case.op == "k_rope" or case.has("k_rope") else [case, case.about("k_rope", "attn")]
    if whole and not case.config.qk_norm and any(explains(each, exchanged) for each in together):
        return case.diagnosis("qkv_order", "Keys and values change places behind the projection: what attention takes "
                              "for keys are the rotated values, and it hands on the keys. Is the fused output split as "
                              "q | k | v?")


@hypothesis("attn")
def across_sequences(case: Case) -> Diagnosis | None:
    """Do the sequences of a batch see each other?"""
    def flattened(at, op):
        q, k, v = (torch.cat(parts) for parts in zip(*((one.q, one.k[one.positions], one.v[one.positions])
                                                      for one in at.sequences())))
        row, reads = torch.arange(len(q)), torch.tensor(at.indices("attn")) // case.group
        return attend(q, k[:, reads], v[:, reads], row[None] <= row[:, None], case.scaling)
    if sum(map(bool, case.lengths)) > 1 and explains(case, flattened):
        return case.diagnosis("cross_sequence_attention", "Each token sees everything before it in the batch, other "
                              "sequences included: they were laid behind each other under one causal mask.")


@hypothesis("attn")
def output_in_another_order(case: Case) -> Diagnosis | None:
    """Is every number right, and in another place?"""
    def not_transposed(at, op):
        right = attention(at).split(list(filter(None, case.lengths)))
        return torch.cat([part.transpose(0, 1).reshape(part.shape) for part in right])

    def transposed_inside(at, op):
        right = attention(at)
        return right.transpose(1, 2).reshape(right.shape)
    for wrong, says in ((not_transposed, "[heads, tokens, head_dim] was taken for [tokens, heads, head_dim]; transpose "
                         "before you reshape"),
                        (transposed_inside, "a token's numbers stand as [head_dim, heads], not as [heads, head_dim]")):
        if explains(case, wrong):
            return case.diagnosis("heads_not_transposed", "Attention's numbers are right, their places are not: "
                                  f"{says}.")


@hypothesis("attn")
def rotated_values(case: Case) -> Diagnosis | None:
    """Were the values rotated, too?"""
    def turned(at, op):
        return attention(at, values=lambda one: rotated(case, one.v, *tables(at, torch.arange(len(one.v)))))
    if explains(case, turned):
        return case.diagnosis("rope_on_values", "Attention fits values that were rotated; RoPE turns q and k alone.")


@hypothesis("attn")
def other_kv_heads(case: Case) -> Diagnosis | None:
    """Which KV head does each query head read: its keys and its values, or only one of the two?"""
    if case.point != "attn":
        return None
    own = case.kv_heads
    for what, pair in (("", lambda kv: (kv, kv)), ("the values of ", lambda kv: (own, kv)),
                       ("the keys of ", lambda kv: (kv, own))):
        wrong = {head: kv for head, kv in _read(case, pair, own).items() if kv != own[head]}
        if not wrong:
            continue
        head, kv = next(iter(wrong.items()))
        every = range(case.config.num_heads)
        pattern = (f"h reads {what}KV head h % kv_heads; " if _are(wrong, [h % case.config.num_kv_heads for h in every],
                                                                   own) else
                   f"all query heads read {what}KV head 0; " if _are(wrong, [0 for _ in every], own) else "")
        return case.diagnosis("query_to_kv", f"K and V are right, but {pattern}query head {head} reads {what}KV head "
                              f"{kv}; in grouped attention, head h reads h // group, here {own[head]} ({len(wrong)} of "
                              f"{len(own)} query heads read another one than theirs).", head=head, reads=kv)


def _read(case: Case, pair, own: torch.Tensor) -> dict[int, int]:
    """The KV head that each query head of the wrong ranks reads, where ``pair(heads)`` says of which KV heads the keys
    and the values are; none if that explains not all of them."""
    reads = {}
    every = {kv: torch.full_like(own, kv) for kv in range(case.config.num_kv_heads)}
    for rank in case.wrong_ranks:
        at, held = right(case, rank), case.shard("attn", rank)
        guesses = {kv: attention(at, heads=pair(heads)) for kv, heads in every.items()}
        for local, head in enumerate(at.indices("attn")):
            gaps = {kv: distance(*(case.looked_at(x[:, local]) for x in (held, guess)))
                    for kv, guess in guesses.items()}
            reads[head] = min(gaps, key=lambda kv: (gaps[kv] > case.tolerance, kv != own[head], gaps[kv]))
            if gaps[reads[head]] > case.tolerance:
                return {}
    return reads


def _are(wrong: dict[int, int], pattern: list[int], own: torch.Tensor) -> bool:
    """Whether ``pattern`` is what the wrong query heads read, and no other one is wrong in it."""
    return wrong == {head: kv for head, kv in enumerate(pattern) if kv != own[head]}

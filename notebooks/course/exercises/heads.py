"""Notebook 02: which rank owns which heads."""

from collections.abc import Callable
from dataclasses import replace

from course.judge.attempt import Attempt, NotYet, ranks_in_words, saying, several
from course.judge.verdict import Setting, exercise
from tplab.checks import counted, spans, whole_number
from tplab.patch import Patch, applied, original

# Query heads, KV heads, ranks: what divides first, then each way of not dividing.
LAYOUTS = ((8, 2, 2), (8, 2, 4), (9, 3, 2), (8, 2, 3), (14, 2, 3), (6, 6, 4), (12, 4, 3), (15, 5, 2), (6, 1, 4),
           (32, 8, 3), (4, 2, 1))


def _dealt_so(deal: Callable) -> list[Patch]:
    """The engine's plan with the heads as a learner's function deals them out."""
    target = "tplab.shard.plan.ShardPlan.from_config"

    def from_config(cls, config, tensor_parallel_size, **options):
        plan, ranks = original(target)(cls, config, tensor_parallel_size, **options), []
        for shard, (q, kv) in zip(plan.ranks, deal(config.num_heads, config.num_kv_heads, tensor_parallel_size)):
            q, kv, group = list(q), list(kv), config.num_heads // config.num_kv_heads
            ranks.append(replace(shard, q_heads=range(q[0], q[-1] + 1), kv_heads=range(kv[0], kv[-1] + 1),
                                 kv_for_q=tuple(head // group - kv[0] for head in q)))
        return replace(plan, ranks=tuple(ranks))

    return [Patch(target, from_config)]


@exercise("my_heads", "02", takes="num_heads, num_kv_heads, tensor_parallel_size",
          place="says who owns which heads", patches=_dealt_so,
          alone="one rank has no choice, so layouts on up to four ranks have judged it",
          agreed="every head has its owner, and dealt out like this, the model agrees with Hugging Face on {ranks}")
def heads(attempt: Attempt, setting: Setting):
    """On layouts that divide and that do not; then the model of the notebook, dealt out so."""
    for layout in LAYOUTS:
        _dealt(attempt, *layout)
    config = setting.checkpoint.config
    _dealt(attempt, config.num_heads, config.num_kv_heads, setting.tensor_parallel_size)
    with applied(*setting.patches):  # here too: the check of the report deals them out as well
        setting.align()


def _dealt(attempt: Attempt, num_heads: int, num_kv_heads: int, size: int) -> None:
    """Judge the learner's deal for one layout."""
    with saying(f"{num_heads} query and {counted(num_kv_heads, 'KV head')} over {counted(size, 'rank')}: "):
        answer = several(attempt(num_heads, num_kv_heads, size),
                         f"(query heads, KV heads) for each rank, a list of {size},", size)
        deal = [_pair(entry, rank) for rank, entry in enumerate(answer)]
        _judge_deal(deal, num_heads, num_kv_heads)


def _judge_deal(deal: list[tuple[list[int], list[int]]], num_heads: int, num_kv_heads: int) -> None:
    size, all_heads = len(deal), (set(range(num_heads)), set(range(num_kv_heads)))
    turned = [(kv, q) for q, kv in deal]
    if deal != turned and tuple(set().union(*held) for held in zip(*turned)) == all_heads:
        raise NotYet(f"rank 0 gets {_listed(deal[0][0])} for query heads and {_listed(deal[0][1])} for KV heads: "
                     "the pair is (query heads, KV heads), and this one is turned round")
    for rank, (q, kv) in enumerate(deal):
        for name, held, there in (("query", q, num_heads), ("KV", kv, num_kv_heads)):
            if strange := [head for head in held if not 0 <= head < there]:
                raise NotYet(f"rank {rank} holds {name} head {strange[0]}, and they are 0 to {there - 1}"
                             + ": which ones do its query heads read?" * (name == "KV"))
    dealt = [head for q, _ in deal for head in q]
    if lost := [head for head in range(num_heads) if head not in dealt]:
        raise NotYet(f"query heads {_listed(lost)} on no rank: " + ", ".join(
            f"rank {rank} has {', '.join(spans(q)) or 'none'}" for rank, (q, _) in enumerate(deal)))
    if empty := [rank for rank, (q, _) in enumerate(deal) if not q]:
        raise NotYet(f"{ranks_in_words(empty, size)} without a query head")
    if len(dealt) > num_heads:
        twice = next(head for head in dealt if dealt.count(head) > 1)
        by = [rank for rank, (q, _) in enumerate(deal) if twice in q]
        raise NotYet(f"query head {twice} is on {ranks_in_words(by, size)}; each is computed once")
    if dealt != sorted(dealt):
        rank = next((rank for rank, (q, _) in enumerate(deal) if q != list(range(q[0], q[0] + len(q)))), 0)
        raise NotYet(f"rank {rank} has query heads {_listed(deal[rank][0])}; a rank keeps one slice of the weight, so "
                     "its heads follow each other, and gathered pieces are joined in the order of the ranks")
    group = num_heads // num_kv_heads
    for rank, (q, kv) in enumerate(deal):  # the KV heads that its query heads read, no other, in their order
        if kv != (reads := sorted({head // group for head in q})):
            raise NotYet(f"rank {rank} holds KV heads {_listed(kv)}, and its query heads, {q[0]} to {q[-1]}, read "
                         f"{_listed(reads)}: {group} query heads in a row share one. Which ones does this rank need, "
                         "once each and in order?")
    counts = [len(q) for q, _ in deal]
    if max(counts) - min(counts) > group:
        *others, last = map(str, counts)
        raise NotYet(f"the ranks hold {', '.join(others)} and {last} query heads, and all of them wait for the one "
                     f"with {max(counts)}. Can they be dealt out more evenly?")


def _pair(entry, rank: int) -> tuple[list[int], list[int]]:
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        raise NotYet(f"the entry of rank {rank} is {entry!r}; it must be a pair, (query heads, KV heads)")
    if any(not isinstance(part, list | tuple | range) for part in entry):
        raise NotYet(f"rank {rank} gets {entry!r}; which heads, not how many: two ranges or lists")
    if any(len(part) > 1000 for part in entry):
        raise NotYet(f"rank {rank} gets {entry!r}, far more heads than there are")
    for head in (head for part in entry for head in part):
        if whole_number(head) is None:
            raise NotYet(f"rank {rank} gets head {head!r}: a head is whole, or its scores are not")
    return listed_each(entry, rank)


def listed_each(pair, rank: int) -> tuple[list[int], list[int]]:
    """Both parts as lists; `NotYet` if one is the two ends of a range."""
    for part in pair:
        if isinstance(part, tuple) and len(part) == 2 and part[1] - part[0] > 1:
            raise NotYet(f"rank {rank} gets {part}, which are two; range{part} is all from {part[0]} to {part[1] - 1}")
    return [*pair[0]], [*pair[1]]


def _listed(heads: list[int]) -> str:
    return f"[{', '.join(spans(heads)[:8])}]"

"""``match``: which of a model's heads, columns or rows a recorded tensor holds; ``decide``: whether ranks can hold so.

Labels are found by what fits, never by what would make a bug look right: they count only if they fit what the rank's
own inputs and the checkpoint give, and if the ranks' labels are a layout: every query head, MLP column and vocabulary
row on exactly one rank (or all on every rank), every query head's KV head on its own rank, keys and values alike.
Otherwise the plan's rule stands, and the judge says what does not fit.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tplab.checks import spans

Indices = tuple[int, ...]  # labels: numbers of items in the whole, in the rank's order
PADDING = -1


class Group(NamedTuple):
    """A dimension: the points along it, the plan's name for it, where a bug can stand that deals it out wrongly."""

    words: str
    points: tuple[str, ...]
    plan: str
    behind: tuple[str, ...]


PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
_INSIDE = (*PARTS["gate_up"], "mlp_act")
GROUPS = {"q": Group("query heads", ("q", "q_norm", "q_rope", "attn"), "q_heads", PARTS["qkv"]),
          "k": Group("key heads", ("k", "k_norm", "k_rope"), "kv_heads", PARTS["qkv"]),
          "v": Group("value heads", ("v",), "kv_heads", PARTS["qkv"]),
          "mlp": Group("MLP columns", ("gate", "mlp_act", "up"), "mlp", _INSIDE),
          "vocab": Group("vocabulary rows", ("logits",), "vocab", ("logits",))}
GROUP_OF = {point: which for which, group in GROUPS.items() for point in group.points}


def tolerance(dtype: torch.dtype) -> float:
    """How far, relative to its norm, a rightly computed column may stand from one computed in float32."""
    return {torch.float64: 1e-4, torch.float32: 1e-3}.get(dtype, 5e-2)


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a recorded tensor is this one but for rounding; what is no number on both sides is equal."""
    if a.shape != b.shape:
        return False
    left, right = (torch.nan_to_num(tensor.float(), 0.0, 0.0, 0.0) for tensor in (a, b))
    return bool((left - right).norm() <= tolerance(a.dtype) * right.norm())


def usual_shares(total: int, count: int, rank: int, size: int) -> list[Indices]:
    """Usual shares of ``count`` out of ``total``: equal contiguous ones with padding at the end, every ``size``-th,
    all of them (perhaps padded)."""
    found = (range(rank * count, min((rank + 1) * count, total)), range(rank, total, size), range(total))
    return [(*share, *[PADDING] * (count - len(share))) for share in found]


def match(local: torch.Tensor, full: torch.Tensor, shares: Sequence[Indices] = (), search: bool = True
          ) -> Indices | None:
    """The labels of a tensor's items: the first of ``shares`` that fits, else what a search finds.

    ``local`` ``[rows, items here, …]`` was recorded, ``full`` ``[rows, all items, …]`` is what its own inputs and the
    checkpoint give: of one part of the model, or of several, one behind the other. None if something in ``local`` is
    nothing in ``full``. Rows that are not finite say nothing.
    """
    finite = local.flatten(1).isfinite().all(1) & full.flatten(1).isfinite().all(1)
    if not finite.any():
        return None
    tol = tolerance(local.dtype)
    local, full = (tensor[finite].float().transpose(0, 1).flatten(1) for tensor in (local, full))
    blank = torch.cat([full, full.new_zeros(1, full.shape[1])])  # the item -1: padding
    floor = 0.1 * full.norm(dim=1).median()

    def fits(indices: Indices) -> bool:
        meant = blank[list(indices)]
        off = (local - meant).norm(dim=1) > tol * meant.norm(dim=1).clamp(min=floor)
        return off.double().mean().item() <= (0.0 if tol < 1e-2 else 0.01)

    for indices in shares:
        if len(indices) == len(local) and fits(indices):
            return indices
    if not search:
        return None
    nearest = torch.cdist(local, blank, compute_mode="donot_use_mm_for_euclid_dist").argmin(1).tolist()
    found = tuple(PADDING if item == len(full) else item for item in nearest)
    return found if fits(found) else None


def order_in_heads(local: torch.Tensor, full: torch.Tensor) -> list[int] | None:
    """Where in each head of ``local [rows, heads, head_dim]`` the numbers of a head of ``full`` stand, if all its heads
    are heads of ``full`` in one order of their numbers; the usual orders first."""
    dim = local.shape[-1]
    plain = list(range(dim))
    orders = [plain, plain[::2] + plain[1::2], [n for pair in zip(plain[:dim // 2], plain[dim // 2:]) for n in pair]]
    if local.flatten(1).isfinite().all(1).sum() > 3:
        first = local[:, 0, :, None].float()  # each number of the first head is an item
        found = (match(head[..., None].to(local.dtype), first) for head in full.float().unbind(1))
        orders += [list(order) for order in found if order and len({*order} - {PADDING}) == dim]
    return next((order for order in orders if len(order) == dim and match(local[..., order], full)), None)


class Layout(NamedTuple):
    """The decision about one dimension. ``indices``: per rank, None for a rank whose share is not known."""

    indices: tuple[Indices | None, ...]
    sentence: str = ""
    contradiction: str = ""


def decide(what: str, counts: list[int | None], plan: Sequence[Indices], found: list[Indices | None], total: int,
           flaw: Callable[[Sequence[Indices | None]], str], starts: list[int] | None = None,
           ranks: Sequence[int] = range(1 << 20)) -> Layout:
    """The layout of one dimension, over the ranks of one pipeline stage: what the values say, if that is one; else the
    first of the usual ones that has as many of ``total`` on each rank.

    Per rank: ``counts``, how many it holds (None: no such rank); ``plan``, what the plan's rule gives it; ``found``,
    its labels, None where nothing fits; ``starts``, where its share would begin, if nothing but numbers spoke;
    ``ranks``, its number. ``flaw`` takes the indices per rank and says why they are no layout; ``""`` if they are one.
    """
    here, size = [at for at, count in enumerate(counts) if count is not None], len(counts)

    def held(shares: Sequence[Indices | None]) -> tuple[Indices | None, ...]:
        return tuple(share if at in here else None for at, share in enumerate(shares))

    def said(shares: Sequence[Indices | None]) -> str:
        return "; ".join(f"rank {ranks[at]}: {span(shares[at])}" for at in here)
    seen, plan = held(found), list(plan)
    proven = all(seen[at] is not None for at in here)
    if proven and seen == held(plan):
        return Layout(seen, f"{what} dealt out by the plan's rule ({said(seen)}), as the values say")
    if proven and not flaw(seen):
        return Layout(seen, f"{what} dealt out as the values say ({said(seen)})")
    if all(counts[at] == len(plan[at]) for at in here):
        return Layout(held(plan), f"{what} dealt out by the plan's rule ({said(plan)}), which the values do not "
                                  "confirm")
    if proven:
        return Layout(seen, f"{what} as the values say ({said(seen)})",
                      f"{what} cannot be dealt out as {said(seen)}: {flaw(seen)}")
    filled = [count or len(plan[at]) for at, count in enumerate(counts)]
    starts = starts or [sum(filled[:at]) for at in range(size)]
    usual = {"whole on every rank": [tuple(range(total))] * size,
             "in equal shares, the last one padded": [usual_shares(total, filled[at], at, size)[0]
                                                      for at in range(size)],
             "contiguous": [tuple(range(start, start + count)) for start, count in zip(starts, filled)]}
    if len({*filled}) > 1 or filled[0] * (size - 1) >= total or filled[0] * size < total:
        del usual["in equal shares, the last one padded"]
    sizes = (f"{what}: {', '.join(f'rank {ranks[at]} has {counts[at]}' for at in here)}; {total} can be dealt out as "
             f"{', '.join(str(len(share)) for share in plan)}, or all on every rank")
    for how, shares in usual.items():
        if all(len(shares[at]) == counts[at] and max(shares[at], default=0) < total for at in here):
            wrong = flaw(shares) if how == "contiguous" else ""
            return Layout(held(shares), f"{what} {how}, by their number ({said(shares)})",
                          f"{sizes}. By their number {said(shares)}: {wrong}" * bool(wrong))
    return Layout((None,) * size, "", f"{sizes}, and the values fit nothing else")


def not_a_partition(indices: Sequence[Indices | None], total: int) -> str:
    """Why it is not so that every item is on exactly one rank, or all on every rank; ``""`` if it is. (A rank that was
    not recorded may hold what lacks.)"""
    real = [[i for i in rank if i != PADDING] for rank in indices if rank is not None]
    if all(sorted(rank) == list(range(total)) for rank in real):
        return ""
    counted = Counter(i for rank in real for i in rank)
    lacking = [i for i in range(total) if i not in counted and None not in indices]
    twice = sorted(i for i, times in counted.items() if times > 1)
    flaws = [f"{span(items)} {what}" for items, what in ((lacking, "on no rank"), (twice, "more than once")) if items]
    return " and ".join(flaws)


def not_serving(kv: Sequence[Indices | None], q: Sequence[Indices | None], group: int,
                ranks: Sequence[int] = range(1 << 20)) -> str:
    """Which rank lacks the KV head of one of its query heads, or holds one twice; ``""`` if none does."""
    for rank, held, heads in zip(ranks, kv, q):
        if held is not None and heads is not None:
            read = sorted({head // group for head in heads if head != PADDING})
            if not set(read) <= set(held):
                return f"the query heads of rank {rank} read {span(read)}"
            if any(times > 1 and head != PADDING for head, times in Counter(held).items()):
                return f"rank {rank} holds one twice"
    return ""


def span(indices: Sequence[int]) -> str:
    """``0–5``, ``0, 2, 4``, ``0–20 and padding``; long lists are cut."""
    real = [i for i in indices if i != PADDING]
    texts = spans(real)
    text = ", ".join(texts if len(texts) <= 8 else [*texts[:6], "…", texts[-1]]) or "none"
    return text + (" and padding" if len(real) < len(indices) else "")

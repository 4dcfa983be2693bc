"""``match`` labels the heads, columns or rows of a recorded tensor; ``decide`` holds the ranks' labels together.

A label is the number of a head, column or row of the model. Labels count under two conditions. They fit what the rank's
own inputs and the checkpoint give. And together they are a layout: every query head, MLP column and vocabulary row is
on exactly one rank (or all are on every rank), every query head's KV head is on its own rank, and values are dealt out
as keys are. Otherwise the plan's rule is taken, and the judge says what does not fit.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tplab.checks import spans

Indices = tuple[int, ...]  # labels: numbers of items in the whole, in the rank's order
PADDING = -1


class Group(NamedTuple):
    """A dimension: the points along it, the plan's name for it, the points at which a bug can deal it out wrongly."""

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
    """Whether two tensors differ by rounding only; NaN and infinity count as 0."""
    if a.shape != b.shape:
        return False
    left, right = (torch.nan_to_num(tensor.float(), 0.0, 0.0, 0.0) for tensor in (a, b))
    return bool((left - right).norm() <= tolerance(a.dtype) * right.norm())


def usual_shares(total: int, count: int, rank: int, size: int) -> list[Indices]:
    """Usual shares of ``count`` out of ``total`` items: equal contiguous ones with padding at the end, every
    ``size``-th item, or all of them (perhaps padded)."""
    found = (range(rank * count, min((rank + 1) * count, total)), range(rank, total, size), range(total))
    return [(*share, *[PADDING] * (count - len(share))) for share in found]


def match(local: torch.Tensor, full: torch.Tensor, shares: Sequence[Indices] = (), search: bool = True
          ) -> Indices | None:
    """The labels of a tensor's items: the first of ``shares`` that fits, else the nearest items.

    ``local`` ``[rows, items here, …]`` was recorded. ``full`` ``[rows, all items, …]`` is what its own inputs and the
    checkpoint give, for one part of the model or for several behind each other. None if an item of ``local`` is none of
    ``full``. Rows that are not finite are left out.
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
    """The order of the numbers in each head of ``local [rows, heads, head_dim]``, if one order makes its heads those of
    ``full``; the usual orders are tried first."""
    dim = local.shape[-1]
    plain = list(range(dim))
    orders = [plain, plain[::2] + plain[1::2], [n for pair in zip(plain[:dim // 2], plain[dim // 2:]) for n in pair]]
    if local.flatten(1).isfinite().all(1).sum() > 3:
        first = local[:, 0, :, None].float()  # each number of the first head is an item
        found = (match(head[..., None].to(local.dtype), first) for head in full.float().unbind(1))
        orders += [list(order) for order in found if order and len({*order} - {PADDING}) == dim]
    return next((order for order in orders if len(order) == dim and match(local[..., order], full)), None)


def real_items(labels: Sequence[int]) -> tuple[list[int], Indices]:
    """Each item's first place in a rank's tensor, and its label; padding is no item."""
    first = {label: at for at, label in reversed(list(enumerate(labels))) if label != PADDING}
    kept = sorted(first.values())
    return kept, tuple(labels[at] for at in kept)


class Layout(NamedTuple):
    """The decision about one dimension. ``indices``: per rank, None for a rank whose share is not known."""

    indices: tuple[Indices | None, ...]
    sentence: str = ""
    contradiction: str = ""


def decide(what: str, counts: list[int | None], plan: Sequence[Indices], found: list[Indices | None], total: int,
           flaw: Callable[[Sequence[Indices | None]], str], starts: list[int] | None = None,
           ranks: Sequence[int] = range(1 << 20)) -> Layout:
    """The layout of one dimension over the ranks of one pipeline stage: the first reading with as many of ``total`` on
    each rank as there are, and without a flaw. The labels come first, then the plan's rule, then other usual layouts.

    Per rank: ``counts``, how many items it holds (None: no such rank); ``plan``, its share by the plan's rule;
    ``found``, its labels, None where nothing fits; ``starts``, the beginning of its share if only the counts are known;
    ``ranks``, its number. ``flaw`` says why the indices per rank are no layout; ``""`` if they are one.
    """
    here, size = [at for at, count in enumerate(counts) if count is not None], len(counts)

    def held(shares: Sequence[Indices | None]) -> tuple[Indices | None, ...]:
        return tuple(share if at in here else None for at, share in enumerate(shares))

    def said(shares: Sequence[Indices | None]) -> str:
        return "; ".join(f"rank {ranks[at]}: {span(shares[at])}" for at in here)
    proven = all(found[at] is not None for at in here)
    if proven and held(found) == held(plan):
        return Layout(held(plan), f"{what} dealt out by the plan's rule ({said(plan)}), as the values say")
    filled = [count or len(plan[at]) for at, count in enumerate(counts)]
    starts = starts or [sum(filled[:at]) for at in range(size)]
    usual = {"as the values say": found} if proven else {}
    usual["by the plan's rule, which the values do not confirm"] = plan
    if not proven:
        usual["whole on every rank, by their number"] = [tuple(range(total))] * size
        if len({*filled}) == 1 and filled[0] * (size - 1) < total <= filled[0] * size:
            usual["in equal shares, the last one padded, by their number"] = [
                usual_shares(total, filled[at], at, size)[0] for at in range(size)]
        usual["one behind the other, by their number"] = [
            tuple(range(start, start + count)) for start, count in zip(starts, filled)]
    fitting = {how: shares for how, shares in usual.items() if all(
        len(shares[at]) == counts[at] and max(shares[at], default=0) < total for at in here)}
    for how, shares in fitting.items():  # the plan's rule is taken with any flaw
        if shares is plan or not flaw(shares):
            return Layout(held(shares), f"{what} dealt out {how} ({said(shares)})")
    for how, shares in fitting.items():
        return Layout(held(shares), f"{what} {how} ({said(shares)})",
                      f"{what} are dealt out wrongly ({said(shares)}): {flaw(shares)}")
    return Layout((None,) * size, "", f"{what}: {', '.join(f'rank {ranks[at]} has {counts[at]}' for at in here)}; "
                  f"{total} can be dealt out as {', '.join(str(len(share)) for share in plan)}, or all on every rank")


def not_a_partition(indices: Sequence[Indices | None], total: int) -> str:
    """Which items are on no rank or on several; ``""`` if each is on one rank, or all are on every rank. (A rank that
    was not recorded may hold the missing ones.)"""
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
    """Which rank lacks the KV head of one of its query heads, or holds one KV head twice; ``""`` if no rank does."""
    for rank, held, heads in zip(ranks, kv, q):
        if held is not None and heads is not None:
            read = sorted({head // group for head in heads if head != PADDING})
            if not set(read) <= set(held):
                return f"rank {rank} holds {span(held)}, but its query heads read {span(read)}"
            if any(times > 1 and head != PADDING for head, times in Counter(held).items()):
                return f"rank {rank} holds one twice"
    return ""


def span(indices: Sequence[int]) -> str:
    """``0–5``, ``0, 2, 4``, ``0–20 and padding``; long lists are cut."""
    real = [i for i in indices if i != PADDING]
    texts = spans(real)
    text = ", ".join(texts if len(texts) <= 8 else [*texts[:6], "…", texts[-1]]) or "none"
    return text + (" and padding" if len(real) < len(indices) else "")

"""Who holds which heads, columns and vocabulary rows: found by what fits, never by what would make a bug look right.

A layout other than the plan's counts only if it fits what the rank's own inputs and the checkpoint give, and if it is
one: every query head, MLP column and vocabulary row on exactly one rank (or all on every rank), every query head's KV
head on its own rank, keys and values alike. Otherwise the plan's rule stands, and the judge says what does not fit.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

Indices = tuple[int, ...]  # global ones, in the rank's order; -1 is padding
PADDING = -1


@dataclass(frozen=True)
class Layout:
    """The decision about one dimension. ``indices``: per rank, None for a rank whose share is not known."""

    indices: tuple[Indices | None, ...]
    sentence: str
    contradiction: str | None = None


def tolerance(dtype: torch.dtype) -> float:
    """How far, relative to its norm, a rightly computed column may stand from one computed in float32."""
    return {torch.float64: 1e-4, torch.float32: 1e-3}.get(dtype, 5e-2)


def candidates(total: int, count: int, rank: int, size: int) -> list[Indices]:
    """Usual shares of ``count`` out of ``total``: equal contiguous ones with padding at the end, every ``size``-th,
    all of them (perhaps padded)."""
    every = range(rank, total, size)
    return [padded(range(rank * count, min((rank + 1) * count, total)), count), padded(every, count),
            padded(range(total), count)]


def padded(indices: Sequence[int], count: int) -> Indices:
    """``indices`` filled up to ``count`` with padding."""
    return (*indices, *[PADDING] * (count - len(indices)))


def fit(local: torch.Tensor, full: torch.Tensor, shares: Sequence[Indices], search: bool = True) -> Indices | None:
    """Which heads or columns a rank holds: the first of ``shares`` that fits, else what a search finds.

    Args:
        local: ``[rows, items here, …]``, what was recorded.
        full: ``[rows, all items, …]``, what its own inputs and the checkpoint give.

    Returns:
        None if something in ``local`` is nothing in ``full``. Rows that are not finite say nothing.
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


def order_in_heads(local: torch.Tensor, full: torch.Tensor) -> torch.Tensor | None:
    """Where in each head of ``local [rows, heads, head_dim]`` the numbers of a head of ``full`` stand, if all its heads
    are heads of ``full`` in one order of their numbers; the usual orders first."""
    dim = local.shape[-1]
    plain = torch.arange(dim)
    orders = [plain, plain.view(-1, 2).T.flatten(), plain.view(2, -1).T.flatten()] if dim % 2 == 0 else [plain]
    rows = local.flatten(1).isfinite().all(1) & full.flatten(1).isfinite().all(1)
    if rows.sum() > 3:
        first = local[rows][:, 0].float().T  # [head_dim, rows]
        for head in full[rows].float().unbind(1):
            nearest = torch.cdist(head.T.contiguous(), first.contiguous()).argmin(1)
            if nearest.unique().numel() == dim and near(first[nearest].to(local.dtype), head.T):
                orders.append(nearest)
    return next((order for order in orders if fit(local[..., order], full, []) is not None), None)


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether a recorded tensor is this one but for rounding; what is no number on both sides is equal."""
    if a.shape != b.shape:
        return False
    left, right = (torch.nan_to_num(tensor.float(), 0.0, 0.0, 0.0) for tensor in (a, b))
    return bool((left - right).norm() <= tolerance(a.dtype) * right.norm())


def agreed(votes: list[list[Indices | None]]) -> list[Indices | None]:
    """What most layers say, rank by rank."""
    found = []
    for rank in zip(*votes, strict=True):
        counted = Counter(vote for vote in rank if vote is not None)
        found.append(counted.most_common(1)[0][0] if counted else None)
    return found


def decide(what: str, counts: list[int | None], plan: list[Indices], found: list[Indices | None], total: int,
           flaw: Callable[[Sequence[Indices | None]], str], starts: list[int] | None = None,
           ranks: Sequence[int] = range(1 << 20)) -> Layout:
    """The layout of one dimension, over the ranks of one pipeline stage.

    Args:
        what: ``"query heads"``, for the sentences.
        counts: how many each rank holds, None for a rank without.
        plan: what the plan's rule gives each rank.
        found: what fits, per rank.
        flaw: takes the indices per rank, says why they are no layout at all; ``""`` if they are one.
        starts: where each rank's share would begin, if nothing but numbers spoke.
        ranks: their numbers, for the sentences.
    """
    _spans = partial(_shares, ranks)
    here = [rank for rank, count in enumerate(counts) if count is not None]
    as_planned = all(counts[rank] == len(plan[rank]) for rank in here)
    seen = [found[rank] if counts[rank] is not None else None for rank in range(len(counts))]
    proven = all(seen[rank] is not None for rank in here)
    if proven and as_planned and all(seen[rank] == plan[rank] for rank in here):
        return Layout(tuple(seen), f"{what} dealt out by the plan's rule ({_spans(seen)}), as the values say")
    if proven and not flaw(seen):
        return Layout(tuple(seen), f"{what} dealt out as the values say ({_spans(seen)})")
    if as_planned:
        shares = [plan[rank] if rank in here else None for rank in range(len(counts))]
        return Layout(tuple(shares), f"{what} dealt out by the plan's rule ({_spans(shares)}), which the values do not "
                      "confirm")
    if proven:
        return Layout(tuple(seen), f"{what} as the values say ({_spans(seen)})",
                      f"{what} cannot be dealt out as {_spans(seen)}: {flaw(seen)}")
    if all(counts[rank] == total for rank in here):
        whole = [tuple(range(total)) if rank in here else None for rank in range(len(counts))]
        return Layout(tuple(whole), f"all {what} on every rank, by their number")
    number = {counts[rank] for rank in here}
    if len(number) == 1 and (size := number.pop()) * len(counts) >= total > size * (len(counts) - 1):
        shares = [candidates(total, size, rank, len(counts))[0] if rank in here else None
                  for rank in range(len(counts))]
        return Layout(tuple(shares), f"{what} in equal shares, the last one padded ({_spans(shares)}), by their number")
    sizes = ", ".join(f"rank {ranks[rank]} has {counts[rank]}" for rank in here)
    filled = [count or len(plan[rank]) for rank, count in enumerate(counts)]
    starts = starts or [sum(filled[:rank]) for rank in range(len(counts))]
    shares = [tuple(range(starts[rank], starts[rank] + counts[rank])) if rank in here else None
              for rank in range(len(counts))]
    wanted = ", ".join(str(len(share)) for share in plan)
    if any(share and share[-1] >= total for share in shares):
        return Layout(tuple([None] * len(counts)), "", f"{what}: {sizes}; {total} can be dealt out as {wanted}, or all "
                      "on every rank, and the values fit nothing else")
    wrong = flaw(shares)
    return Layout(tuple(shares), f"{what} contiguous, by their number ({_spans(shares)})", wrong and (
        f"{what}: {sizes}; {total} can be dealt out as {wanted}, or all on every rank. By their number "
        f"{_spans(shares)}: {wrong}"))


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


def _shares(ranks: Sequence[int], indices: Sequence[Indices | None]) -> str:
    return "; ".join(f"rank {rank}: {span(items)}" for rank, items in zip(ranks, indices) if items is not None)


def span(indices: Sequence[int]) -> str:
    """``0–5``, ``0, 2, 4``, ``0–20 and padding``; long lists are cut."""
    real = [i for i in indices if i != PADDING]
    runs: list[list[int]] = []
    for i in real:
        if runs and i == runs[-1][1] + 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    texts = [f"{a}" if a == b else f"{a}–{b}" for a, b in runs]
    text = ", ".join(texts if len(texts) <= 8 else [*texts[:6], "…", texts[-1]]) or "none"
    return text + (" and padding" if len(real) < len(indices) else "")

"""Which part of a tensor came back: rows or columns, whose they are, and what was read and kept for them."""

from collections.abc import Callable, Mapping, Sequence

import torch

from course.judge.attempt import NotYet, kind
from course.judge.compare import related, where
from tplab.checkpoint.reader import TensorSlice
from tplab.checks import spans
from tplab.shard import ShardPlan

_KINDS = "rows", "columns"


def judge_part(found, whole: torch.Tensor, wanted: Sequence[int], head: str, dim: int = 0, *, whose: str = "its own",
               ways: Mapping[str, object] | None = None, label: Callable | None = None) -> None:
    """:class:`NotYet` unless ``found`` is the rows ``wanted`` of ``whole`` (of ``dim`` 1: the columns), in its dtype.

    ``whole`` holds no number twice. ``ways``: ``{sentence: the rows, a set of such, or the numbers of someone who
    makes this mistake}``. ``label`` names rows.
    """
    wanted, label = [*wanted], label or (lambda places: span(places, _KINDS[dim]))
    right = whole.index_select(dim, torch.tensor(wanted, dtype=torch.long))
    if not isinstance(found, torch.Tensor):
        asks = " (nothing of it is read: is a slice missing?)" * isinstance(found, TensorSlice)
        raise NotYet(f"{head}it returns {kind(found)}; a tensor {list(right.shape)} must come back{asks}")
    if found.device.type != "cpu" or found.dtype != whole.dtype:
        came, must = (found.device, "cpu") if found.device.type != "cpu" else (found.dtype, whole.dtype)
        raise NotYet(f"{head}a tensor of {came} comes back; {must} must")
    if found.shape == right.shape and found.equal(right):
        return
    for says, one in (ways or {}).items():
        if isinstance(one, torch.Tensor) and one.shape == found.shape and found.equal(one):
            raise NotYet(f"{head}{says}")
    places, other = (_places(found, whole, along) for along in (dim, 1 - dim))
    shapes = f"{list(found.shape)} comes back; {list(right.shape)} must"
    if places is not None:
        known = dict(ways or {}) | {
            "all of it": range(whole.shape[dim]),
            f"these are the first {_KINDS[dim]}; where do the {_KINDS[dim]} of this rank begin?": range(len(wanted)),
            "the right ones, in another order": places if sorted(places) == wanted else ()}
        why = next((says for says, one in known.items() if not isinstance(one, torch.Tensor) and any(
            [*each] == places for each in (one if isinstance(one, set) else [one]))), "")
        raise NotYet(f"{head}{label(places)} come back where {label(wanted)} are {whose}{why and f'{chr(10)}{why}'}")
    if other is not None:
        raise NotYet(f"{head}{span(other, _KINDS[1 - dim])} (dim {1 - dim}) come back where {label(wanted)} are "
                     f"{whose}. A weight is [out, in]: which of the two is cut here?")
    if found.shape != right.shape:
        is_right = sorted(found.flatten().tolist()) == sorted(right.flatten().tolist())
        raise NotYet(f"{head}{shapes}" + ": these are the right numbers, in another shape" * is_right)
    ours, theirs, names = found.double(), right.double(), ["row", "column"][:found.dim()]
    gap = (ours - theirs).abs().nan_to_num(torch.inf, torch.inf).max().item()
    raise NotYet(f"{head}{_strange(found, whole, dim, label)}, where {label(wanted)} are {whose}\n" + (
                     related(ours, theirs, gap / 50, names) or where(ours, theirs, 0, names)))


def _strange(found: torch.Tensor, whole: torch.Tensor, dim: int, label: Callable) -> str:
    """Which slices come back that are none of the file's, and what they are."""
    places = _each(found, whole, dim)
    known, odd = [at for at in places if at is not None], [n for n, at in enumerate(places) if at is None]
    held, first = (one.movedim(dim, 0).flatten(1) if one.dim() > 1 else one[:, None] for one in (whole, found))
    held, first = held.flatten().tolist(), first[odd[0]].tolist()
    if set(first) <= set(held):
        of = sorted({held.index(number) // len(first) for number in first})
        what = f"{_KINDS[dim][:-1]} {odd[0]} of yours has numbers of {span(of, _KINDS[dim])}"
    else:
        what = f"{span(odd, _KINDS[dim])} of yours " + ("stand nowhere in the file" if any(first) else "hold zeros")
    return f"{label(known)} come back, and {what}" if known else what


def dealt(total: int, size: int) -> list[range]:
    """Ranges for so many ranks, whose lengths no rule for dealing evenly gives."""
    return [range(total * r * r // size ** 2, total * (r + 1) ** 2 // size ** 2) for r in range(size)]


def _places(found: torch.Tensor, whole: torch.Tensor, dim: int) -> list[int] | None:
    """Which slices of ``whole`` along ``dim`` those of ``found`` are; None if not all are such."""
    if 0 in found.shape or found.dim() != whole.dim() or dim >= whole.dim():
        return None
    places = _each(found, whole, dim)
    return None if None in places else places


def _each(found: torch.Tensor, whole: torch.Tensor, dim: int) -> list[int | None]:
    held, came = ([row.detach().double().numpy().tobytes() for row in one.unbind(dim)] for one in (whole, found))
    return [held.index(row) if row in held else None for row in came]


def span(places: Sequence[int], of: str = "rows") -> str:
    """``"rows 0–5"``, ``"rows 0, 2, 4 …"``."""
    texts = spans(places)
    return f"{of} " + (", ".join(texts[:4]) + " …" * (len(texts) > 4) if texts else "of none")


def read_once(read: int, kept: int, head: str, asks: str = "slice the source itself") -> None:
    """:class:`NotYet` if more bytes were read than are kept."""
    if read > 1.01 * kept:
        raise NotYet(f"{head}the numbers are right, but {read} bytes were read for {kept} that are kept, "
                     f"{read / max(kept, 1):.1f} times as many: {asks}")


def owns(found: torch.Tensor, head: str) -> None:
    """:class:`NotYet` if it is a view, which keeps alive what it was cut from."""
    if (held := found.untyped_storage().nbytes()) > 1.01 * found.nbytes:
        raise NotYet(f"{head}a view is kept, and with it all {held} bytes of what it was cut from, for "
                     f"{found.nbytes} of its own")


def share_of(name: str, plan: ShardPlan, number: int) -> tuple[int, range | None, str]:
    """Along which dim a tensor of that name is cut, which part of it the rank keeps (None: all), and what that is."""
    here, d, (layer, last) = plan.ranks[number], plan.head_dim, name.split(".")[-2:]
    q, kv = (range(heads.start * d, heads.stop * d) for heads in (here.q_heads, here.kv_heads))
    by_column = layer in ("o_proj", "down_proj")
    for part, what, layers in (
            (here.vocab, "tokens", "embed_tokens lm_head"), (q, "query heads", "q_proj o_proj"),
            (kv, "KV heads", "k_proj v_proj"), (here.mlp, "MLP columns", "gate_proj up_proj down_proj")):
        if layer in layers.split() and not (by_column and last == "bias"):
            return int(by_column), part, what
    return 0, None, ""

"""Bugs that are read off a point's own numbers: digits, positions, a head of other weights, a row of the cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from tplab.align.floors import SHORT
from tplab.align.guilty import by_row
from tplab.align.points import POINTS, inputs
from tplab.checks import span
from tplab.faults.probes import Probe
from tplab.model.rope import Rotary, rotate
from tplab.patch import Patch, original

if TYPE_CHECKING:
    from tplab.align.fit import GuiltyPoint

_ATTEND, FP8 = "tplab.model.attention.attend", torch.float8_e4m3fn
CACHE_SCALES = 1.0, 0.5, 0.25, 0.125, 0.0625, 2.0  # usual ones of a cache in fp8
MOST_ROWS = 20_000  # pairs of rows that are tried for a row of the cache


@dataclass(frozen=True, eq=False)
class ReadOff:
    """A bug of which ``guess(point)`` says what each rank would hold, ``{rank: [rows, …]}``, or None.

    ``computed``: it does so by itself. Else it names what it sees, and gives the point's own numbers.
    """

    name: str
    title: str
    guess: Callable[["GuiltyPoint"], dict[int, torch.Tensor] | None]
    computed: bool = True


def few_digits(point: "GuiltyPoint") -> Iterator[ReadOff]:
    """Was it rounded to fewer digits?"""
    for dtype in (torch.bfloat16, torch.float16) if point.report.dtype not in SHORT else ():
        bug = ReadOff("low_precision", f"the numbers are {str(dtype).removeprefix('torch.')}'s, and the run's dtype is "
                      f"{str(point.report.dtype).removeprefix('torch.')}", _rounded(dtype))
        if bug.guess(point) is not None:
            yield bug


def _rounded(dtype: torch.dtype) -> Callable:
    def guess(point: "GuiltyPoint") -> dict[int, torch.Tensor] | None:
        made = {rank: right.to(dtype).to(right.dtype) for rank, right in point.right.items()}
        for rank in point.ranks:
            wrong = point.wrong[rank]
            x, right = point.held[rank][wrong], point.right[rank][wrong]
            if not torch.equal(x.to(dtype).to(x.dtype), x) or not (by_row(x, right) < 4 * torch.finfo(dtype).eps).all():
                return None
            made[rank][wrong] = x.to(right.dtype)
        return made
    return guess


# Positions.

def other_positions(point: "GuiltyPoint") -> Iterator[ReadOff]:
    """Was each token turned as if it stood elsewhere?"""
    used = _positions(point) if point.short in ("q_rope", "k_rope") else []
    row = next((r for r, (u, (_, p)) in enumerate(zip(used, point.places)) if u != p), None)
    if row is not None:
        yield ReadOff("rope_positions", f"positions are not right: the token at {point.places[row][1]} is turned as if "
                      f"it stood at {used[row]}", lambda other: _turned(other, used))


def _tables(point: "GuiltyPoint", positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    config = point.judge.config
    kind = config.rope_layer_types[point.layer:][:1]
    return Rotary(config.hf)(torch.empty(0, dtype=point.judge.exact), positions, [len(positions)], *kind)


def _positions(point: "GuiltyPoint") -> list[int]:
    """As which position was each token turned? All are tried, from -1 on."""
    candidates = torch.arange(-1, len(point.places) + 3)
    cos, sin = _tables(point, candidates)
    rank = point.ranks[0]
    x = _before(point, rank)
    turn = rotate(point.judge.config.model_type)
    far = torch.stack([by_row(point.held[rank], turn(x, x[:, :0], cos[:, [i]], sin[:, [i]])[0][0].transpose(0, 1))
                       for i in range(len(candidates))])
    return candidates[far.argmin(0)].tolist()


def _before(point: "GuiltyPoint", rank: int) -> torch.Tensor:
    """What goes into the rotation, ``[1, heads, rows, head_dim]``."""
    name = inputs(point.name, point.judge.config)[0]
    return point.judge.into(name, rank).to(point.judge.exact).transpose(0, 1)[None]


def _turned(point: "GuiltyPoint", used: list[int]) -> dict[int, torch.Tensor] | None:
    if point.short not in ("q_rope", "k_rope"):
        return None
    cos, sin = _tables(point, torch.tensor(used))
    turn, guess = rotate(point.judge.config.model_type), dict(point.right)
    for rank in point.ranks:
        x = _before(point, rank)
        guess[rank] = turn(x, x[:, :0], cos, sin)[0][0].transpose(0, 1)
    return guess


# Heads.

def other_heads(point: "GuiltyPoint") -> Iterator[ReadOff]:
    """Does a rank hold other heads than its own?"""
    if point.short not in ("q", "k", "v"):
        return
    whole = {}  # head → the right values, by the ranks that should hold it
    for rank, right in point.right.items():
        items = point.report.recording.points[point.name][rank].indices
        whole |= {head: right[:, [at]] for at, head in enumerate(items)}
    for rank in point.ranks:
        items, held = point.report.recording.points[point.name][rank].indices, point.held[rank]
        heads = [next((head for head, right in whole.items() if (by_row(x, right) <= point.tolerance).all()), None)
                 for x in held.split(1, 1)]
        if None in heads or heads == list(items):
            return
        yield ReadOff("other_heads", f"rank {rank} holds {point.short} of heads {span(heads)}, not {span(items)}",
                      lambda other: other.held if other.short == point.short else None, computed=False)


# The head of the model.

def unrelated_head(point: "GuiltyPoint") -> Iterator[ReadOff]:
    """Have the logits nothing to do with the right ones? Every row is wrong, on every rank; the values of all ranks do
    not correlate with the right ones, and are not these in another order."""
    if point.short == "logits" and {*point.ranks} == {*point.held} and _unrelated(
            *(torch.cat([*shards.values()], 1).double() for shards in (point.held, point.right))):
        yield ReadOff("head_random", "the head's weights are not the checkpoint's: its logits have nothing to do with "
                      "the right ones", lambda other: other.held if other.short == "logits" else None, computed=False)


def _unrelated(held: torch.Tensor, right: torch.Tensor) -> bool:
    alike = by_row(held.sort(1)[0], right.sort(1)[0])
    if not held.isfinite().all() or not right.isfinite().all() or alike.min() < 1e-3:
        return False
    both = torch.stack([x - x.mean(1, keepdim=True) for x in (held, right)])
    return bool((torch.cosine_similarity(*both, dim=1).abs() < 0.5).all()) and abs(
        torch.cosine_similarity(*both.flatten(1), dim=0)) < 0.3


# The cache.

def scale_ignored(point: "GuiltyPoint") -> Iterator[Probe]:
    """Are keys, values or both read from a cache in fp8 without the scale by which they were divided?"""
    for scale in CACHE_SCALES[1:] if point.short == "attn" else ():
        right, wrong = partial(_in_fp8, scale, scale), partial(_in_fp8, scale, 1)
        for what, patches in {"keys and values": cache_gives(wrong, wrong), "values": cache_gives(right, wrong),
                              "keys": cache_gives(wrong, right)}.items():
            yield Probe("cache_scale_ignored", f"the {what} of a cache in fp8 are read without their scale {scale:g}",
                        patches, (POINTS["attn"].op,))


def _in_fp8(written: float, read: float, x: torch.Tensor) -> torch.Tensor:
    """Stored in fp8 with one scale, and read with another."""
    return x.div(written).to(FP8).to(x.dtype) * read


def cache_gives(keys: Callable, values: Callable) -> tuple[Patch]:
    """Attention that reads ``keys(k)`` and ``values(v)`` from its cache."""
    def attend(q, k, v, mask, scaling, **options):
        return original(_ATTEND)(q, keys(k), values(v), mask, scaling, **options)
    return (Patch(_ATTEND, attend),)


def stale_row(point: "GuiltyPoint") -> Iterator[ReadOff]:
    """Which other row's key and value stand in a row of the cache? Seen in the first wrong row of a later call: without
    the one and with the other, the weighted mean of the values is what it holds."""
    judge, rank = point.judge, point.ranks[0]
    config, calls = judge.config, judge.calls
    wrong = (point.wrong[rank] & point.finite[rank]).nonzero().flatten().tolist()
    if point.short != "attn" or judge.recording.plain or not wrong or point.judge.plan.ranks[rank].kv_heads == range(0):
        return
    layer, (s, position) = f"layers.{point.layer}.", point.places[wrong[0]]
    q, k, v = (judge.into(layer + name, rank).double() for name in ("q_rope", "k_rope", "v"))
    slots = [slot for slot in calls.slots[s][:position + 1]]
    if max(slots) >= len(k) or len(slots) * len(k) > MOST_ROWS:
        return
    reads = torch.tensor(judge.plan.ranks[rank].kv_for_q)
    k, v = (torch.cat([x, torch.zeros_like(x[:1])])[:, reads] for x in (k, v))  # the last: a slot never written
    e = torch.einsum("hd,rhd->rh", q[wrong[0]], k) * config.scaling
    e = (e - e.max()).exp()[..., None]  # [rows + 1, heads, 1]
    total, top = e[slots].sum(0), (e[slots] * v[slots]).sum(0)
    gaps = []
    for p, slot in enumerate(slots[:-1]):
        guess = (top - e[slot] * v[slot] + e * v) / (total - e[slot] + e)
        far = by_row(guess, point.held[rank][wrong[0]].double()[None].expand_as(guess))
        gaps += [(far.min().item(), p, int(far.argmin()))]
    gap, p, other = min(gaps, default=(float("inf"), 0, 0))
    if gap > 3 * point.tolerance:
        return
    slot, what = calls.right.num_blocks - 1, "nothing"
    if other < len(k) - 1:
        slot, what = other, "the key and value of token {1} of sequence {0}".format(*point.places[other])
    yield ReadOff("cache_row_stale", f"row {p} of sequence {s}'s cache holds {what}: it was not written, or it was "
                  "written over", lambda attn: None if attn.short != "attn" else {
                      rank: made[attn.name] for rank, made in judge.misread(attn.name, s, p, slot).items()})


OTHERS = other_heads, other_positions, stale_row, scale_ignored, unrelated_head  # asked last

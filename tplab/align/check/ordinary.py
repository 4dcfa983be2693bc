"""Lower precision that a right engine may have: products of few digits (TF32), 8-bit weights, an 8-bit cache.

Each is a patch of the lab's engine, as a fault is; it counts if a replay with it explains a guilty point to rounding.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tplab.align.guilty import by_row
from tplab.align.points import short_name
from tplab.align.read_off import CACHE_SCALES, FP8, cache_gives
from tplab.patch import Patch, original

LEFT = 0.1  # the part of a difference that an explanation may leave: some values round to the other side
_PRODUCTS = (F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_ABLE = {"q", "k", "v", "k_rope", "attn", "o_partial", "o_proj", "gate", "up", "mlp_act", "mlp_partial", "moe_partial",
         "mlp", "router_logits", "logits"}
_ON_RANK = "tplab.align.replay.Replay._on_rank"


def _tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to TF32's 10 bits, half to even, as an H200 does before a product."""
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    return ((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fff).view(torch.float32).to(x.dtype)


def _stored(dtype: torch.dtype, scale, x: torch.Tensor) -> torch.Tensor:
    """Stored in ``dtype``, divided by ``scale``: a number, or the dimensions that have a scale of their own."""
    if isinstance(scale, tuple):
        scale = x.abs().amax(scale, keepdim=True).clamp(min=1e-12) / (127 if dtype == torch.int8 else 448)
    return (x / scale).round() * scale if dtype == torch.int8 else (x / scale).to(dtype).to(x.dtype) * scale


class _Rounded(TorchFunctionMode):
    """A context in which products have rounded operands, or with ``weights_only`` matrices have."""

    def __init__(self, rounding: Callable, weights_only: bool):
        super().__init__()
        self.rounding, self.weights_only = rounding, weights_only

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in _PRODUCTS and not (self.weights_only and function is not F.linear):
            with torch._C.DisableTorchFunction():
                a = args[0] if self.weights_only else self.rounding(args[0])
                args = (a, self.rounding(args[1]), *args[2:])
        return function(*args, **(kwargs or {}))


def _products(rounding: Callable, weights_only: bool = False) -> tuple[Patch]:
    def on_rank(self, *args):
        with _Rounded(rounding, weights_only):
            return original(_ON_RANK)(self, *args)
    return (Patch(_ON_RANK, on_rank),)


def _cache(rounding: Callable) -> tuple[Patch]:
    return cache_gives(rounding, rounding)


PRECISIONS = {"TF32 products": _products(_tf32)}
for _dtype in torch.bfloat16, torch.float16:
    PRECISIONS |= {f"{str(_dtype)[6:]} products": _products(partial(_stored, _dtype, 1)),
                   f"a cache in {str(_dtype)[6:]}": _cache(partial(_stored, _dtype, 1))}
PRECISIONS |= {f"a cache in fp8 (e4m3), scale {scale:g}": _cache(partial(_stored, FP8, scale))
               for scale in CACHE_SCALES}
for _name, _dtype in ("int8", torch.int8), ("fp8 (e4m3)", FP8):
    PRECISIONS |= {f"a cache in {_name}, a scale for each token and head": _cache(partial(_stored, _dtype, (-1,))),
                   f"{_name} weights, a scale for each row": _products(partial(_stored, _dtype, (-1,)), True),
                   f"{_name} weights, one scale": _products(partial(_stored, _dtype, (-2, -1)), True)}


@torch.inference_mode()
def lower_precision(report, names: list[str]) -> tuple[str, set[str]]:
    """The lower precision that explains guilty points, and those that it explains; ``"", set()`` if none does."""
    able = [name for name in names if short_name(name) in _ABLE and _is_noise(report, name)]
    for name in able[:2]:
        left: dict[str, float] = {}
        for what, patches in PRECISIONS.items():
            left[what] = _left(report.judge, report.local[name], patches)
            if not left[what]:
                break
        # The first of those that explain it equally well: TF32 and float16 have as many digits.
        best = next(what for what, part in left.items() if part <= 2 * min(left.values()) + 1e-3)
        if left[best] <= LEFT:
            return best, {other for other in able if _left(report.judge, report.local[other], PRECISIONS[best]) <= LEFT}
    return "", set()


@torch.inference_mode()
def noisy(report, names: list[str]) -> bool:
    """Whether points are off at random, by as much as eight bits round, in all rows, and in every layer that has them.
    A wrong scale, mask or rotation spares the rows with one key."""
    kinds = {short_name(name) for name in names}
    alike = {name for name in report.local if short_name(name) in kinds}
    return alike == set(names) and kinds <= _ABLE and all(_is_noise(report, name, 5e-3) and all(
        (by_row(*_pair(report.judge, name, rank)) > report.judge.tolerance(name, rank)).all()
        for rank in report.local[name].guilty) for name in names)


def _pair(judge, name: str, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    right = judge.expected(name, rank)
    return judge.held(name, rank).to(right.dtype), right


def _is_noise(report, name: str, least: float = 0.0) -> bool:
    """Whether a difference is small beside the right values, and no multiple of them."""
    for rank in report.local[name].guilty:
        held, right = (x.flatten(1) for x in _pair(report.judge, name, rank))
        known = right.isfinite().all(1)
        off, size = (held - right)[known], right[known].norm()
        if not (off.isfinite().all() and least * size <= off.norm() <= 0.2 * size and (
                off * right[known]).sum().abs() <= 0.8 * off.norm() * size):
            return False
    return True


def _left(judge, diff, patches: tuple[Patch, ...]) -> float:
    """The part of a difference that a replay with these patches leaves, on the worst rank: 0 if it is rounding."""
    parts_left, broken = [0.0], judge.broken(diff.name, patches)
    for rank in diff.guilty:
        (held, right), changed = _pair(judge, diff.name, rank), broken[rank][diff.name]
        wrong, rest = ~(by_row(held, right) <= diff.tolerance), by_row(held, changed)
        if not (rest <= diff.tolerance).all():
            off, left = ((held - x).flatten(1)[wrong].norm(dim=1) for x in (right, changed))
            few = ((left <= 0.5 * off) | (rest[wrong] <= 3 * diff.tolerance)).all()
            parts_left.append((left.norm() / off.norm()).item() if few else float("inf"))
    return max(parts_left)

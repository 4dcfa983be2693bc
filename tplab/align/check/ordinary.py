"""Lower precision that a right engine may have: products of few digits (TF32), 8-bit weights, an 8-bit cache. A guilty
point is computed again with each of them; a precision counts only if it explains the point's rows to rounding.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tplab.align.arithmetic import as_dtype
from tplab.align.guilty import Judge
from tplab.align.local import LocalFrame
from tplab.align.points import layout

LEFT = 0.1  # the part of a difference that an explanation may leave: some values round to the other side
_PRODUCTS = (F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
Rounding = Callable[[torch.Tensor], torch.Tensor]
_Off = tuple[int, torch.Tensor, torch.Tensor]  # a guilty rank, its difference, the right values


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to TF32's 10 bits, as on a GPU before a product."""
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    return ((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fff).view(torch.float32).to(x.dtype)


def _largest(x: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    return x.abs().amax(dim, keepdim=True).clamp(min=1e-12)


def as_int8(dim: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    """Stored as whole numbers up to 127, one scale for all that lies along ``dim``."""
    scale = _largest(x, dim) / 127
    return (x / scale).round() * scale


def as_fp8(dim: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
    """Stored as float8_e4m3fn, one scale for all that lies along ``dim``."""
    return as_dtype(torch.float8_e4m3fn, x, _largest(x, dim) / 448)


def in_groups(size: int, rounding: Rounding, x: torch.Tensor) -> torch.Tensor:
    """``rounding`` along the last dimension, group by group of ``size`` columns."""
    return rounding(x.unflatten(-1, (-1, size))).flatten(-2) if x.shape[-1] % size == 0 else x


PRODUCTS = {"TF32 products": tf32, "bfloat16 products": partial(as_dtype, torch.bfloat16),
            "float16 products": partial(as_dtype, torch.float16)}
WEIGHTS = {"int8 weights, a scale for each row": partial(as_int8, (-1,)),
           "int8 weights, one scale": partial(as_int8, (-2, -1)),
           "fp8 weights, a scale for each row": partial(as_fp8, (-1,)),
           "fp8 weights, one scale": partial(as_fp8, (-2, -1)),
           "fp8 weights without a scale": partial(as_dtype, torch.float8_e4m3fn)}
WEIGHTS |= {f"int8 weights, a scale for each {size} columns": partial(in_groups, size, partial(as_int8, (-1,)))
            for size in (16, 32, 64, 128)}
CACHES = {f"a cache in {name}, scale {scale:g}": partial(as_dtype, dtype, scale=scale)
          for name, dtype in (("fp8 (e4m3)", torch.float8_e4m3fn), ("fp8 (e5m2)", torch.float8_e5m2))
          for scale in (1.0, 0.5, 0.25, 0.125, 0.0625, 2.0)}
CACHES |= {f"a cache in {name}, a scale for each {what}": partial(rounding, dim) for name, rounding in (
    ("int8", as_int8), ("fp8 (e4m3)", as_fp8)) for what, dim in (("token and head", (-1,)), ("token", (-2, -1)),
                                                                  ("head", (0, -1)), ("tensor", (0, 1, 2)))}


class _Rounded(TorchFunctionMode):
    """A context in which products have rounded operands, or with ``weights_only`` a rounded second operand."""

    def __init__(self, rounding: Rounding, weights_only: bool):
        super().__init__()
        self.rounding, self.weights_only = rounding, weights_only

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in _PRODUCTS and not (self.weights_only and function is not F.linear):
            with torch._C.DisableTorchFunction():
                a = args[0] if self.weights_only else self.rounding(args[0])
                args = (a, self.rounding(args[1]), *args[2:])
        return function(*args, **(kwargs or {}))


class _Cached(LocalFrame):
    """A local frame in which attention reads rounded keys and values."""

    rounding: Rounding

    def value(self, name: str, rank: int) -> torch.Tensor:
        found = super().value(name, rank)
        return self.rounding(found) if name.endswith((".k_rope", ".v")) else found


class Ordinary:
    """Explains guilty points one after the other, in the order of the forward pass."""

    def __init__(self, report):
        self.report, self.recording, self.checkpoint = report, report.recording, report.checkpoint
        self.right = Judge(report.recording, report.checkpoint, report.plan)
        self.found: list[str] = []  # what explained a point before is asked first
        self.missed = 0  # points that nothing explained; after a few, no more are asked

    def explained(self, names: list[str]) -> dict[str, str]:
        """Those of the guilty points that a lower precision explains → which one."""
        found: dict[str, str] = {}
        for name in names:
            if (found or self.missed <= 6) and (what := self._explains(name)):
                found[name] = what
                self.found = [what, *(other for other in self.found if other != what)]
        usual = max(found.values(), key=list(found.values()).count, default="")
        return {name: usual if what == usual or self._left(usual, name, self._off(name)) <= LEFT else what
                for name, what in found.items()}

    def _explains(self, name: str) -> str | None:
        wrong = self._off(name)
        if not all(_noise(off, right) for _, off, right in wrong):
            return None
        caches = name.endswith((".attn", ".k_rope", ".v"))
        left: dict[str, float] = {}
        for what in dict.fromkeys((*self.found, *PRODUCTS, *(CACHES if caches else WEIGHTS))):
            left[what] = self._left(what, name, wrong)
            if left[what] <= 1e-5:
                break
        # The first of those that explain it equally well: TF32 and float16 have as many digits.
        best = next(what for what in left if left[what] <= max(2 * min(left.values()), 1e-5))
        self.missed += left[best] > LEFT
        return best if left[best] <= LEFT else None

    def noisy(self, names: list[str]) -> bool:
        """Whether points are off at random, by as much as eight bits round, and in every layer that has them."""
        kinds = {name.rpartition(".")[2] for name in names}
        alike = {name for name in self.report.local if name.rpartition(".")[2] in kinds}
        return alike == set(names) and kinds <= {
            "q", "k", "v", "attn", "o_partial", "o_proj", "gate", "up", "mlp_act", "mlp_partial", "mlp", "logits"} and (
            all(_noise(off, right, 5e-3) and self._most_rows(name, rank, off, right)
                for name in names for rank, off, right in self._off(name)))

    def _most_rows(self, name: str, rank: int, off: torch.Tensor, right: torch.Tensor) -> bool:
        """Whether nearly all rows are off, as they must be if all values are stored with few digits."""
        wrong = self._wrong(name, rank, off, right)
        if name.endswith(".attn"):  # a text's first token sees only its own stored value
            first = self.right.frame.positions == 0
            off, size = off[first].abs(), right[first].abs()
            if not wrong[first].all() or not (off <= 0.07 * size + 0.01 * size.amax(1, keepdim=True)).all():
                return False
        return bool(wrong.double().mean() >= 0.8)

    def _wrong(self, name: str, rank: int, off: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """The rows that rounding does not explain."""
        return off.abs().amax(1) > self.right.tolerance(name, rank, 1.0) * right.abs().amax(1).clamp(min=1e-30)

    def _off(self, name: str) -> list[_Off]:
        self.right.enter(name)
        pairs = [(rank, self.recording.points[name][rank].tensor, self.right.frame.expected(name, rank))
                 for rank in self.report.local[name].guilty]
        return [(rank, (held.to(right.dtype) - right).flatten(1), right.flatten(1)) for rank, held, right in pairs]

    def _left(self, what: str, name: str, ranks: list[_Off]) -> float:
        """The part of the difference that an explanation leaves, on the worst rank and in the wrong rows."""
        found = []
        for rank, off, right in ranks:
            changed, wrong = self._made(what, name, rank), self._wrong(name, rank, off, right)
            left = off + right - changed.flatten(1) if changed is not None else off
            few = wrong.any() and (left[wrong].norm(dim=1) <= 0.5 * off[wrong].norm(dim=1)).all()
            found.append((left[wrong].norm() / off[wrong].norm()).item() if few else float("inf"))
        return max(found)

    def _made(self, what: str, name: str, rank: int) -> torch.Tensor | None:
        """A point in this precision."""
        of = self.recording, self.checkpoint, self.report.plan, self.right.frame.dtype
        if what in CACHES and name.endswith((".k_rope", ".v")):
            return CACHES[what](self.right.frame.expected(name, rank))
        if what in CACHES:
            frame, mode = _Cached(*of), nullcontext()
            frame.rounding = CACHES[what]
        elif layout(name) == "replicated" and name.endswith("norm") or name == "embed":
            return None
        else:
            frame, mode = LocalFrame(*of), _Rounded(PRODUCTS.get(what) or WEIGHTS[what], what in WEIGHTS)
        with mode:
            frame.enter(self.right.layer)
            return frame.expected(name, rank)


def _noise(off: torch.Tensor, right: torch.Tensor, least: float = 0.0) -> bool:
    """Whether a difference is small beside the right values, and no multiple of them."""
    size = right.norm()
    return bool(off.isfinite().all() and least * size <= off.norm() <= 0.2 * size
                and (off * right).sum().abs() <= 0.8 * off.norm() * size)

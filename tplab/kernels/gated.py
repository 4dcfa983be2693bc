"""The product inside a gated MLP, ``silu(gate) * up``, in one pass over memory, with PyTorch's bits."""

from collections.abc import Callable
from functools import lru_cache
from string import Template

import torch
from torch.nn import functional as F

from tplab.kernels.compiled import NUMBERS, has, row_by_row, shared, threads_for
from tplab.kernels.exponential import declared, exponential

_GROUP = 32  # numbers taken at once, as PyTorch takes them: it computes another exp for what is left of a row


def silu_times(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor | None:
    """``silu(gate) * up`` for two ``[tokens, size]`` in float32 or bfloat16, with :func:`silu_times_by_torch`'s bits.

    (Bfloat16's numbers below 1.2e-38, which lack digits, may become 0.) None where there is no such loop: for other
    dtypes and sizes, and where a gradient is wanted.
    """
    if gate.shape != up.shape or gate.ndim != 2 or gate.dtype != up.dtype or gate.requires_grad or up.requires_grad \
            or not gate.stride(1) == up.stride(1) == 1:
        return None
    loop = _loop(gate.dtype, gate.shape[1])
    return None if loop is None else _multiplied(loop, gate, up)


def silu_times_by_torch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rounded to their dtype in between, as Hugging Face's modules round."""
    return F.silu(gate).mul_(up)


_ARGUMENTS = "ptr %gate, i64 %gate_row, ptr %up, i64 %up_row, ptr %y"
_ROW = Template("""
  %gate.offset = mul i64 %r, %gate_row
  %gate.at = getelementptr i8, ptr %gate, i64 %gate.offset
  %up.offset = mul i64 %r, %up_row
  %up.at = getelementptr i8, ptr %up, i64 %up.offset
  %y.at = getelementptr [$size x $T], ptr %y, i64 %r
  br label %group

group:
  %g = phi i64 [0, %row], [%g.next, %group]
  %gate.from = getelementptr <32 x $T>, ptr %gate.at, i64 %g
  %up.from = getelementptr <32 x $T>, ptr %up.at, i64 %g
  %to = getelementptr <32 x $T>, ptr %y.at, i64 %g
  %gates = load <32 x $T>, ptr %gate.from, align 2
  %ups = load <32 x $T>, ptr %up.from, align 2
  %x = $widen <32 x $T> %gates to $V
  %minus = fneg $V %x
  $exp
  %below = fadd $V %exp, splat (float 1.0)
  %silu = fdiv $V %x, %below
  %cast = $round $V %silu to <32 x $T>
  %product = fmul <32 x $T> %cast, %ups
  store <32 x $T> %product, ptr %to, align 2
  %g.next = add i64 %g, 1
  %g.more = icmp ult i64 %g.next, $groups
  br i1 %g.more, label %group, label %row.end
""")


def _multiplied(loop: Callable, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    y, item = gate.new_empty(gate.shape), gate.itemsize
    loop(gate.data_ptr(), gate.stride(0) * item, up.data_ptr(), up.stride(0) * item, y.data_ptr(), len(gate),
         threads_for(y))
    return y


@lru_cache
def _loop(dtype: torch.dtype, size: int) -> Callable | None:
    """The loop, if it gives PyTorch's bits here."""
    if dtype not in NUMBERS or not size or size % _GROUP or not has("fma"):
        return None
    row = _ROW.substitute(NUMBERS[dtype], V="<32 x float>", size=size, groups=size // _GROUP,
                          exp=exponential("%minus", _GROUP))
    loop = shared(row_by_row(_ARGUMENTS, row, declared(_GROUP)))
    gate, up = (8 * torch.randn(2, 50, size, generator=torch.Generator().manual_seed(size))).to(dtype)
    return loop if torch.equal(_multiplied(loop, gate, up), silu_times_by_torch(gate, up)) else None

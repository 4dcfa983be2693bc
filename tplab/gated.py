"""The product inside a gated MLP, ``silu(gate) * up``, in one pass over memory, with PyTorch's bits."""

import struct
from collections.abc import Callable
from functools import lru_cache
from string import Template

import torch
from torch.nn import functional as F

from tplab.compiled import NUMBERS, each, has, shared, threads_for

_GROUP = 32  # numbers taken at once, as PyTorch takes them: it computes another exp for what is left of a row
# SLEEF's e^x, which is PyTorch's (xexpf in https://github.com/shibatch/sleef/blob/master/src/libm/sleefsimdsp.c): x is
# so many times ln 2, which is taken off in two parts, and a rest for which a polynomial stands.
_NUMBERS_OF_EXP = {"one": 1.0, "per_ln2": 1.442695040888963407359924681, "minus_ln2": -0.693145751953125,
                   "minus_ln2_rest": -1.428606765330187045e-06, "c6": 0.000198527617612853646278381,
                   "c5": 0.00139304355252534151077271, "c4": 0.00833336077630519866943359,
                   "c3": 0.0416664853692054748535156, "c2": 0.166666671633720397949219, "c1": 0.5,
                   "none_below": -104.0, "endless_above": 100.0, "endless": float("inf")}


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


_ROWS = Template("""
declare <32 x float> @llvm.rint.v32f32(<32 x float>)
declare <32 x float> @llvm.fma.v32f32(<32 x float>, <32 x float>, <32 x float>)

define internal void @work(ptr %gate, i64 %gate_row, ptr %up, i64 %up_row, ptr %y, i64 %first, i64 %end) {
begin:
  br label %row

row:
  %r = phi i64 [%first, %begin], [%r.next, %row.end]
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

  %parts = fmul $V %minus, $per_ln2
  %whole = call $V @llvm.rint.v32f32($V %parts)
  %nearly = call $V @llvm.fma.v32f32($V %whole, $V $minus_ln2, $V %minus)
  %rest = call $V @llvm.fma.v32f32($V %whole, $V $minus_ln2_rest, $V %nearly)
  %p5 = call $V @llvm.fma.v32f32($V $c6, $V %rest, $V $c5)
  %p4 = call $V @llvm.fma.v32f32($V %p5, $V %rest, $V $c4)
  %p3 = call $V @llvm.fma.v32f32($V %p4, $V %rest, $V $c3)
  %p2 = call $V @llvm.fma.v32f32($V %p3, $V %rest, $V $c2)
  %p1 = call $V @llvm.fma.v32f32($V %p2, $V %rest, $V $c1)
  %square = fmul $V %rest, %rest
  %p0 = call $V @llvm.fma.v32f32($V %square, $V %p1, $V %rest)
  %power.of.rest = fadd $V %p0, $one
  %number = fptosi $V %whole to <32 x i32>
  %n = freeze <32 x i32> %number
  %n.0 = ashr <32 x i32> %n, splat (i32 1)
  %n.1 = sub <32 x i32> %n, %n.0
  $powers_of_two
  %once = fmul $V %power.of.rest, %two.0
  %twice = fmul $V %once, %two.1
  %none = fcmp olt $V %minus, $none_below
  %some = select <32 x i1> %none, $V zeroinitializer, $V %twice
  %endless = fcmp ogt $V %minus, $endless_above
  %exp = select <32 x i1> %endless, $V $endless, $V %some

  %below = fadd $V %exp, $one
  %silu = fdiv $V %x, %below
  %cast = $round $V %silu to <32 x $T>
  %product = fmul <32 x $T> %cast, %ups
  store <32 x $T> %product, ptr %to, align 2
  %g.next = add i64 %g, 1
  %g.more = icmp ult i64 %g.next, $groups
  br i1 %g.more, label %group, label %row.end

row.end:
  %r.next = add i64 %r, 1
  %r.more = icmp ult i64 %r.next, %end
  br i1 %r.more, label %row, label %done

done:
  ret void
}
""")
# 2 to the power of n, in two halves of n: each must fit a float's exponent.
_POWER_OF_TWO = """
  %biased.{half} = add <32 x i32> %n.{half}, splat (i32 127)
  %exponent.{half} = shl <32 x i32> %biased.{half}, splat (i32 23)
  %two.{half} = bitcast <32 x i32> %exponent.{half} to <32 x float>
"""


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
    loop = shared(_ROWS.substitute(
        NUMBERS[dtype], V="<32 x float>", size=size, groups=size // _GROUP, powers_of_two=each(_POWER_OF_TWO, half=2),
        **{name: f"splat (float {_in_hex(number)})" for name, number in _NUMBERS_OF_EXP.items()}))
    gate, up = (8 * torch.randn(2, 50, size, generator=torch.Generator().manual_seed(size))).to(dtype)
    return loop if torch.equal(_multiplied(loop, gate, up), silu_times_by_torch(gate, up)) else None


def _in_hex(number: float) -> str:
    """A float32 as LLVM writes it: with the bits that it has as a double."""
    single, = struct.unpack("f", struct.pack("f", number))
    return f"0x{struct.unpack('q', struct.pack('d', single))[0] & (1 << 64) - 1:016X}"

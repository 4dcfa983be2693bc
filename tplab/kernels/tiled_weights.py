"""Attention's weights in a tile of 16 queries, as lines in LLVM's language: see ``tiled_loops.py``.

They take the place of the scores. The lines stand between the blocks ``%rows`` and ``%weighed``.
"""

import math
import re
from string import Template
from typing import NamedTuple

from tplab.kernels.compiled import each
from tplab.kernels.exponential import declared, exponential, in_hex
from tplab.kernels.softmax import largest_of_all, sum_of_all, torchs_lanes
from tplab.kernels.tiled_layout import KEYS

_ROWS = 4  # of a tile, whose softmax is computed side by side


class Weights(NamedTuple):
    """Lines, what they want declared or defined, and what scaling is multiplied by before."""

    lines: str
    declared: str
    scale: float


def in_float32() -> Weights | None:
    """With PyTorch's bits; None where there are no such loops."""
    lanes = torchs_lanes()
    if lanes is None:
        return None
    found = _FOUND_AS_PYTORCH.replace("LARGEST", largest_of_all("%larger.{row}", lanes))
    raised = _RAISED_AS_PYTORCH.replace("SUM", sum_of_all("%sum.next.{row}", lanes))
    # Every row has names of its own for what stands between x and its power.
    power = re.sub(r"(%[\w.]+)", r"\1.{row}", exponential("%x", lanes))
    return Weights(_lines(lanes, found, _RAISE_AS_PYTORCH.replace("EXP", power), raised), declared(lanes), 1.0)


def in_bfloat16() -> Weights:
    """Rounded, and not divided by their sums, whose shares of 1 come to stand in ``%shares``."""
    kinds = {"V": "<16 x float>", "scale": "llvm.x86.avx512.mask.scalef.ps.512"}
    lines = _lines(16, _FOUND, _RAISE.replace("EXP2", _exp2()), _RAISED)
    return Weights(Template(lines).substitute(kinds), Template(_DECLARED).substitute(kinds), math.log2(math.e))


def _lines(lanes: int, found: str, raise_powers: str, raised: str) -> str:
    def of_rows(text: str) -> str:
        return each(text, row=_ROWS)

    return Template(Template(_FRAME).safe_substitute(
        rows_begin=of_rows(_ROWS_BEGIN), find=of_rows(_FIND), found=of_rows(found),
        raise_powers=of_rows(raise_powers), raised=of_rows(raised))).safe_substitute(
            V=f"<{lanes} x float>", lanes=lanes, vectors=KEYS // lanes, rows=_ROWS)


_DECLARED = """
declare $V @llvm.fma.v16f32($V, $V, $V)
declare $V @llvm.rint.v16f32($V)
declare $V @$scale($V, $V, $V, i16, i32)
declare float @llvm.vector.reduce.fmax.v16f32($V)
declare float @llvm.vector.reduce.fadd.v16f32(float, $V)
"""
_FRAME = """
rows:
  %scaling.0 = insertelement $V poison, float %scaling, i32 0
  %c = shufflevector $V %scaling.0, $V poison, <$lanes x i32> zeroinitializer
  %vectors = mul i64 %look, $vectors
  br label %some

some:
  %r = phi i64 [0, %rows], [%r.next, %some.end]
  $rows_begin
  br label %find

find:
  %i.0 = phi i64 [0, %some], [%i.0.next, %find]
  $find
  %i.0.next = add i64 %i.0, 1
  %i.0.more = icmp ult i64 %i.0.next, %vectors
  br i1 %i.0.more, label %find, label %found

found:
  $found
  br label %raise

raise:
  %i.1 = phi i64 [0, %found], [%i.1.next, %raise]
  $raise_powers
  %i.1.next = add i64 %i.1, 1
  %i.1.more = icmp ult i64 %i.1.next, %vectors
  br i1 %i.1.more, label %raise, label %raised

raised:
  $raised
  br label %some.end

some.end:
  %r.next = add i64 %r, $rows
  %r.more = icmp ult i64 %r.next, 16
  br i1 %r.more, label %some, label %weighed
"""
_ROWS_BEGIN = """
  %r.{row} = add i64 %r, {row}
  %row.offset.{row} = mul i64 %r.{row}, %row.bytes
  %row.at.{row} = getelementptr i8, ptr %weights, i64 %row.offset.{row}
  %mask.row.offset.{row} = mul i64 %r.{row}, %mask.row
  %mask.row.at.{row} = getelementptr i8, ptr %mask.at, i64 %mask.row.offset.{row}
"""
_READ = """
  %score.at.N.{row} = getelementptr $V, ptr %row.at.{row}, i64 %i.N
  %read.N.{row} = load $V, ptr %score.at.N.{row}, align 32
  %mask.at.N.{row} = getelementptr <$lanes x i8>, ptr %mask.row.at.{row}, i64 %i.N
  %mask.N.{row} = load <$lanes x i8>, ptr %mask.at.N.{row}, align 8
  %hidden.N.{row} = icmp ne <$lanes x i8> %mask.N.{row}, zeroinitializer
  %scaled.N.{row} = fmul $V %read.N.{row}, %c
  %visible.N.{row} = select <$lanes x i1> %hidden.N.{row}, $V splat (float 0xFFF0000000000000), $V %scaled.N.{row}
"""
_FIND = """
  %largest.{row} = phi $V [splat (float 0xFFF0000000000000), %some], [%larger.{row}, %find]
""" + _READ.replace("N", "0") + """
  %is.larger.{row} = fcmp ogt $V %visible.0.{row}, %largest.{row}
  %larger.{row} = select <$lanes x i1> %is.larger.{row}, $V %visible.0.{row}, $V %largest.{row}
"""
_FOUND = """
  %top.{row} = call float @llvm.vector.reduce.fmax.v16f32($V %larger.{row})
  %minus.top.{row} = fneg float %top.{row}
  %minus.top.{row}.0 = insertelement $V poison, float %minus.top.{row}, i32 0
  %below.{row} = shufflevector $V %minus.top.{row}.0, $V poison, <16 x i32> zeroinitializer
"""
_RAISE = """
  %sum.{row} = phi $V [zeroinitializer, %found], [%sum.next.{row}, %raise]
""" + _READ.replace("N", "1") + """
  %x.{row} = call $V @llvm.fma.v16f32($V %read.1.{row}, $V %c, $V %below.{row})
  EXP2
  %weight.{row} = select <16 x i1> %hidden.1.{row}, $V zeroinitializer, $V %power.{row}
  %sum.next.{row} = fadd $V %sum.{row}, %weight.{row}
  %rounded.{row} = fptrunc $V %weight.{row} to <16 x bfloat>
  %weight.at.{row} = getelementptr <16 x bfloat>, ptr %row.at.{row}, i64 %i.1
  store <16 x bfloat> %rounded.{row}, ptr %weight.at.{row}, align 32
"""
_RAISED = """
  %total.{row} = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, $V %sum.next.{row})
  %share.{row} = fdiv float 1.0, %total.{row}
  %share.at.{row} = getelementptr float, ptr %shares, i64 %r.{row}
  store float %share.{row}, ptr %share.at.{row}
"""
# As PyTorch does it: what is hidden is raised too, and all is multiplied by the sum's share of 1.
_FOUND_AS_PYTORCH = """
  LARGEST
"""
_RAISE_AS_PYTORCH = """
  %sum.{row} = phi $V [zeroinitializer, %found], [%sum.next.{row}, %raise]
""" + _READ.replace("N", "1") + """
  %x.{row} = fsub $V %visible.1.{row}, %larger.{row}.all
  EXP
  %sum.next.{row} = fadd $V %sum.{row}, %exp.{row}
  store $V %exp.{row}, ptr %score.at.1.{row}, align 32
"""
_RAISED_AS_PYTORCH = """
  SUM
  %share.{row} = fdiv $V splat (float 1.0), %sum.next.{row}.all
  br label %divide

divide:
  %i.2 = phi i64 [0, %raised], [%i.2.next, %divide]
  %power.at.{row} = getelementptr $V, ptr %row.at.{row}, i64 %i.2
  %power.{row} = load $V, ptr %power.at.{row}, align 32
  %weight.{row} = fmul $V %power.{row}, %share.{row}
  store $V %weight.{row}, ptr %power.at.{row}, align 32
  %i.2.next = add i64 %i.2, 1
  %i.2.more = icmp ult i64 %i.2.next, %vectors
  br i1 %i.2.more, label %divide, label %divided

divided:
"""
# 2 to the power of x, which is at most 0: a whole power of two, times a polynomial in what is left, which is half or
# less: the beginning of the series of 2^x, off by 2.4e-6 of it, where bfloat16 rounds by 4e-3.
_SERIES = [math.log(2) ** n / math.factorial(n) for n in range(6)]
_EXP2_BEGIN = """
  %is.little.{row} = fcmp olt $V %x.{row}, splat (float -200.0)
  %little.{row} = select <16 x i1> %is.little.{row}, $V splat (float -200.0), $V %x.{row}
  %whole.{row} = call $V @llvm.rint.v16f32($V %little.{row})
  %rest.{row} = fsub $V %little.{row}, %whole.{row}
"""
_EXP2_END = """
  %power.{row} = call $V @$scale($V %poly.{row}.0, $V %whole.{row}, $V poison, i16 -1, i32 4)
"""


def _exp2() -> str:
    """Lines that compute ``%power`` from ``%x``; NaN stays NaN."""
    lines, so_far = _EXP2_BEGIN, _splat(_SERIES[-1])
    for n in reversed(range(len(_SERIES) - 1)):
        lines += (f"%poly.{{row}}.{n} = call $V @llvm.fma.v16f32($V {so_far}, "
                  f"$V %rest.{{row}}, $V {_splat(_SERIES[n])})\n")
        so_far = f"%poly.{{row}}.{n}"
    return lines + _EXP2_END


def _splat(number: float) -> str:
    return f"splat (float {in_hex(number)})"

"""The largest number of each row and where it stands, in one pass over memory and a look for its place."""

from collections.abc import Callable
from functools import lru_cache
from string import Template

import torch

from tplab.kernels.compiled import NUMBERS, has, row_by_row, shared, threads_for

_LANES = 16


def largest(x: torch.Tensor, first: int) -> torch.Tensor | None:
    """``[rows, size]`` → ``[rows, 2]`` in float64: each row's largest number, and ``first`` and its place.

    Of equals the first one; NaN is larger than all. None where there is no such loop: for dtypes other than float32 and
    bfloat16, for a ``size`` that is no multiple of 16, where numbers of a row lie apart, where a gradient is wanted.
    """
    rows, size = x.shape
    if x.dtype not in NUMBERS or not size or size % _LANES or x.stride(1) != 1 or x.requires_grad or not has("avx2"):
        return None
    found = torch.empty(rows, 2, dtype=torch.float64)
    _loop(x.dtype)(x.data_ptr(), x.stride(0) * x.itemsize, size, first, found.data_ptr(), rows, threads_for(x))
    return found


_READ = """
  %at.{n} = getelementptr $T, ptr %x.at, i64 %k.{n}
  %given.{n} = load <16 x $T>, ptr %at.{n}, align 2
  %wide.{n} = $widen <16 x $T> %given.{n} to <16 x float>
  %nan.{n} = fcmp uno <16 x float> %wide.{n}, zeroinitializer
"""
_ROW = """
  %offset = mul i64 %r, %x.row
  %x.at = getelementptr i8, ptr %x, i64 %offset
  br label %look

look:
  %k.0 = phi i64 [0, %row], [%k.0.next, %look]
  %most = phi <16 x float> [splat (float 0xFFF0000000000000), %row], [%more, %look]
  %nans = phi <16 x i1> [zeroinitializer, %row], [%nans.next, %look]
""" + _READ.format(n=0) + """
  %nans.next = or <16 x i1> %nans, %nan.0
  %is.more = fcmp ogt <16 x float> %wide.0, %most
  %more = select <16 x i1> %is.more, <16 x float> %wide.0, <16 x float> %most
  %k.0.next = add i64 %k.0, 16
  %k.0.more = icmp ult i64 %k.0.next, %size
  br i1 %k.0.more, label %look, label %known

known:
  %nan.any = call i1 @llvm.vector.reduce.or.v16i1(<16 x i1> %nans.next)
  %largest = call float @llvm.vector.reduce.fmax.v16f32(<16 x float> %more)
  %largest.0 = insertelement <16 x float> poison, float %largest, i32 0
  %largest.each = shufflevector <16 x float> %largest.0, <16 x float> poison, <16 x i32> zeroinitializer
  %wanted.0 = insertelement <16 x i1> poison, i1 %nan.any, i32 0
  %wanted.nan = shufflevector <16 x i1> %wanted.0, <16 x i1> poison, <16 x i32> zeroinitializer
  br label %find

find:
  %k.1 = phi i64 [0, %known], [%k.1.next, %find]
""" + _READ.format(n=1) + """
  %equal = fcmp oeq <16 x float> %wide.1, %largest.each
  %is.it = select <16 x i1> %wanted.nan, <16 x i1> %nan.1, <16 x i1> %equal
  %bits = bitcast <16 x i1> %is.it to i16
  %k.1.next = add i64 %k.1, 16
  %none = icmp eq i16 %bits, 0
  br i1 %none, label %find, label %found  ; there is one: it has been seen

found:
  %place.16 = call i16 @llvm.cttz.i16(i16 %bits, i1 true)
  %place = zext i16 %place.16 to i64
  %k = add i64 %k.1, %place
  %score.at = getelementptr $T, ptr %x.at, i64 %k
  %score = load $T, ptr %score.at
  %score.double = fpext $T %score to double
  %id = add i64 %first.id, %k
  %id.double = sitofp i64 %id to double
  %y.score = getelementptr [2 x double], ptr %y, i64 %r
  %y.id = getelementptr double, ptr %y.score, i64 1
  store double %score.double, ptr %y.score
  store double %id.double, ptr %y.id
  br label %row.end
"""
_DECLARED = """
declare i1 @llvm.vector.reduce.or.v16i1(<16 x i1>)
declare float @llvm.vector.reduce.fmax.v16f32(<16 x float>)
declare i16 @llvm.cttz.i16(i16, i1)
"""


@lru_cache
def _loop(dtype: torch.dtype) -> Callable:
    row = Template(_ROW).substitute(NUMBERS[dtype])
    return shared(row_by_row("ptr %x, i64 %x.row, i64 %size, i64 %first.id, ptr %y", row, _DECLARED))

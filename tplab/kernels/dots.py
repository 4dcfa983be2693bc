"""Products of few rows with a plain weight, for processors with sixteen vector registers (AVX2).

Each output is a sum over a row of the weight, which is read once, as it lies. A weight in bfloat16 is widened in
registers as it arrives, so that half of float32's bytes take half of its time::

    for some in outputs, OUTPUTS at once:  # whose sums with up to ROWS rows stay in registers
        y[rows, some] = sum(x[rows, step] * weight[some, step] for step in vectors of the inputs) + bias[some]
"""

from collections.abc import Callable
from functools import lru_cache
from string import Template

import torch

from tplab.kernels.compiled import NUMBERS, each, has, row_by_row, shared

OUTPUTS, ROWS = 4, 5  # at once; twelve sums stay in registers, so from 4 rows up two outputs
_STEP = 16  # numbers: the inputs are a multiple of so many
_AHEAD = 4096  # bytes: memory is asked for so much earlier


def suits(weight: torch.Tensor) -> bool:
    """Whether there is a loop for this ``[out, in]`` weight."""
    outputs, inputs = weight.shape
    return (weight.dtype in NUMBERS and weight.is_contiguous() and outputs % OUTPUTS == 0 and inputs % _STEP == 0
            and has("fma") and has("avx2"))


def dots(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x [rows, in]`` → ``[rows, out]`` for a weight that :func:`suits`; in bfloat16, each sum is rounded once."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    if rows > 1:
        x = x.float()  # once, not for each output
    x, y = x.contiguous(), torch.empty(rows, outputs, dtype=weight.dtype)
    together = -(-rows // -(-rows // ROWS))  # 6 rows: 3 and 3, not 5 and 1
    some = 2 if together > 3 else OUTPUTS
    _loop(x.dtype, weight.dtype, together, some, bias is not None)(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(), rows, inputs, outputs,
        outputs // some, torch.get_num_threads())
    return y


@lru_cache
def _loop(x: torch.dtype, w: torch.dtype, rows: int, outputs: int, biased: bool) -> Callable:
    """For x and a weight of these dtypes, so many rows and outputs at once."""
    lanes = 16 if rows == 1 else 8  # as many sums as one multiplication takes time for others
    holes = {"F": f"<{lanes} x float>", "lanes": lanes, "all": outputs, "together": rows, "vectors": f"v{lanes}f32",
             "X": NUMBERS[x]["T"], "widen_x": NUMBERS[x]["widen"], "W": NUMBERS[w]["T"],
             "widen": NUMBERS[w]["widen"], "round": NUMBERS[w]["round"],
             "start": "%bias.{output}" if biased else "0.0", "ahead": _AHEAD // w.itemsize}

    def lines(text: str) -> str:
        return each(Template(text).substitute(holes), output=outputs, row=rows)

    row = Template(_UNIT).substitute(holes, begin=lines(_BEGIN + (_BIAS if biased else "")), rows=lines(_ROWS),
                                     step=lines(_STEP_LINES), end=lines(_END))
    return shared(row_by_row("ptr %x, ptr %w, ptr %bias, ptr %y, i64 %rows, i64 %in, i64 %out", row,
                             Template(_DECLARED).substitute(holes)))


_DECLARED = """
declare $F @llvm.fma.$vectors($F, $F, $F)
declare float @llvm.vector.reduce.fadd.$vectors(float, $F)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""
# The last rows of an odd number are multiplied with those before them once more.
_UNIT = """
  %first.output = mul i64 %r, $all
  %last.rows = sub i64 %rows, $together
  $begin
  br label %some

some:
  %p = phi i64 [0, %row], [%p.next, %sums]
  %p.fits = icmp ult i64 %p, %last.rows
  %p.first = select i1 %p.fits, i64 %p, i64 %last.rows
  $rows
  br label %step

step:
  %k = phi i64 [0, %some], [%k.next, %step]
  $step
  %k.next = add i64 %k, $lanes
  %k.more = icmp ult i64 %k.next, %in
  br i1 %k.more, label %step, label %sums

sums:
  $end
  %p.next = add i64 %p, $together
  %p.more = icmp ult i64 %p.next, %rows
  br i1 %p.more, label %some, label %row.end
"""
_BEGIN = """
  %output.{output} = add i64 %first.output, {output}
  %w.{output}.offset = mul i64 %output.{output}, %in
  %w.{output} = getelementptr $W, ptr %w, i64 %w.{output}.offset
"""
_BIAS = """
  %bias.{output}.at = getelementptr $W, ptr %bias, i64 %output.{output}
  %bias.{output}.stored = load $W, ptr %bias.{output}.at, align 2
  %bias.{output} = $widen $W %bias.{output}.stored to float
"""
_ROWS = """
  %row.{row} = add i64 %p.first, {row}
  %x.{row}.offset = mul i64 %row.{row}, %in
  %x.{row} = getelementptr $X, ptr %x, i64 %x.{row}.offset
  %y.{row}.offset = mul i64 %row.{row}, %out
  %y.{row} = getelementptr $W, ptr %y, i64 %y.{row}.offset
"""
_STEP_LINES = """
  %sum.{row}.{output} = phi $F [zeroinitializer, %some], [%sum.{row}.{output}.next, %step]
  %w.{output}.k = getelementptr $W, ptr %w.{output}, i64 %k
  %w.{output}.later = getelementptr $W, ptr %w.{output}.k, i64 $ahead
  call void @llvm.prefetch.p0(ptr %w.{output}.later, i32 0, i32 3, i32 1)
  %w.{output}.stored = load <$lanes x $W>, ptr %w.{output}.k, align 2
  %w.{output}.wide = $widen <$lanes x $W> %w.{output}.stored to $F
  %x.{row}.k = getelementptr $X, ptr %x.{row}, i64 %k
  %x.{row}.stored = load <$lanes x $X>, ptr %x.{row}.k, align 2
  %x.{row}.wide = $widen_x <$lanes x $X> %x.{row}.stored to $F
  %sum.{row}.{output}.next = call $F @llvm.fma.$vectors($F %w.{output}.wide, $F %x.{row}.wide, $F %sum.{row}.{output})
"""
_END = """
  %dot.{row}.{output} = call reassoc float @llvm.vector.reduce.fadd.$vectors(float $start, $F %sum.{row}.{output}.next)
  %rounded.{row}.{output} = $round float %dot.{row}.{output} to $W
  %y.{row}.{output}.at = getelementptr $W, ptr %y.{row}, i64 %output.{output}
  store $W %rounded.{row}.{output}, ptr %y.{row}.{output}.at, align 2
"""

"""Attention by the processor's tiles (AMX), in LLVM's language: see ``tiled_attention.py``.

A unit is a tile of 16 queries of one head of one sequence: their scores of all keys that one of them sees; then, in the
same place, the weights, in bfloat16 and not divided by their sums; then sums of values, 64 numbers of a head at once.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from string import Template

from tplab.kernels.compiled import each, shared
from tplab.kernels.exponential import in_hex
from tplab.kernels.panel_loops import TILE, multiplies_tiles
from tplab.kernels.tiled_layout import BEGINS, KEYS

_ROWS = 4  # of a tile, whose softmax is computed side by side
_SUMS = 4 * TILE


@lru_cache
def tiled_loop(head_dim: int) -> Callable | None:
    """A function of

    * queries, and what they attend to: where they are, and how many bytes apart sequences, heads and queries;
    * keys and values, laid out; how many blocks of keys there are;
    * ``[batch, queries, keys]`` bytes, 1 where a query must not look, in whole tiles and blocks;
    * ``[batch, tiles]`` int64: how many blocks a tile of queries looks at;
    * scaling times log2(e); how many heads there are, and how many share a KV head; how many tiles of queries;
    * a tile configuration.

    A unit is a tile of one head of one sequence. None where there are no tiles.
    """
    if head_dim % _SUMS or not multiplies_tiles():
        return None
    sizes = {"steps": head_dim // KEYS, "sixteens": head_dim // TILE, "parts": head_dim // _SUMS, "rows": _ROWS,
             "V": "<16 x float>", "scale": "llvm.x86.avx512.mask.scalef.ps.512"}

    def lines(text: str, **counts: int) -> str:
        return Template(each(text, **counts)).substitute(sizes)

    def one_by_one(text: str, count: int) -> str:
        return "".join(Template(text).substitute(sizes, n=n) for n in range(count))

    return shared(_ATTEND.substitute(
        sizes, takes=_TAKES, scores=one_by_one(_SCORE, sizes["steps"]), rows_begin=lines(_ROWS_BEGIN, row=_ROWS),
        find=lines(_FIND, row=_ROWS), found=lines(_FOUND, row=_ROWS),
        raise_powers=lines(_RAISE.replace("EXP2", _exp2()), row=_ROWS), rows_end=lines(_ROWS_END, row=_ROWS),
        zeros=lines(_ZERO, n=4), sums=one_by_one(_SUM, 4), kept=lines(_KEEP, n=4), done=lines(_WRITE, n=4)))


_TAKES = ("ptr %q, i64 %q.sequence, i64 %q.head, i64 %q.row, ptr %y, i64 %y.sequence, i64 %y.head, i64 %y.row, "
                 "ptr %k.laid, ptr %v.laid, i64 %blocks, ptr %mask, ptr %looks, float %scaling, i64 %heads, "
                 "i64 %group, i64 %tiles, ptr %tile_config")
_ATTEND = Template("""
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)
declare $V @llvm.fma.v16f32($V, $V, $V)
declare $V @llvm.rint.v16f32($V)
declare $V @$scale($V, $V, $V, i16, i32)
declare float @llvm.vector.reduce.fmax.v16f32($V)
declare float @llvm.vector.reduce.fadd.v16f32(float, $V)

define internal void @tile($takes, i64 %unit) {
begin:
  %t = urem i64 %unit, %tiles
  %head.all = udiv i64 %unit, %tiles
  %head = urem i64 %head.all, %heads
  %sequence = udiv i64 %head.all, %heads
  %kv.heads = udiv i64 %heads, %group
  %kv.first = mul i64 %sequence, %kv.heads
  %kv.head = udiv i64 %head, %group
  %kv.all = add i64 %kv.first, %kv.head
  %first.block = mul i64 %kv.all, %blocks
  %k.begin = getelementptr [2 x [$steps x [1024 x i8]]], ptr %k.laid, i64 %first.block
  %v.begin = getelementptr [$sixteens x [1024 x i8]], ptr %v.laid, i64 %first.block
  %first.row = mul i64 %t, 16
""" + BEGINS.format(x="q") + BEGINS.format(x="y") + """
  %q.rows.before = mul i64 %first.row, %q.row
  %q.at = getelementptr i8, ptr %q.begin, i64 %q.rows.before
  %y.rows.before = mul i64 %first.row, %y.row
  %y.at = getelementptr i8, ptr %y.begin, i64 %y.rows.before
  %tiles.before = mul i64 %sequence, %tiles
  %tile.all = add i64 %tiles.before, %t
  %mask.row = mul i64 %blocks, 32
  %mask.rows = mul i64 %tile.all, 16
  %mask.offset = mul i64 %mask.rows, %mask.row
  %mask.at = getelementptr i8, ptr %mask, i64 %mask.offset
  %look.at = getelementptr i64, ptr %looks, i64 %tile.all
  %look = load i64, ptr %look.at
  %row.bytes = mul i64 %look, 128
  %bytes = mul i64 %row.bytes, 16
  %weights = alloca i8, i64 %bytes, align 64
  %sums = alloca [16 x [64 x float]], align 64
  %shares = alloca [16 x float], align 64
  br label %score

score:
  %b.0 = phi i64 [0, %begin], [%b.0.next, %score]
  call void @llvm.x86.tilezero(i8 0)
  call void @llvm.x86.tilezero(i8 1)
  $scores
  %score.at.0 = getelementptr [2 x [64 x i8]], ptr %weights, i64 %b.0
  %score.at.1 = getelementptr [64 x i8], ptr %score.at.0, i64 1
  call void @llvm.x86.tilestored64(i8 0, ptr %score.at.0, i64 %row.bytes)
  call void @llvm.x86.tilestored64(i8 1, ptr %score.at.1, i64 %row.bytes)
  %b.0.next = add i64 %b.0, 1
  %b.0.more = icmp ult i64 %b.0.next, %look
  br i1 %b.0.more, label %score, label %rows

rows:
  %scaling.0 = insertelement $V poison, float %scaling, i32 0
  %c = shufflevector $V %scaling.0, $V poison, <16 x i32> zeroinitializer
  %vectors = mul i64 %look, 2
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
  br i1 %i.1.more, label %raise, label %some.end

some.end:
  $rows_end
  %r.next = add i64 %r, $rows
  %r.more = icmp ult i64 %r.next, 16
  br i1 %r.more, label %some, label %part

part:
  %part.number = phi i64 [0, %some.end], [%part.next, %part.end]
  $zeros
  br label %value

value:
  %b.1 = phi i64 [0, %part], [%b.1.next, %value]
  %weights.at = getelementptr [64 x i8], ptr %weights, i64 %b.1
  call void @llvm.x86.tileloadd64(i8 4, ptr %weights.at, i64 %row.bytes)
  %v.at = getelementptr [$parts x [4 x [1024 x i8]]], ptr %v.begin, i64 %b.1, i64 %part.number
  $sums
  %b.1.next = add i64 %b.1, 1
  %b.1.more = icmp ult i64 %b.1.next, %look
  br i1 %b.1.more, label %value, label %kept

kept:
  $kept
  br label %write

write:
  %w = phi i64 [0, %kept], [%w.next, %write]
  %w.share.at = getelementptr float, ptr %shares, i64 %w
  %w.share = load float, ptr %w.share.at
  %w.share.0 = insertelement $V poison, float %w.share, i32 0
  %each = shufflevector $V %w.share.0, $V poison, <16 x i32> zeroinitializer
  %y.row.offset = mul i64 %w, %y.row
  %y.row.at = getelementptr i8, ptr %y.at, i64 %y.row.offset
  %y.part.at = getelementptr [4 x [32 x i8]], ptr %y.row.at, i64 %part.number
  $done
  %w.next = add i64 %w, 1
  %w.more = icmp ult i64 %w.next, 16
  br i1 %w.more, label %write, label %part.end

part.end:
  %part.next = add i64 %part.number, 1
  %part.more = icmp ult i64 %part.next, $parts
  br i1 %part.more, label %part, label %end

end:
  ret void
}

define internal void @work($takes, i64 %first, i64 %end) {
begin:
  call void @llvm.x86.ldtilecfg(ptr %tile_config)
  br label %tile

tile:
  %unit = phi i64 [%first, %begin], [%unit.next, %tile]
  call void @tile($takes, i64 %unit)
  %unit.next = add i64 %unit, 1
  %unit.more = icmp ult i64 %unit.next, %end
  br i1 %unit.more, label %tile, label %done

done:
  call void @llvm.x86.tilerelease()
  ret void
}
""")
_SCORE = """
  %q.at.$n = getelementptr [64 x i8], ptr %q.at, i64 $n
  %k.at.0.$n = getelementptr [2 x [$steps x [1024 x i8]]], ptr %k.begin, i64 %b.0, i64 0, i64 $n
  %k.at.1.$n = getelementptr [2 x [$steps x [1024 x i8]]], ptr %k.begin, i64 %b.0, i64 1, i64 $n
  call void @llvm.x86.tileloadd64(i8 2, ptr %q.at.$n, i64 %q.row)
  call void @llvm.x86.tileloadd64(i8 3, ptr %k.at.0.$n, i64 64)
  call void @llvm.x86.tileloadd64(i8 4, ptr %k.at.1.$n, i64 64)
  call void @llvm.x86.tdpbf16ps(i8 0, i8 2, i8 3)
  call void @llvm.x86.tdpbf16ps(i8 1, i8 2, i8 4)
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
  %score.N.{row} = load $V, ptr %score.at.N.{row}, align 64
  %mask.at.N.{row} = getelementptr <16 x i8>, ptr %mask.row.at.{row}, i64 %i.N
  %mask.N.{row} = load <16 x i8>, ptr %mask.at.N.{row}, align 16
  %hidden.N.{row} = icmp ne <16 x i8> %mask.N.{row}, zeroinitializer
"""
_FIND = """
  %largest.{row} = phi $V [splat (float 0xFFF0000000000000), %some], [%larger.{row}, %find]
""" + _READ.replace("N", "0") + """
  %scaled.{row} = fmul $V %score.0.{row}, %c
  %visible.{row} = select <16 x i1> %hidden.0.{row}, $V splat (float 0xFFF0000000000000), $V %scaled.{row}
  %is.larger.{row} = fcmp ogt $V %visible.{row}, %largest.{row}
  %larger.{row} = select <16 x i1> %is.larger.{row}, $V %visible.{row}, $V %largest.{row}
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
  %x.{row} = call $V @llvm.fma.v16f32($V %score.1.{row}, $V %c, $V %below.{row})
  EXP2
  %weight.{row} = select <16 x i1> %hidden.1.{row}, $V zeroinitializer, $V %power.{row}
  %sum.next.{row} = fadd $V %sum.{row}, %weight.{row}
  %rounded.{row} = fptrunc $V %weight.{row} to <16 x bfloat>
  %weight.at.{row} = getelementptr <16 x bfloat>, ptr %row.at.{row}, i64 %i.1
  store <16 x bfloat> %rounded.{row}, ptr %weight.at.{row}, align 32
"""
_ROWS_END = """
  %total.{row} = call reassoc float @llvm.vector.reduce.fadd.v16f32(float 0.0, $V %sum.next.{row})
  %share.{row} = fdiv float 1.0, %total.{row}
  %share.at.{row} = getelementptr float, ptr %shares, i64 %r.{row}
  store float %share.{row}, ptr %share.at.{row}
"""
_ZERO = "call void @llvm.x86.tilezero(i8 {n})"
_SUM = """
  %v.at.$n = getelementptr [1024 x i8], ptr %v.at, i64 $n
  call void @llvm.x86.tileloadd64(i8 5, ptr %v.at.$n, i64 64)
  call void @llvm.x86.tdpbf16ps(i8 $n, i8 4, i8 5)
"""
_KEEP = """
  %sums.at.{n} = getelementptr [64 x i8], ptr %sums, i64 {n}
  call void @llvm.x86.tilestored64(i8 {n}, ptr %sums.at.{n}, i64 256)
"""
_WRITE = """
  %sums.row.{n} = getelementptr [4 x $V], ptr %sums, i64 %w, i64 {n}
  %sums.{n} = load $V, ptr %sums.row.{n}, align 64
  %shared.{n} = fmul $V %sums.{n}, %each
  %y.{n} = fptrunc $V %shared.{n} to <16 x bfloat>
  %y.to.{n} = getelementptr [32 x i8], ptr %y.part.at, i64 {n}
  store <16 x bfloat> %y.{n}, ptr %y.to.{n}, align 2
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

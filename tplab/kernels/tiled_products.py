"""The two products of attention by tiles, as lines in LLVM's language: see ``tiled_loops.py``.

First 16 queries meet blocks of 32 keys, then their weights meet the values, 64 numbers of a head at once; either
by the processor's tiles (AMX), in bfloat16, or by vectors (AVX-512), in bfloat16 and float32. Both read keys and values
as ``tiled_layout.py`` has laid them out, in words of four bytes: two numbers in bfloat16, one in float32.

The lines of scores stand between the blocks ``%begin`` and ``%rows``, those of sums between ``%weighed`` and ``%end``.
"""

from string import Template
from typing import NamedTuple

import torch

from tplab.kernels.compiled import NUMBERS, each
from tplab.kernels.panel_loops import TILE
from tplab.kernels.tiled_layout import KEYS, WORDS

SUMS = 4 * TILE  # numbers of a head whose sums are computed at once
_SCORE_ROWS, _VALUE_ROWS = 8, 4  # with two vectors of keys, or four of values: 16 sums stay in registers


class Products(NamedTuple):
    """Lines, what they want declared, and what they take beside what all take."""

    takes: str
    scores: str
    values: str
    declared: str


def by_tiles(head_dim: int) -> Products:
    """In bfloat16 by AMX; ``%tile_config`` has been loaded."""
    sizes = {"steps": head_dim // KEYS, "sixteens": head_dim // TILE, "parts": head_dim // SUMS, "V": "<16 x float>"}

    def one_by_one(text: str, count: int) -> str:
        return "".join(Template(text).substitute(sizes, n=n) for n in range(count))

    def lines(text: str) -> str:
        return Template(each(text, n=4)).substitute(sizes)

    return Products(
        "ptr %tile_config", Template(_TILES_SCORES).substitute(sizes, scores=one_by_one(_SCORE, sizes["steps"])),
        Template(_TILES_VALUES).substitute(sizes, zeros=lines(_ZERO), sums=one_by_one(_SUM, 4), kept=lines(_KEEP),
                                           done=lines(_WRITE)), _TILES_DECLARED)


def by_vectors(dtype: torch.dtype, head_dim: int) -> Products:
    """By AVX-512. Scores are added up in the order of a head's numbers, values ``%portion`` words at a time."""
    numbers, block = 4 // dtype.itemsize, WORDS[dtype]
    sizes = {**NUMBERS[dtype], "V": "<16 x float>", "N": f"<{TILE * numbers} x {NUMBERS[dtype]['T']}>",
             "words": head_dim // numbers, "sixteens": head_dim // TILE, "parts": head_dim // SUMS, "tile": 64 * block,
             "block": block, "bits": block.bit_length() - 1, "less_one": block - 1, "score_rows": _SCORE_ROWS,
             "value_rows": _VALUE_ROWS, "bytes": TILE * dtype.itemsize}
    sizes |= {"scored": _added(dtype, "%q.word.{row}", "%k.{half}", "%score.{row}.{half}"),
              "summed": _added(dtype, "%w.word.{row}", "%v.{n}", "%sum.{row}.{n}")}
    sizes = {name: Template(str(text)).safe_substitute(sizes) for name, text in sizes.items()}

    def lines(text: str, **counts: int) -> str:
        return each(Template(text).substitute(sizes), row=_SCORE_ROWS if "half" in counts else _VALUE_ROWS, **counts)

    return Products(
        "i64 %portion",
        Template(_VECTORS_SCORES).substitute(
            sizes, queries=lines(_QUERY_ROW, half=2), products=lines(_VECTOR_SCORE, half=2),
            stored=lines(_STORE_SCORE, half=2)),
        Template(_VECTORS_VALUES).substitute(
            sizes, weights=lines(_WEIGHT_ROW, n=4), totals=lines(_TOTAL, n=4), products=lines(_VECTOR_SUM, n=4),
            added=lines(_ADD, n=4),
            done=lines(_ROW_DONE + (_DIVIDED if dtype == torch.bfloat16 else _AS_IT_IS) + _STORE_VALUE, n=4)),
        _DECLARED[dtype])


def _added(dtype: torch.dtype, x: str, words: str, so_far: str) -> str:
    """``so_far`` and the products of a vector's words with those of x."""
    if dtype == torch.float32:
        return f"call $V @llvm.fma.v16f32($V {x}, $V {words}, $V {so_far})"
    return f"call $V @llvm.x86.avx512bf16.dpbf16ps.512($V {so_far}, $N {x}, $N {words})"


_TILES_DECLARED = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)
"""
_TILES_SCORES = """
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
"""
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
_TILES_VALUES = """
part:
  %part.number = phi i64 [0, %weighed], [%part.next, %part.end]
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

_DECLARED = {
    torch.float32: "declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)",
    torch.bfloat16: "declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512("
                    "<16 x float>, <32 x bfloat>, <32 x bfloat>)"}
_VECTORS_SCORES = """
score:
  %b.0 = phi i64 [0, %begin], [%b.0.next, %score.end]
  %k.half.0 = getelementptr [2 x [$words x [64 x i8]]], ptr %k.begin, i64 %b.0
  %k.half.1 = getelementptr [$words x [64 x i8]], ptr %k.half.0, i64 1
  %score.at = getelementptr [128 x i8], ptr %weights, i64 %b.0
  br label %score.rows

score.rows:
  %score.row = phi i64 [0, %score], [%score.row.next, %scored]
  $queries
  br label %score.word

score.word:
  %word.0 = phi i64 [0, %score.rows], [%word.0.next, %score.word]
  $products
  %word.0.next = add i64 %word.0, 1
  %word.0.more = icmp ult i64 %word.0.next, $words
  br i1 %word.0.more, label %score.word, label %scored

scored:
  $stored
  %score.row.next = add i64 %score.row, $score_rows
  %score.row.more = icmp ult i64 %score.row.next, 16
  br i1 %score.row.more, label %score.rows, label %score.end

score.end:
  %b.0.next = add i64 %b.0, 1
  %b.0.more = icmp ult i64 %b.0.next, %look
  br i1 %b.0.more, label %score, label %rows
"""
_QUERY_ROW = """
  %q.number.{row} = add i64 %score.row, {row}
  %q.offset.{row} = mul i64 %q.number.{row}, %q.row
  %q.{row} = getelementptr i8, ptr %q.at, i64 %q.offset.{row}
  %to.offset.{row} = mul i64 %q.number.{row}, %row.bytes
  %to.{row} = getelementptr i8, ptr %score.at, i64 %to.offset.{row}
"""
_VECTOR_SCORE = """
  %score.{row}.{half} = phi $V [zeroinitializer, %score.rows], [%score.{row}.{half}.next, %score.word]
  %k.at.{half} = getelementptr [64 x i8], ptr %k.half.{half}, i64 %word.0
  %k.{half} = load $N, ptr %k.at.{half}, align 64
  %q.at.{row} = getelementptr i32, ptr %q.{row}, i64 %word.0
  %q.bits.{row} = load i32, ptr %q.at.{row}, align 2
  %q.first.{row} = insertelement <16 x i32> poison, i32 %q.bits.{row}, i32 0
  %q.each.{row} = shufflevector <16 x i32> %q.first.{row}, <16 x i32> poison, <16 x i32> zeroinitializer
  %q.word.{row} = bitcast <16 x i32> %q.each.{row} to $N
  %score.{row}.{half}.next = $scored
"""
_STORE_SCORE = """
  %to.{row}.{half} = getelementptr [64 x i8], ptr %to.{row}, i64 {half}
  store $V %score.{row}.{half}.next, ptr %to.{row}.{half}, align 64
"""
_VECTORS_VALUES = """
part:
  %part.number = phi i64 [0, %weighed], [%part.next, %part.end]
  %v.part = getelementptr [4 x [$tile x i8]], ptr %v.begin, i64 %part.number
  %y.part = getelementptr [4 x [$bytes x i8]], ptr %y.at, i64 %part.number
  %all.words = mul i64 %look, $block
  br label %value.rows

value.rows:
  %value.row = phi i64 [0, %part], [%value.row.next, %value.done]
  $weights
  br label %portion.begin

portion.begin:
  %from = phi i64 [0, %value.rows], [%until, %portion.end]
  $totals
  %until.whole = add i64 %from, %portion
  %is.short = icmp ult i64 %all.words, %until.whole
  %until = select i1 %is.short, i64 %all.words, i64 %until.whole
  br label %value.word

value.word:
  %word.1 = phi i64 [%from, %portion.begin], [%word.1.next, %value.word]
  $products
  %word.1.next = add i64 %word.1, 1
  %word.1.more = icmp ult i64 %word.1.next, %until
  br i1 %word.1.more, label %value.word, label %portion.end

portion.end:
  $added
  %portion.more = icmp ult i64 %until, %all.words
  br i1 %portion.more, label %portion.begin, label %value.done

value.done:
  $done
  %value.row.next = add i64 %value.row, $value_rows
  %value.row.more = icmp ult i64 %value.row.next, 16
  br i1 %value.row.more, label %value.rows, label %part.end

part.end:
  %part.next = add i64 %part.number, 1
  %part.more = icmp ult i64 %part.next, $parts
  br i1 %part.more, label %part, label %end
"""
_WEIGHT_ROW = """
  %w.number.{row} = add i64 %value.row, {row}
  %w.offset.{row} = mul i64 %w.number.{row}, %row.bytes
  %w.{row} = getelementptr i8, ptr %weights, i64 %w.offset.{row}
"""
_TOTAL = """
  %total.{row}.{n} = phi $V [zeroinitializer, %value.rows], [%total.{row}.{n}.next, %portion.end]
"""
_VECTOR_SUM = """
  %sum.{row}.{n} = phi $V [zeroinitializer, %portion.begin], [%sum.{row}.{n}.next, %value.word]
  %block.number = lshr i64 %word.1, $bits
  %in.block = and i64 %word.1, $less_one
  %v.block = getelementptr [$sixteens x [$tile x i8]], ptr %v.part, i64 %block.number
  %v.word = getelementptr [64 x i8], ptr %v.block, i64 %in.block
  %v.at.{n} = getelementptr [$tile x i8], ptr %v.word, i64 {n}
  %v.{n} = load $N, ptr %v.at.{n}, align 64
  %w.at.{row} = getelementptr i32, ptr %w.{row}, i64 %word.1
  %w.bits.{row} = load i32, ptr %w.at.{row}, align 4
  %w.first.{row} = insertelement <16 x i32> poison, i32 %w.bits.{row}, i32 0
  %w.each.{row} = shufflevector <16 x i32> %w.first.{row}, <16 x i32> poison, <16 x i32> zeroinitializer
  %w.word.{row} = bitcast <16 x i32> %w.each.{row} to $N
  %sum.{row}.{n}.next = $summed
"""
_ADD = """
  %total.{row}.{n}.next = fadd $V %total.{row}.{n}, %sum.{row}.{n}.next
"""
_ROW_DONE = """
  %y.offset.{row} = mul i64 %w.number.{row}, %y.row
  %y.{row} = getelementptr i8, ptr %y.part, i64 %y.offset.{row}
"""
_AS_IT_IS = """
  %whole.{row}.{n} = bitcast $V %total.{row}.{n}.next to $V
"""
_DIVIDED = """
  %y.share.at.{row} = getelementptr float, ptr %shares, i64 %w.number.{row}
  %y.share.{row} = load float, ptr %y.share.at.{row}
  %y.share.first.{row} = insertelement $V poison, float %y.share.{row}, i32 0
  %y.share.each.{row} = shufflevector $V %y.share.first.{row}, $V poison, <16 x i32> zeroinitializer
  %whole.{row}.{n} = fmul $V %total.{row}.{n}.next, %y.share.each.{row}
"""
_STORE_VALUE = """
  %rounded.{row}.{n} = $round $V %whole.{row}.{n} to <16 x $T>
  %y.at.{row}.{n} = getelementptr [$bytes x i8], ptr %y.{row}, i64 {n}
  store <16 x $T> %rounded.{row}.{n}, ptr %y.at.{row}.{n}, align 2
"""

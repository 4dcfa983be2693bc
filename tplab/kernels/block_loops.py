"""Products of many rows in bfloat16 by the processor's tiles (AMX), in LLVM's language: see ``stream.py``.

A block of 32 rows meets a panel of 32 outputs: in each step two tiles of x and two of the weight are read, and make
four products, whose sums stay in four more tiles::

    for panel in panels:
        for part in parts of the inputs:  # of the panel, it stays in the first-level cache for all blocks
            for block in blocks of the rows:
                sums[block] += sum(x[block, step] * panel[step] for step in part)
"""

from collections.abc import Callable
from functools import lru_cache
from string import Template

from tplab.kernels.compiled import each, shared
from tplab.kernels.panel_loops import TILE

BLOCK = 2 * TILE  # rows
PART = 144  # pairs of inputs: 18 KB of the weight, and as much of x, stay in the first-level cache


@lru_cache
def by_blocks(vectors: int, stride: int, ahead: int) -> Callable:
    """A function of

    * ``panels``, as in :mod:`tplab.kernels.panel_loops`, of one or two vectors;
    * how many rows, at least ``BLOCK``: the last block begins so far before the end, and computes some of them again;
    * ``x`` and ``y``, both bfloat16, with the bytes from row to row;
    * what is added to each output, in float32; a tile configuration.

    Its units are the panels. With each block of rows, memory is asked for ``ahead`` rows of each of the next panel's
    tiles.
    """
    sizes = {"stride": stride, "bytes": 64 * vectors, "part": PART}

    def lines(text: str, **counts: int) -> str:
        return Template(each(text, **counts)).substitute(sizes)

    tiles = [(half, vector) for half in range(2) for vector in range(vectors)]

    def of_tiles(text: str) -> str:
        return "".join(Template(text).substitute(sizes, half=half, vector=vector, sum=2 * half + vector)
                       for half, vector in tiles)

    return shared(_LOOPS.substitute(
        sizes, ahead=ahead, asked=lines(_ASK, row=ahead, vector=vectors), zeros=of_tiles(_ZERO),
        places=of_tiles(_PLACE), loaded=of_tiles(_LOAD), read=lines(_READ, vector=vectors),
        products=of_tiles(_PRODUCT), kept=of_tiles(_KEEP), written=lines(_WRITE, vector=vectors)))


_LOOPS = Template("""
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8)
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)

define internal void @work(ptr %panels, i64 %rows, ptr %x, i64 %x_row, ptr %y, i64 %y_row, ptr %added,
                           ptr %tile_config, i64 %first, i64 %end) {
begin:
  call void @llvm.x86.ldtilecfg(ptr %tile_config)
  %last = sub i64 %rows, 32
  %rows.up = add i64 %rows, 31
  %blocks = udiv i64 %rows.up, 32
  %all.sums = alloca [32 x [$bytes x i8]], i64 %blocks, align 64
  br label %panel

panel:
  %n = phi i64 [%first, %begin], [%n.next, %panel.end]
  %entry = getelementptr [4 x i64], ptr %panels, i64 %n
  %entry.steps = getelementptr i64, ptr %entry, i64 1
  %entry.x = getelementptr i64, ptr %entry, i64 2
  %entry.y = getelementptr i64, ptr %entry, i64 3
  %entry.next = getelementptr i64, ptr %entry, i64 4
  %weight = load ptr, ptr %entry
  %steps = load i64, ptr %entry.steps
  %x.begin = load i64, ptr %entry.x
  %added.begin = load i64, ptr %entry.y
  %next = load ptr, ptr %entry.next
  %x.panel = getelementptr i8, ptr %x, i64 %x.begin
  %added.panel = getelementptr i8, ptr %added, i64 %added.begin
  %y.begin = lshr i64 %added.begin, 1
  %y.panel = getelementptr i8, ptr %y, i64 %y.begin
  br label %part.begin

part.begin:
  %k.first = phi i64 [0, %panel], [%k.wanted, %part.end]
  %is.first = icmp eq i64 %k.first, 0
  %k.wanted = add i64 %k.first, $part
  %is.last = icmp uge i64 %k.wanted, %steps
  %k.end = select i1 %is.last, i64 %steps, i64 %k.wanted
  br label %block

block:
  %b = phi i64 [0, %part.begin], [%b.next, %block.end]
  %sums = getelementptr [32 x [$bytes x i8]], ptr %all.sums, i64 %b
  %wanted = mul i64 %b, 32
  %inside = icmp ult i64 %wanted, %last
  %row = select i1 %inside, i64 %wanted, i64 %last
  %x.offset = mul i64 %row, %x_row
  %x.half = mul i64 %x_row, 16
  %x.0 = getelementptr i8, ptr %x.panel, i64 %x.offset
  %x.1 = getelementptr i8, ptr %x.0, i64 %x.half
  %y.offset = mul i64 %row, %y_row
  %y.block = getelementptr i8, ptr %y.panel, i64 %y.offset
  %asked = mul i64 %b, $ahead
  %next.block = getelementptr [$stride x i8], ptr %next, i64 %asked
  $places
  br i1 %is.first, label %nothing, label %so.far

nothing:
  $zeros
  br label %step

so.far:
  $loaded
  br label %step

step:
  %k = phi i64 [%k.first, %nothing], [%k.first, %so.far], [%k.next, %step]
  %now = getelementptr [$stride x i8], ptr %weight, i64 %k
  %later = getelementptr [$stride x i8], ptr %next.block, i64 %k
  $asked
  %x.at.0 = getelementptr i32, ptr %x.0, i64 %k
  %x.at.1 = getelementptr i32, ptr %x.1, i64 %k
  call void @llvm.x86.tileloadd64(i8 4, ptr %x.at.0, i64 %x_row)
  $read
  call void @llvm.x86.tileloadd64(i8 5, ptr %x.at.1, i64 %x_row)
  $products
  %k.next = add i64 %k, 16
  %k.more = icmp ult i64 %k.next, %k.end
  br i1 %k.more, label %step, label %block.sums

block.sums:
  $kept
  br i1 %is.last, label %write, label %block.end

write:
  %r = phi i64 [0, %block.sums], [%r.next, %write]
  %sums.row = getelementptr [$bytes x i8], ptr %sums, i64 %r
  %y.row.offset = mul i64 %r, %y_row
  %y.row = getelementptr i8, ptr %y.block, i64 %y.row.offset
  $written
  %r.next = add i64 %r, 1
  %r.more = icmp ult i64 %r.next, 32
  br i1 %r.more, label %write, label %block.end

block.end:
  %b.next = add i64 %b, 1
  %b.more = icmp ult i64 %row, %last
  br i1 %b.more, label %block, label %part.end

part.end:
  br i1 %is.last, label %panel.end, label %part.begin

panel.end:
  %n.next = add i64 %n, 1
  %n.more = icmp ult i64 %n.next, %end
  br i1 %n.more, label %panel, label %done

done:
  call void @llvm.x86.tilerelease()
  ret void
}
""")
_ZERO = "call void @llvm.x86.tilezero(i8 $sum)\n"
_ASK = """
  %later.{row} = getelementptr [$stride x i8], ptr %later, i64 {row}
  %line.{row}.{vector} = getelementptr [64 x i8], ptr %later.{row}, i64 {vector}
  call void @llvm.prefetch.p0(ptr %line.{row}.{vector}, i32 0, i32 2, i32 1)
"""
_READ = """
  %w.{vector} = getelementptr [64 x i8], ptr %now, i64 {vector}
  call void @llvm.x86.tileloadd64(i8 add (i8 6, i8 {vector}), ptr %w.{vector}, i64 $stride)
"""
_PRODUCT = "call void @llvm.x86.tdpbf16ps(i8 $sum, i8 add (i8 4, i8 $half), i8 add (i8 6, i8 $vector))\n"
_PLACE = """
  %sums.half.$sum = getelementptr [16 x [$bytes x i8]], ptr %sums, i64 $half
  %sums.at.$sum = getelementptr [64 x i8], ptr %sums.half.$sum, i64 $vector
"""
_LOAD = "call void @llvm.x86.tileloadd64(i8 $sum, ptr %sums.at.$sum, i64 $bytes)\n"
_KEEP = """
  call void @llvm.x86.tilestored64(i8 $sum, ptr %sums.at.$sum, i64 $bytes)
"""
_WRITE = """
  %sum.at.{vector} = getelementptr <16 x float>, ptr %sums.row, i64 {vector}
  %sum.{vector} = load <16 x float>, ptr %sum.at.{vector}, align 64
  %added.at.{vector} = getelementptr <16 x float>, ptr %added.panel, i64 {vector}
  %added.{vector} = load <16 x float>, ptr %added.at.{vector}, align 4
  %whole.{vector} = fadd <16 x float> %sum.{vector}, %added.{vector}
  %y.{vector} = fptrunc <16 x float> %whole.{vector} to <16 x bfloat>
  %y.at.{vector} = getelementptr <16 x bfloat>, ptr %y.row, i64 {vector}
  store <16 x bfloat> %y.{vector}, ptr %y.at.{vector}, align 2
"""

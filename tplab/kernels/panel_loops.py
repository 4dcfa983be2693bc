"""The loops of :mod:`tplab.kernels.stream`, in LLVM's language: over vectors of AVX-512, or over tiles of AMX.

Each is a function of

* ``panels``: for each panel the address of its weight, its steps, and the bytes from x to its first input and from y to
  its first output, in float32; behind the last one, one more address;
* ``each``: panels that have the same outputs, one behind the other;
* ``rows`` of a pass, ``passes``; ``shares`` into which the passes of such panels are dealt out: each is a unit;
* ``x`` and ``y`` with the bytes from row to row; ``tile_config``;
* how many units there are, and how many threads share them.
"""

from collections.abc import Callable
from functools import lru_cache
from string import Template

import numpy as np
import torch

from tplab.kernels.compiled import NUMBERS, each, has, shared

TILE = 16  # rows of a tile, and outputs, and steps


_LOOPS = Template("""
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare i64 @llvm.umax.i64(i64, i64)
declare i64 @llvm.umin.i64(i64, i64)
$declared

define internal void @work(ptr %panels, i64 %each, i64 %rows, i64 %passes, i64 %shares, ptr %x, i64 %x_row, ptr %y,
                           i64 %y_row, ptr %tile_config, i64 %first, i64 %end) {
begin:
  %all.passes = mul i64 %passes, $parts
  $begin
  %x_rows = mul i64 %rows, %x_row
  %y_rows = mul i64 %rows, %y_row
  %first.unit = udiv i64 %first, %shares
  br label %unit

unit:
  %u = phi i64 [%first.unit, %begin], [%u.next, %unit.end]
  %u.next = add i64 %u, 1
  %shares.before = mul i64 %u, %shares
  %shares.then = mul i64 %u.next, %shares
  %share.first = call i64 @llvm.umax.i64(i64 %first, i64 %shares.before)
  %share.end = call i64 @llvm.umin.i64(i64 %end, i64 %shares.then)
  %s.first = sub i64 %share.first, %shares.before
  %s.end = sub i64 %share.end, %shares.before
  %c.first.times = mul i64 %s.first, %all.passes
  %c.end.times = mul i64 %s.end, %all.passes
  %c.first = udiv i64 %c.first.times, %shares
  %c.end = udiv i64 %c.end.times, %shares
  %n.first = mul i64 %u, %each
  %n.end = add i64 %n.first, %each
  br label %panel

panel:
  %n = phi i64 [%n.first, %unit], [%n.next, %panel.end]
  %entry = getelementptr [4 x i64], ptr %panels, i64 %n
  %entry.steps = getelementptr i64, ptr %entry, i64 1
  %entry.x = getelementptr i64, ptr %entry, i64 2
  %entry.y = getelementptr i64, ptr %entry, i64 3
  %entry.next = getelementptr i64, ptr %entry, i64 4
  %weight = load ptr, ptr %entry
  %steps = load i64, ptr %entry.steps
  %x.begin = load i64, ptr %entry.x
  %y.begin = load i64, ptr %entry.y
  %next = load ptr, ptr %entry.next
  %x.panel = getelementptr i8, ptr %x, i64 %x.begin
  %y.bytes = lshr i64 %y.begin, $halved
  %y.panel = getelementptr i8, ptr %y, i64 %y.bytes
  br label %pass

pass:
  %c = phi i64 [%c.first, %panel], [%c.next, %pass.done]
  %h = udiv i64 %c, %passes
  %p = urem i64 %c, %passes
  %h.bytes = mul i64 %h, $part
  %h.y.bytes = lshr i64 %h.bytes, $halved
  %weight.part = getelementptr i8, ptr %weight, i64 %h.bytes
  %y.part = getelementptr i8, ptr %y.panel, i64 %h.y.bytes
  %x.done = mul i64 %p, %x_rows
  %y.done = mul i64 %p, %y_rows
  %x.pass = getelementptr i8, ptr %x.panel, i64 %x.done
  %y.pass = getelementptr i8, ptr %y.part, i64 %y.done
  $start
  br label %step

step:
  %k = phi i64 [0, %pass], [%k.next, %step]
  $step
  %k.next = add i64 %k, $steps
  %k.more = icmp ult i64 %k.next, %steps
  br i1 %k.more, label %step, label %pass.end

pass.end:
  $finish
  br label %pass.done

pass.done:
  %c.next = add i64 %c, 1
  %c.more = icmp ult i64 %c.next, %c.end
  br i1 %c.more, label %pass, label %panel.end

panel.end:
  %n.next = add i64 %n, 1
  %n.more = icmp ult i64 %n.next, %n.end
  br i1 %n.more, label %panel, label %unit.end

unit.end:
  %u.more = icmp ult i64 %shares.then, %end
  br i1 %u.more, label %unit, label %done

done:
  $done
  ret void
}
""")

_VECTORS_START = """
  %x.{row}.offset = mul i64 %x_row, {row}
  %y.{row}.offset = mul i64 %y_row, {row}
  %x.{row} = getelementptr i8, ptr %x.pass, i64 %x.{row}.offset
  %y.{row} = getelementptr i8, ptr %y.pass, i64 %y.{row}.offset
  %ask.pass = mul i64 %ask.step, %steps
  %asked = mul i64 %c, %ask.pass
  %next.part = getelementptr i8, ptr %next, i64 %asked
"""
_VECTORS_SUMS = """
  %sum.{row}.{vector}.0 = phi <16 x float> [zeroinitializer, %pass], [%sum.{row}.{vector}.$steps, %step]
"""
_VECTORS_STEP = """
  %k.$n = add i64 %k, $n
  %at.$n = mul i64 %k.$n, $stride
  %now.$n = getelementptr i8, ptr %weight.part, i64 %at.$n
  %ask.at.$n = mul i64 %k.$n, %ask.step
  %later.$n = getelementptr i8, ptr %next.part, i64 %ask.at.$n
  %line.$n.{line} = getelementptr <16 x float>, ptr %later.$n, i64 {line}
  call void @llvm.prefetch.p0(ptr %line.$n.{line}, i32 0, i32 2, i32 1)
  %w.$n.{vector}.at = getelementptr <16 x float>, ptr %now.$n, i64 {vector}
  %w.$n.{vector} = load $numbers, ptr %w.$n.{vector}.at, align 4
  %x.$n.{row}.at = getelementptr i32, ptr %x.{row}, i64 %k.$n
  %x.$n.{row}.bits = load i32, ptr %x.$n.{row}.at
  %x.$n.{row}.first = insertelement <16 x i32> poison, i32 %x.$n.{row}.bits, i32 0
  %x.$n.{row}.each = shufflevector <16 x i32> %x.$n.{row}.first, <16 x i32> poison, <16 x i32> zeroinitializer
  %x.$n.{row}.k = bitcast <16 x i32> %x.$n.{row}.each to $numbers
  %sum.{row}.{vector}.$next = $add
"""
_ADD = """
  %y.{row}.{vector}.at = getelementptr <16 x float>, ptr %y.{row}, i64 {vector}
  %y.{row}.{vector} = load <16 x float>, ptr %y.{row}.{vector}.at, align 4
  %y.{row}.{vector}.next = fadd <16 x float> %y.{row}.{vector}, %sum.{row}.{vector}.$steps
  store <16 x float> %y.{row}.{vector}.next, ptr %y.{row}.{vector}.at, align 4
"""
_STORE = """
  %y.{row}.{vector}.to = getelementptr <16 x $T>, ptr %y.{row}, i64 {vector}
  %y.{row}.{vector}.alone = $round <16 x float> %sum.{row}.{vector}.$steps to <16 x $T>
  store <16 x $T> %y.{row}.{vector}.alone, ptr %y.{row}.{vector}.to, align 2
"""
_BEGIN = f"""
  %is.first = icmp eq i64 %x.begin, 0
  br i1 %is.first, label %store, label %add

store:{_STORE}
  br label %pass.done

add:{_ADD}
"""
_VECTORS_FINISH = {"add": _ADD, "begin": _BEGIN, "round": _STORE}
_VECTORS_OF = {
    torch.float32: {
        "numbers": "<16 x float>",
        "declared": "declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)",
        "add": "call <16 x float> @llvm.fma.v16f32("
               "<16 x float> %w.$n.{vector}, <16 x float> %x.$n.{row}.k, <16 x float> %sum.{row}.{vector}.$n)"},
    torch.bfloat16: {
        "numbers": "<32 x bfloat>",
        "declared": "declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512("
                    "<16 x float>, <32 x bfloat>, <32 x bfloat>)",
        "add": "call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512("
               "<16 x float> %sum.{row}.{vector}.$n, <32 x bfloat> %w.$n.{vector}, <32 x bfloat> %x.$n.{row}.k)"}}


@lru_cache
def by_vectors(dtype: torch.dtype, vectors: int, parts: int, stride: int, rows: int, lines: int, finish: str,
               steps: int = 1) -> Callable:
    """The loops over panels of so many ``parts``, each of so many vectors; so many rows and ``steps`` at once.

    Each pass of each part asks for its share of the next panel's memory, one line behind the other, as memory likes to
    be read: so many ``lines`` in each step. ``finish``: ``"add"`` adds the sums to y; ``"begin"`` does so too, but
    whatever stands in y before an output's first sum is no matter; ``"round"`` makes y, in bfloat16, of one sum each.
    """
    holes = {"stride": stride, "steps": steps, **_VECTORS_OF[dtype],
             **NUMBERS[torch.bfloat16 if finish == "round" else torch.float32]}

    def written(text: str, **step: int) -> str:
        add = Template(holes["add"]).safe_substitute(step)
        return each(Template(text).substitute(holes | step | {"add": add}), row=rows, vector=vectors, line=lines)

    step = "".join(written(_VECTORS_STEP, n=n, next=n + 1) for n in range(steps))
    return shared(_LOOPS.substitute(
        declared=holes["declared"], begin=f"%ask.step = udiv i64 {stride}, %all.passes", start=written(_VECTORS_START),
        step=written(_VECTORS_SUMS) + step, steps=steps, finish=written(_VECTORS_FINISH[finish]), done="",
        halved=int(finish == "round"), parts=parts, part=64 * vectors))


_TILES_DECLARED = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tileloadd64(i8, ptr, i64)
declare void @llvm.x86.tilestored64(i8, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8, i8, i8)
"""
_TILES_START = """
  %y.{vector} = getelementptr <16 x float>, ptr %y.pass, i64 {vector}
  call void @llvm.x86.tileloadd64(i8 {vector}, ptr %y.{vector}, i64 %y_row)
"""
_TILES_STEP = """
  %at = mul i64 %k, $stride
  %now = getelementptr i8, ptr %weight, i64 %at
  %later = getelementptr i8, ptr %next, i64 %at
  %later.{step} = getelementptr [$stride x i8], ptr %later, i64 {step}
  %line.{step}.{vector} = getelementptr <16 x float>, ptr %later.{step}, i64 {vector}
  call void @llvm.prefetch.p0(ptr %line.{step}.{vector}, i32 0, i32 2, i32 1)
  %x.at = getelementptr i32, ptr %x.pass, i64 %k
  call void @llvm.x86.tileloadd64(i8 3, ptr %x.at, i64 %x_row)
  %w.{vector} = getelementptr <16 x float>, ptr %now, i64 {vector}
  call void @llvm.x86.tileloadd64(i8 add (i8 4, i8 {vector}), ptr %w.{vector}, i64 $stride)
  call void @llvm.x86.tdpbf16ps(i8 {vector}, i8 3, i8 add (i8 4, i8 {vector}))
"""
_TILES_FINISH = """
  call void @llvm.x86.tilestored64(i8 {vector}, ptr %y.{vector}, i64 %y_row)
"""


@lru_cache
def by_tiles(vectors: int, stride: int) -> Callable:
    """The loops over panels of so many vectors in bfloat16, up to 16 rows at once.

    The tiles 0 to 2 are of y, 3 of x, 4 to 6 of the weight.
    """
    start, step, finish = (each(Template(text).substitute(stride=stride), vector=vectors, step=TILE)
                           for text in (_TILES_START, _TILES_STEP, _TILES_FINISH))
    return shared(_LOOPS.substitute(
        declared=_TILES_DECLARED, begin="call void @llvm.x86.ldtilecfg(ptr %tile_config)", start=start, step=step,
        halved=0, parts=1, part=0, steps=TILE, finish=finish, done="call void @llvm.x86.tilerelease()"))


@lru_cache
def tile_config(rows: int) -> np.ndarray:
    """What ``ldtilecfg`` reads: eight tiles of 64 bytes a row; the first four have so many rows, the others all 16."""
    config = np.zeros(64, np.uint8)
    config[0] = 1  # the only palette there is
    config[16:32].view(np.uint16)[:] = 64
    config[48:56] = [rows] * 4 + [TILE] * 4
    return config


@lru_cache
def multiplies_tiles() -> bool:
    """AMX, which Linux gives to processes that ask for it."""
    return has("amx-bf16") and torch.cpu._init_amx()

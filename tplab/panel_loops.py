"""The loops of :mod:`tplab.stream`, in LLVM's language: over vectors of AVX-512, or over tiles of AMX.

Each is a function of

* ``panels``: for each panel the address of its weight, its steps, and the bytes from x to its first input and from y to
  its first output; behind the last one, one more address;
* ``units``, ``each``: how many there are: ``each`` panels have the same outputs, one behind the other;
* ``rows`` of a pass, ``passes``; ``x`` and ``y`` with the bytes from row to row; ``tile_config``;
* ``threads``, which share the units.
"""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from string import Template

import llvmlite.binding as llvm
import numpy as np
import torch

from tplab.compiled import compiled, each, has

TILE = 16  # rows of a tile, and outputs, and steps


_LOOPS = Template("""
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
$declared

define internal void @multiply(ptr %panels, i64 %count, i64 %rows, i64 %passes, ptr %x, i64 %x_row, ptr %y, i64 %y_row,
                               ptr %tile_config) {
begin:
  %nothing = icmp eq i64 %count, 0
  br i1 %nothing, label %return, label %start

start:
  $begin
  %x_rows = mul i64 %rows, %x_row
  %y_rows = mul i64 %rows, %y_row
  br label %panel

panel:
  %n = phi i64 [0, %start], [%n.next, %panel.end]
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
  %y.panel = getelementptr i8, ptr %y, i64 %y.begin
  br label %pass

pass:
  %p = phi i64 [0, %panel], [%p.next, %pass.end]
  %x.done = mul i64 %p, %x_rows
  %y.done = mul i64 %p, %y_rows
  %x.pass = getelementptr i8, ptr %x.panel, i64 %x.done
  %y.pass = getelementptr i8, ptr %y.panel, i64 %y.done
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
  %p.next = add i64 %p, 1
  %p.more = icmp ult i64 %p.next, %passes
  br i1 %p.more, label %pass, label %panel.end

panel.end:
  %n.next = add i64 %n, 1
  %n.more = icmp ult i64 %n.next, %count
  br i1 %n.more, label %panel, label %end

end:
  $end
  br label %return

return:
  ret void
}
$around
""")

_GIVEN = [argument.split() for argument in (
    "ptr panels, i64 units, i64 each, i64 rows, i64 passes, ptr x, i64 x_row, ptr y, i64 y_row, ptr tile_config".split(
        ", "))]
_AROUND = Template("""
$declared
define internal void @part(ptr %given) {
  $loads
  %number = $number
  %number.next = add i32 %number, 1
  %threads = $threads
  %n = zext i32 %number to i64
  %n.next = zext i32 %number.next to i64
  %n.all = zext i32 %threads to i64
  %begin.times = mul i64 %n, %units
  %begin.unit = udiv i64 %begin.times, %n.all
  %begin = mul i64 %begin.unit, %each
  %end.times = mul i64 %n.next, %units
  %end.unit = udiv i64 %end.times, %n.all
  %end = mul i64 %end.unit, %each
  %count = sub i64 %end, %begin
  %first = getelementptr [4 x i64], ptr %panels, i64 %begin
  call void @multiply(ptr %first, i64 %count, i64 %rows, i64 %passes, ptr %x, i64 %x_row, ptr %y, i64 %y_row,
                      ptr %tile_config)
  ret void
}

define void @product($parameters, i64 %threads) {
  %given = alloca [16 x i64]
  $stores
  %some = trunc i64 %threads to i32
  %alone = icmp eq i64 %threads, 1
  br i1 %alone, label %one, label %several

one:
  call void @part(ptr %given)
  ret void

several:
  $begin
  ret void
}
""")


@lru_cache
def shares() -> bool:
    """Whether there are threads to share a product: those of torch's own OpenMP."""
    library = ctypes.CDLL(torch._C.__file__)
    names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
    if not all(hasattr(library, name) for name in names):
        return False
    for name in names:
        llvm.add_symbol(name, ctypes.cast(getattr(library, name), ctypes.c_void_p).value)
    return True


@lru_cache
def _around() -> str:
    """What is around the loops: what a thread of several does, of those that are there, and the function itself."""
    places = [f"%{name}.at = getelementptr i64, ptr %given, i64 {n}" for n, (_, name) in enumerate(_GIVEN)]
    calls = {"number": "call i32 @omp_get_thread_num()", "threads": "call i32 @omp_get_num_threads()",
             "begin": "call void @GOMP_parallel(ptr @part, ptr %given, i32 %some, i32 0)",
             "declared": "declare i32 @omp_get_thread_num()\ndeclare i32 @omp_get_num_threads()\n"
                         "declare void @GOMP_parallel(ptr, ptr, i32, i32)"}
    if not shares():
        calls = {"number": "add i32 0, 0", "threads": "add i32 0, 1", "begin": "", "declared": ""}
    return _AROUND.substitute(
        calls, parameters=", ".join(f"{kind} %{name}" for kind, name in _GIVEN),
        loads="\n".join(places + [f"%{name} = load {kind}, ptr %{name}.at" for kind, name in _GIVEN]),
        stores="\n".join(places + [f"store {kind} %{name}, ptr %{name}.at" for kind, name in _GIVEN]))


_VECTORS_START = """
  %x.{row}.offset = mul i64 %x_row, {row}
  %y.{row}.offset = mul i64 %y_row, {row}
  %x.{row} = getelementptr i8, ptr %x.pass, i64 %x.{row}.offset
  %y.{row} = getelementptr i8, ptr %y.pass, i64 %y.{row}.offset
  %asked = mul i64 %p, $ahead
  %next.pass = getelementptr <16 x float>, ptr %next, i64 %asked
"""
_VECTORS_STEP = """
  %sum.{row}.{vector} = phi <16 x float> [zeroinitializer, %pass], [%sum.{row}.{vector}.next, %step]
  %at = mul i64 %k, $stride
  %now = getelementptr i8, ptr %weight, i64 %at
  %later = getelementptr i8, ptr %next.pass, i64 %at
  %line.{line} = getelementptr <16 x float>, ptr %later, i64 {line}
  call void @llvm.prefetch.p0(ptr %line.{line}, i32 0, i32 2, i32 1)
  %w.{vector}.at = getelementptr <16 x float>, ptr %now, i64 {vector}
  %w.{vector} = load $numbers, ptr %w.{vector}.at, align 4
  %x.{row}.at = getelementptr i32, ptr %x.{row}, i64 %k
  %x.{row}.bits = load i32, ptr %x.{row}.at
  %x.{row}.first = insertelement <16 x i32> poison, i32 %x.{row}.bits, i32 0
  %x.{row}.each = shufflevector <16 x i32> %x.{row}.first, <16 x i32> poison, <16 x i32> zeroinitializer
  %x.{row}.k = bitcast <16 x i32> %x.{row}.each to $numbers
  %sum.{row}.{vector}.next = $add
"""
_VECTORS_FINISH = """
  %y.{row}.{vector}.at = getelementptr <16 x float>, ptr %y.{row}, i64 {vector}
  %y.{row}.{vector} = load <16 x float>, ptr %y.{row}.{vector}.at, align 4
  %y.{row}.{vector}.next = fadd <16 x float> %y.{row}.{vector}, %sum.{row}.{vector}.next
  store <16 x float> %y.{row}.{vector}.next, ptr %y.{row}.{vector}.at, align 4
"""
_VECTORS_OF = {
    torch.float32: {
        "numbers": "<16 x float>",
        "declared": "declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)",
        "add": "call <16 x float> @llvm.fma.v16f32("
               "<16 x float> %w.{vector}, <16 x float> %x.{row}.k, <16 x float> %sum.{row}.{vector})"},
    torch.bfloat16: {
        "numbers": "<32 x bfloat>",
        "declared": "declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512("
                    "<16 x float>, <32 x bfloat>, <32 x bfloat>)",
        "add": "call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512("
               "<16 x float> %sum.{row}.{vector}, <32 x bfloat> %w.{vector}, <32 x bfloat> %x.{row}.k)"}}


@lru_cache
def by_vectors(dtype: torch.dtype, vectors: int, stride: int, rows: int, ahead: int) -> Callable:
    """The loops over panels of so many vectors, so many rows at once.

    In each step, memory is asked for ``ahead`` vectors of the next panel's step: each pass asks for its part of it.
    """
    holes = {"stride": stride, "ahead": ahead, **_VECTORS_OF[dtype]}
    start, step, finish = (each(Template(text).substitute(holes), row=rows, vector=vectors, line=ahead)
                           for text in (_VECTORS_START, _VECTORS_STEP, _VECTORS_FINISH))
    return compiled(_LOOPS.substitute(declared=holes["declared"], begin="", start=start, step=step, steps=1,
                                      finish=finish, end="", around=_around()))


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
    return compiled(_LOOPS.substitute(
        declared=_TILES_DECLARED, begin="call void @llvm.x86.ldtilecfg(ptr %tile_config)", start=start, step=step,
        steps=TILE, finish=finish, end="call void @llvm.x86.tilerelease()", around=_around()))


@lru_cache
def tile_config(rows: int) -> np.ndarray:
    """What ``ldtilecfg`` reads: tiles of 64 bytes a row; x and y have so many rows, the weight's tiles all 16."""
    config = np.zeros(64, np.uint8)
    config[0] = 1  # the only palette there is
    config[16:32].view(np.uint16)[:7] = 64
    config[48:55] = [rows] * 4 + [TILE] * 3
    return config


@lru_cache
def multiplies_tiles() -> bool:
    """AMX, which Linux gives to processes that ask for it."""
    return has("amx-bf16") and torch.cpu._init_amx()

"""Products of few rows at the speed of memory: loops over a packed weight, compiled for this processor by LLVM.

With few rows a product takes as long as its weight takes to arrive. A library's product of a small weight spends as
much time on its call, and waits at the end of each page; these loops ask for the next panel's memory while they
multiply with this one's.

A *panel* is what MKL and oneDNN keep together of a packed weight: the numbers of 16, 32 or 48 outputs for the first
input (in bfloat16: for the first two), then for the next, and so on::

    for panel in panels:
        for some in passes over the rows:  # up to eight rows, whose sums stay in registers
            y[some, panel.outputs] += sum(x[some, step] * panel[step] for step in panel.steps)

Where the processor multiplies tiles of bfloat16 (AMX), 16 rows meet 16 outputs and 32 inputs in one instruction.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from string import Template
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from tplab.compiled import compiled, each, has

LANES = 16  # float32 numbers in a vector of 64 bytes
WIDTHS = 48, 32, 16  # outputs of a loop; 48, times eight rows, are as many sums as AVX-512 has registers for
ROWS_AT_ONCE = 8
TILE = 16  # rows of a tile, and outputs, and steps


class Panel(NamedTuple):
    """Where a part of a packed weight is.

    Attributes:
        address: of its first number.
        outputs: whose numbers stand together in each step.
        steps: inputs; in bfloat16, pairs of them. One follows the other.
        output, input: its first ones.
    """

    address: int
    outputs: int
    steps: int
    output: int
    input: int


class Stream:
    """One packed ``[out, in]`` weight as panels; made by :meth:`of`."""

    def __init__(self, panels: list[Panel], shape: tuple[int, int], dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype
        self.width = max(panel.output + panel.outputs for panel in panels)  # with the outputs that fill the last one
        # The last row twice: the last panel, too, asks for the next one's memory.
        self.tables = [(*kind, np.array([*rows, rows[-1]])) for kind, rows in _by_kind(panels, dtype).items()]
        self.plans = {}
        self.tiled = (dtype == torch.bfloat16 and all(panel.steps % TILE == 0 for panel in panels)
                      and _multiplies_tiles())

    @classmethod
    def of(cls, panels: Iterable[Panel], shape: tuple[int, int], dtype: torch.dtype) -> "Stream | None":
        """None where a panel has another form, or this processor no instruction for ``dtype``: with fewer registers
        than AVX-512 has, sums of eight rows would go to memory and back."""
        panels, pairs = list(panels), dtype == torch.bfloat16
        if any(panel.outputs % LANES for panel in panels) or pairs and shape[1] % 2:
            return None
        return cls(panels, shape, dtype) if has("avx512bf16" if pairs else "avx512f") else None

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [rows, in]`` → ``[rows, out]``; in bfloat16, each sum is rounded once."""
        plan, count = self._plan(len(x)), len(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        if count < plan.padded:
            x = F.pad(x, (0, 0, 0, plan.padded - count))
        y = torch.zeros(plan.padded, self.width)
        whole = y if y.shape == (count, self.shape[0]) else y[:count, :self.shape[0]]
        if bias is not None:
            whole.copy_(bias)
        for multiply, panels, number in plan.calls:
            multiply(panels, number, plan.rows, plan.passes, x.data_ptr(), x.stride(0) * x.itemsize, y.data_ptr(),
                     4 * self.width, plan.tile_config)
        return whole if self.dtype == torch.float32 else whole.bfloat16()

    def _plan(self, count: int) -> "_Plan":
        if count not in self.plans:
            tiled = self.tiled and count > 1
            passes = -(-count // (TILE if tiled else ROWS_AT_ONCE))
            rows = -(-count // passes)
            if not tiled:
                rows = 1 << (rows - 1).bit_length()  # 1, 2, 4 or 8: a loop is compiled for each
            calls = [(_by_tiles(vectors, stride) if tiled else
                      _by_vectors(self.dtype, vectors, stride, rows, ahead=-(-vectors // passes)),
                      table.ctypes.data, len(table) - 1) for vectors, stride, table in self.tables]
            self.plans[count] = _Plan(rows, passes, rows * passes, calls,
                                      _tile_config(rows).ctypes.data if tiled else None)
        return self.plans[count]


class _Plan(NamedTuple):
    """How so many rows are multiplied: what costs as much as a small product, and is the same each time."""

    rows: int  # of a pass
    passes: int
    padded: int
    calls: list[tuple[Callable, int, int]]  # loops, and where their panels stand, and how many
    tile_config: int | None


def _by_kind(panels: list[Panel], dtype: torch.dtype) -> dict[tuple[int, int], list]:
    """``{(vectors, bytes from step to step): [what the loops read of each panel]}``; wide ones are cut."""
    found = {}
    for panel in panels:
        widest = next(width for width in WIDTHS if panel.outputs % width == 0)
        for first in range(0, panel.outputs, widest):
            row = panel.address + 4 * first, panel.steps, dtype.itemsize * panel.input, 4 * (panel.output + first)
            found.setdefault((widest // LANES, 4 * panel.outputs), []).append(row)
    return found


_LOOPS = Template("""
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
$declared

define void @multiply(ptr %panels, i64 %count, i64 %rows, i64 %passes, ptr %x, i64 %x_row, ptr %y, i64 %y_row,
                      ptr %tile_config) {
begin:
  $begin
  %x_rows = mul i64 %rows, %x_row
  %y_rows = mul i64 %rows, %y_row
  br label %panel

panel:
  %n = phi i64 [0, %begin], [%n.next, %panel.end]
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
  ret void
}
""")

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
def _by_vectors(dtype: torch.dtype, vectors: int, stride: int, rows: int, ahead: int) -> Callable:
    """The loops over panels of so many vectors, so many rows at once.

    In each step, memory is asked for ``ahead`` vectors of the next panel's step: each pass asks for its part of it.
    """
    holes = {"stride": stride, "ahead": ahead, **_VECTORS_OF[dtype]}
    start, step, finish = (each(Template(text).substitute(holes), row=rows, vector=vectors, line=ahead)
                           for text in (_VECTORS_START, _VECTORS_STEP, _VECTORS_FINISH))
    return compiled(_LOOPS.substitute(declared=holes["declared"], begin="", start=start, step=step, steps=1,
                                       finish=finish, end=""))


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
def _by_tiles(vectors: int, stride: int) -> Callable:
    """The loops over panels of so many vectors in bfloat16, up to 16 rows at once.

    The tiles 0 to 2 are of y, 3 of x, 4 to 6 of the weight.
    """
    start, step, finish = (each(Template(text).substitute(stride=stride), vector=vectors, step=TILE)
                           for text in (_TILES_START, _TILES_STEP, _TILES_FINISH))
    return compiled(_LOOPS.substitute(
        declared=_TILES_DECLARED, begin="call void @llvm.x86.ldtilecfg(ptr %tile_config)", start=start, step=step,
        steps=TILE, finish=finish, end="call void @llvm.x86.tilerelease()"))


@lru_cache
def _tile_config(rows: int) -> np.ndarray:
    """What ``ldtilecfg`` reads: tiles of 64 bytes a row; x and y have so many rows, the weight's tiles all 16."""
    config = np.zeros(64, np.uint8)
    config[0] = 1  # the only palette there is
    config[16:32].view(np.uint16)[:7] = 64
    config[48:55] = [rows] * 4 + [TILE] * 3
    return config


@lru_cache
def _multiplies_tiles() -> bool:
    """AMX, which Linux gives to processes that ask for it."""
    return has("amx-bf16") and torch.cpu._init_amx()

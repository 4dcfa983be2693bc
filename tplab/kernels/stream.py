"""Products of few rows at the speed of memory: loops over a packed weight, compiled for this processor by LLVM.

With few rows a product takes as long as its weight takes to arrive. A library's product of a small weight spends as
much time on its call, and waits at the end of each page; these loops ask for the next panel's memory while they
multiply with this one's, one line behind the other: asked for in strides, memory is slower (a Zen 5, 16 rows: 19
instead of 26 GB/s).

A *panel* is what MKL and oneDNN keep together of a packed weight: the numbers of 16, 32 or 48 outputs for the first
input (in bfloat16: for the first two), then for the next, and so on::

    for panel in panels:
        for part in panel.outputs:  # up to 48
            for some in passes over the rows:  # up to eight rows; all these sums stay in registers
                y[some, part] += sum(x[some, step] * panel[step, part] for step in panel.steps)

Up to four rows may meet all 64 outputs of a panel at once.

Where the processor multiplies tiles of bfloat16 (AMX), 16 rows meet 16 outputs and 32 inputs in one instruction.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from tplab.kernels import panel_loops
from tplab.kernels.block_loops import BLOCK, by_blocks
from tplab.kernels.compiled import has
from tplab.kernels.panel_loops import TILE, tile_config

LANES = 16  # float32 numbers in a vector of 64 bytes
WIDTHS = 64, 48, 32, 16  # outputs of a loop
ROWS_AT_ONCE = 8  # they meet up to 48 outputs: as many sums as AVX-512 has registers for
FEW_ROWS = 4  # they meet 64
STEPS_AT_ONCE = 2  # of a prompt's rows, see ``Stream.takes_few``
TILED_WIDTHS = WIDTHS[1:]  # as many as there are tiles for
MOST_STREAMED = 32  # rows: more are multiplied in blocks where there are tiles
LONGEST_BLOCKED = 2048  # rows: 256 KB of sums stand on a thread's stack


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
    """One packed ``[out, in]`` weight as panels; made by :meth:`of`.

    Attributes:
        takes_few: whether a prompt's rows pass in fours, over 64 outputs and two steps at a time. They read the weight
            twice as often as in eights, but from a cache, and leave fewer rows to fill up (a Zen 5: 512 rows take 0.97
            times as long in float32, 0.98 to 1.02 in bfloat16; 100 rows 0.7 to 0.95).
    """

    def __init__(self, panels: list[Panel], shape: tuple[int, int], dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype
        self.width = max(panel.output + panel.outputs for panel in panels)  # with the outputs that fill the last one
        self.tiled = (dtype == torch.bfloat16 and all(panel.steps % TILE == 0 for panel in panels)
                      and panel_loops.multiplies_tiles())
        # The last row twice: the last panel, too, asks for the next one's memory.
        self.tables, self.tiled_tables = ([(*kind, np.array([*rows, rows[-1]])) for kind, rows
                                           in _by_kind(panels, dtype, widths).items()]
                                          for widths in (WIDTHS, TILED_WIDTHS))
        self.each = _each(panels)
        self.plans = {}
        self.takes_few = {panel.outputs for panel in panels} == {WIDTHS[0]} and all(
            panel.steps % STEPS_AT_ONCE == 0 for panel in panels)
        self.has_blocks = self.tiled and self.each == 1 and all(vectors <= 2 for vectors, *_ in self.tiled_tables)

    @classmethod
    def of(cls, panels: Iterable[Panel], shape: tuple[int, int], dtype: torch.dtype) -> "Stream | None":
        """None where a panel has another form, or this processor no instruction for ``dtype``: with fewer registers
        than AVX-512 has, sums of eight rows would go to memory and back."""
        panels, pairs = list(panels), dtype == torch.bfloat16
        if any(panel.outputs % LANES for panel in panels) or pairs and shape[1] % 2 or not _each(panels):
            return None
        return cls(panels, shape, dtype) if has("avx512bf16" if pairs else "avx512f") else None

    def suits(self, rows: int) -> bool:
        """Whether it multiplies more than ``MOST_STREAMED`` rows, and is quicker than oneDNN at so many.

        Measured on a Xeon with AMX: 64 rows take oneDNN 1.1 to 1.4 times as long; 512, 1.0 to 1.1 times where there are
        few outputs, which it does not share out among threads (1.6 to 2 times on two). With more outputs, or an x that
        does not stay in the second-level cache, it is the quicker one.
        """
        if not self.has_blocks or rows > LONGEST_BLOCKED:
            return False
        outputs, inputs = self.shape
        return rows <= 128 or outputs <= 1024 and rows * inputs <= torch.get_num_threads() << 19

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [rows, in]`` → ``[rows, out]``; in bfloat16, each sum is rounded once."""
        (count, _), (row, step) = x.shape, x.stride()  # len(x) is a function of Python's
        if count > MOST_STREAMED and self.has_blocks:
            return self._by_blocks(x if step == 1 else x.contiguous(), bias)
        plan = self.plans.get((count, bias is None)) or self._plan(count, bias is None)
        if step != 1 or count < plan.padded:
            x = F.pad(x, (0, 0, 0, plan.padded - count)).contiguous()
            row = x.stride(0)
        y = (torch.zeros if plan.finish == "add" else torch.empty)(plan.padded, self.width, dtype=plan.sums)
        whole = y if plan.is_whole else y[:count, :self.shape[0]]
        if bias is not None:
            whole.copy_(bias)
        threads = torch.get_num_threads()
        for multiply, panels, units, parts in plan.calls:
            shares = min(threads, parts * plan.passes)  # nine panels are more for one of two threads than for the other
            multiply(panels, self.each, plan.rows, plan.passes, shares, x.data_ptr(), row * self.dtype.itemsize,
                     y.data_ptr(), plan.sums.itemsize * self.width, plan.tile_config, units * shares, threads)
        return whole if plan.sums == self.dtype else whole.bfloat16()

    def _by_blocks(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        (count, _), outputs, added = x.shape, self.shape[0], torch.zeros(self.width)
        if bias is not None:
            added[:outputs] = bias
        y = x.new_empty(count, self.width)
        ahead = 1 << max(0, (TILE * BLOCK - 1) // count).bit_length()  # rows of a tile, for each block of rows
        for vectors, stride, table in self.tiled_tables:
            by_blocks(vectors, stride, ahead)(
                table.ctypes.data, count, x.data_ptr(), x.stride(0) * x.itemsize, y.data_ptr(), 2 * self.width,
                added.data_ptr(), tile_config(TILE).ctypes.data, len(table) - 1, torch.get_num_threads())
        return y[:, :outputs]

    def _plan(self, count: int, alone: bool) -> "_Plan":
        """For so many rows; ``alone`` if there is no bias."""
        tiled = self.tiled and count > 1
        by_few = self.takes_few and count > MOST_STREAMED
        passes = -(-count // (TILE if tiled else FEW_ROWS if by_few else ROWS_AT_ONCE))
        rows = -(-count // passes)
        if not tiled:
            rows = 1 << (rows - 1).bit_length()  # 1, 2, 4 or 8: a loop is compiled for each
        rounds = self.each == 1 and self.dtype == torch.bfloat16
        finish = "add" if tiled or not alone else "round" if rounds else "begin"
        calls = []
        for vectors, stride, table in self.tiled_tables if tiled else self.tables:
            parts = 2 if vectors == WIDTHS[0] // LANES and rows > FEW_ROWS else 1
            loop = panel_loops.by_tiles(vectors, stride) if tiled else panel_loops.by_vectors(
                self.dtype, vectors // parts, parts, stride, rows, -(-stride // (64 * parts * passes)), finish,
                STEPS_AT_ONCE if by_few else 1)
            calls.append((loop, table.ctypes.data, (len(table) - 1) // self.each, parts))
        plan = _Plan(
            rows, passes, rows * passes, (count, self.shape[0]) == (rows * passes, self.width), finish,
            torch.bfloat16 if finish == "round" else torch.float32, calls,
            panel_loops.tile_config(rows).ctypes.data if tiled else None)
        if count <= MOST_STREAMED:  # prompts have any length
            self.plans[count, alone] = plan
        return plan


class _Plan(NamedTuple):
    """How so many rows are multiplied: what costs as much as a small product, and is the same each time."""

    rows: int  # of a pass
    passes: int
    padded: int
    is_whole: bool  # no row and no output has been added
    finish: str  # what becomes of the sums, see :func:`tplab.kernels.panel_loops.by_vectors`
    sums: torch.dtype
    calls: list[tuple[Callable, int, int, int]]  # loops, where their panels stand, of how many units, in how many parts
    tile_config: int | None


def _each(panels: list[Panel]) -> int | None:
    """How many panels have the same outputs: threads that share a product must not meet in y. None if that differs."""
    counts = set(Counter(panel.output for panel in panels).values())
    return counts.pop() if len(counts) == 1 else None


def _by_kind(panels: list[Panel], dtype: torch.dtype, widths: tuple[int, ...]) -> dict[tuple[int, int], list]:
    """``{(vectors, bytes from step to step): [what the loops read of each panel]}``; wider ones are cut. Those that
    have the same outputs stand together."""
    found = {}
    for panel in panels:
        widest = next(width for width in widths if panel.outputs % width == 0)
        for first in range(0, panel.outputs, widest):
            row = panel.address + 4 * first, panel.steps, dtype.itemsize * panel.input, 4 * (panel.output + first)
            found.setdefault((widest // LANES, 4 * panel.outputs), []).append(row)
    return {kind: sorted(rows, key=itemgetter(3, 2)) for kind, rows in found.items()}

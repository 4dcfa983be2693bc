"""``x @ weight.T`` by panels: the product of every linear layer, and of attention's two.

A packed weight is stored in the order in which it is read. ``WIDTH`` outputs make a *panel*, ``[steps, WIDTH]``; a step
is one input in float32, and a pair of inputs in bfloat16, side by side in one 32-bit word (the format of bfloat16
products and of AMX). A panel is multiplied with four rows of ``x`` at a time, whose sums stay in registers. With many
rows, a panel is cut into pieces that stay in the processor's first-level cache (GotoBLAS, doi:10.1145/1356052.1356053).
"""

import numpy as np
import torch
from numba import types
from numba.extending import overload

from tplab.fast.compiled import inner
from tplab.fast.cpu import HAS_TILES
from tplab.fast.simd import (
    TILE_SHAPES,
    WIDTH,
    add_products,
    configure_tiles,
    load_tile,
    multiply_tiles,
    prefetch,
    release_tiles,
    store_sums,
    store_tile,
    zero_sums,
    zero_tile,
)

PIECE = 128  # steps of a panel that are multiplied with all rows before the next steps: 32 KB at most
ROWS = 512  # of x that are multiplied with a panel in the first-level cache; x itself comes from the second level
LINE = 16  # words of a cache line


def per_word(dtype: torch.dtype) -> int:
    """How many inputs a 32-bit word holds."""
    return {torch.float32: 1, torch.bfloat16: 2}[dtype]


def padded(inputs: int, dtype: torch.dtype) -> int:
    """Inputs of a packed weight, filled up with zeros to whole words; to whole tiles where there are tiles."""
    whole = 1 if dtype == torch.float32 else 32 if HAS_TILES else 2
    return -(-inputs // whole) * whole


def panels(outputs: int) -> int:
    """How many panels ``outputs`` need; the last one is filled up with zeros."""
    return -(-outputs // WIDTH)


def pack_weight(weight: torch.Tensor) -> np.ndarray:
    """``[outputs, inputs]`` in float32 or bfloat16 → ``[panels, steps, WIDTH]``, flat, as float32 numbers or uint32
    words."""
    outputs, inputs = weight.shape
    full = weight.new_zeros(panels(outputs) * WIDTH, padded(inputs, weight.dtype))
    full[:outputs, :inputs] = weight
    words = full if weight.dtype == torch.float32 else full.view(torch.int32)
    packed = words.view(-1, WIDTH, words.shape[1]).transpose(1, 2).contiguous().view(-1).numpy()
    return packed if weight.dtype == torch.float32 else packed.view(np.uint32)


def unpack_weight(packed: np.ndarray, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`pack_weight`."""
    steps = padded(inputs, dtype) // per_word(dtype)
    words = torch.from_numpy(packed if dtype == torch.float32 else packed.view(np.int32))
    full = words.view(-1, steps, WIDTH).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return full.view(-1, steps).view(dtype)[:outputs, :inputs].contiguous()


def linear(x, x_row, rows, steps, weight, at, panel, first, last, by, y, y_row):
    """Panels ``first``, ``first + by``, … before ``last`` of ``y = x @ weight.T``, in compiled code.

    All arrays are flat: ``x`` has ``rows`` rows, ``x_row`` words apart, of which ``steps`` are used; ``y`` float32
    rows, ``y_row`` numbers apart. The weight's panels begin at ``at`` and are ``panel`` words apart. With tiles, ``x``
    and ``y`` have memory for a multiple of 16 rows.
    """


@overload(linear)
def _linear(x, x_row, rows, steps, weight, at, panel, first, last, by, y, y_row):
    if weight.dtype == types.float32 or not HAS_TILES:
        return lambda x, x_row, rows, steps, weight, at, panel, first, last, by, y, y_row: linear_by_vectors(
            x, x_row, rows, steps, weight, at, panel, first, last, by, y, y_row)

    def choose(x, x_row, rows, steps, weight, at, panel, first, last, by, y, y_row):
        if rows == 1:
            linear_by_vectors(x, x_row, rows, steps, weight, at, panel, first, last, by, y, y_row)
        else:
            _by_tiles(x, x_row, rows, steps, weight, at, panel, first, last, by, y, y_row)
    return choose


@inner
def linear_by_vectors(x, x_row, rows, steps, weight, at, panel, first, last, by, y, y_row):
    """:func:`linear` without tiles: a sum's order does not depend on how many rows there are."""
    for top in range(0, rows, ROWS):
        bottom = min(rows, top + ROWS)
        for p in range(first, last, by):
            for k in range(0, steps, PIECE):
                end, begin, r = min(steps, k + PIECE), at + p * panel + k * WIDTH, top
                # The blocks of rows share the prefetches: a line of every step each, or more where they are few.
                ahead, line, by_line = by * panel, 0, LINE * min(WIDTH // LINE, (bottom - top + 3) // 4)
                while r + 4 <= bottom:
                    a, b, c, d = r, r + 1, r + 2, r + 3
                    _block(x, (a * x_row, b * x_row, c * x_row, d * x_row), k, end, weight, begin, ahead, line, by_line,
                           y, (a * y_row, b * y_row, c * y_row, d * y_row), p * WIDTH)
                    r, line = r + 4, line + LINE
                while r + 2 <= bottom:
                    _block(x, (r * x_row, (r + 1) * x_row), k, end, weight, begin, ahead, line, by_line,
                           y, (r * y_row, (r + 1) * y_row), p * WIDTH)
                    r, line = r + 2, line + LINE
                if r < bottom:
                    _block(x, (r * x_row,), k, end, weight, begin, ahead, line, by_line, y, (r * y_row,), p * WIDTH)


@inner
def _block(x, x_rows, first, end, weight, at, ahead, line, by_line, y, y_rows, column):
    """Multiply some rows with steps ``first`` to ``end`` of a panel; prefetch lines of the panel that is ``ahead``.

    Of each step, these are the line at ``line`` and every one ``by_line`` after it.
    """
    alone, twice = by_line == LINE, line + by_line < WIDTH
    sums = zero_sums(y_rows)
    for i in range(first, end):
        if alone and line == 0:
            for every in range(0, WIDTH, LINE):
                prefetch(weight, at + ahead + every)
        elif not alone and line < WIDTH:
            prefetch(weight, at + ahead + line)
            if twice:
                prefetch(weight, at + ahead + line + by_line)
        sums = add_products(sums, x, x_rows, i, weight, at)
        at += WIDTH
    store_sums(sums, y, y_rows, column, first == 0)


@inner
def _by_tiles(x, x_row, rows, steps, weight, at, panel, first, last, by, y, y_row):
    configure_tiles(TILE_SHAPES)
    x_bytes, y_bytes, w_bytes = 4 * x_row, 4 * y_row, 4 * WIDTH
    for p in range(first, last, by):
        for r in range(0, rows, 32):
            if r + 16 >= rows:  # 16 rows, four tiles of outputs
                zero_tile(0), zero_tile(1), zero_tile(2), zero_tile(3)
                w = at + p * panel
                for i in range(0, steps, 16):
                    if r == 0:
                        for line in range(0, 16 * WIDTH, LINE):
                            prefetch(weight, w + by * panel + line)
                    load_tile(4, x, r * x_row + i, x_bytes)
                    load_tile(5, weight, w, w_bytes), multiply_tiles(0, 4, 5)
                    load_tile(6, weight, w + 16, w_bytes), multiply_tiles(1, 4, 6)
                    load_tile(7, weight, w + 32, w_bytes), multiply_tiles(2, 4, 7)
                    load_tile(5, weight, w + 48, w_bytes), multiply_tiles(3, 4, 5)
                    w += 16 * WIDTH
                to = r * y_row + p * WIDTH
                store_tile(0, y, to, y_bytes), store_tile(1, y, to + 16, y_bytes)
                store_tile(2, y, to + 32, y_bytes), store_tile(3, y, to + 48, y_bytes)
            else:  # 32 rows, two tiles of outputs, twice
                for half in range(0, WIDTH, 32):
                    zero_tile(0), zero_tile(1), zero_tile(2), zero_tile(3)
                    w = at + p * panel + half
                    for i in range(0, steps, 16):
                        load_tile(4, x, r * x_row + i, x_bytes), load_tile(5, x, (r + 16) * x_row + i, x_bytes)
                        load_tile(6, weight, w, w_bytes), load_tile(7, weight, w + 16, w_bytes)
                        multiply_tiles(0, 4, 6), multiply_tiles(1, 4, 7)
                        multiply_tiles(2, 5, 6), multiply_tiles(3, 5, 7)
                        w += 16 * WIDTH
                    to = r * y_row + p * WIDTH + half
                    store_tile(0, y, to, y_bytes), store_tile(1, y, to + 16, y_bytes)
                    to += 16 * y_row
                    store_tile(2, y, to, y_bytes), store_tile(3, y, to + 16, y_bytes)
    release_tiles()

"""Attention of a prompt's queries in tiles of 16, by the processor's tiles (AMX) or by vectors (AVX-512).

In bfloat16, as in PyTorch's fused attention, scores and sums are float32, and weights are rounded to bfloat16 before
they meet the values, not divided yet by their sum. On two cores of a Xeon with AMX, a layer's 128 queries of nine heads
and 512 keys take it 0.17 ms, PyTorch 0.25. In float32 all is added up in the order in which MKL does it here, found out
by trying; where none of those known gives PyTorch's bits, there is no such loop.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn import functional as F

from tplab.kernels.compiled import threads_for
from tplab.kernels.paged_attention import attend_by_torch
from tplab.kernels.panel_loops import TILE, tile_config
from tplab.kernels.tiled_layout import KEYS, layout_loop
from tplab.kernels.tiled_loops import TiledLoop, tiled_loop

_LONGEST = 4096  # keys: 256 KB of scores stand on a thread's stack


class _Tiles(NamedTuple):
    """A mask in whole tiles of queries and blocks of keys.

    Attributes:
        hidden: ``[batch, queries, keys]``, filled up with True.
        looks: ``[batch, tiles]`` int64: how many blocks a tile of queries looks at; behind them, all is hidden.
    """

    hidden: torch.Tensor
    looks: torch.Tensor


class Tiled(NamedTuple):
    """The loops for one dtype and size of heads.

    Attributes:
        loop, lay_out: what they are made of.
        portion: of so many keys, how many values are added up at once; None in bfloat16: all.
        longest: keys.
    """

    loop: TiledLoop
    lay_out: Callable
    portion: Callable[[int], int] | None
    longest: int


def attend_tiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float
                 ) -> torch.Tensor | None:
    """Masked softmax attention of grouped queries: shapes as in :func:`tplab.model.attention.attend`.

    In float32 with the bits of :func:`tplab.kernels.paged_attention.attend_by_torch`. None where there are no such
    loops, for fewer queries than a tile has or too many keys, where a query sees nothing, and where a gradient is
    wanted.
    """
    (batch, _, queries, head_dim), keys = q.shape, k.shape[2]
    if not q.dtype == k.dtype == v.dtype or queries < TILE \
            or any(x.stride(3) != 1 or x.requires_grad for x in (q, k, v)) or not isinstance(scaling, int | float) \
            or mask.dtype != torch.bool or mask.shape != (batch, 1, queries, keys):
        return None
    tiled = tiled_for(q.dtype, head_dim)
    if tiled is None or keys > tiled.longest or (tiles := _tiles(mask)) is None:
        return None
    return _attended(tiled, q, k, v, tiles, scaling)


def _attended(tiled: Tiled, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: _Tiles, scaling: float
              ) -> torch.Tensor:
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    filled, blocks = tiles.looks.shape[1], tiles.hidden.shape[2] // KEYS
    laid = torch.empty(2, batch * kv_heads * blocks * KEYS * head_dim, dtype=q.dtype)
    if queries % TILE:
        q = F.pad(q, (0, 0, 0, -queries % TILE))
    y = q.new_empty(batch, q.shape[2], heads, head_dim).transpose(1, 2)
    threads = threads_for(q, keys)
    tiled.lay_out(*_placed(k), *_placed(v), kv_heads, keys, laid[0].data_ptr(), laid[1].data_ptr(), blocks,
                  batch * kv_heads * blocks, threads)
    how = tile_config(TILE).ctypes.data if tiled.loop.tiles else tiled.portion(keys) if tiled.portion else keys
    tiled.loop.attend(*_placed(q), *_placed(y), laid[0].data_ptr(), laid[1].data_ptr(), blocks,
                      tiles.hidden.data_ptr(), tiles.looks.data_ptr(), scaling * tiled.loop.scale, heads,
                      heads // kv_heads, filled, how, batch * heads * filled, threads)
    return y[:, :, :queries]


# How many values MKL adds up at once, of so many keys; the sums of portions are then added. With AVX-512 384, with AVX2
# (so on AMD's processors) 192; but half of the keys, if there are more than that, and no more than twice as many.
_PORTIONS = tuple(lambda keys, most=most, up=up: (keys + up) // 2 if most < keys <= 2 * most else most
                  for most in (384, 192) for up in (0, 1))
_TRIED = (16, 45, 192, 193, 250, 384, 385, 512, 768), (769, 1000, 1600)  # keys; only where all of the second give
_SHORTER = 768  # PyTorch's bits, more keys than these are taken


@lru_cache
def tiled_for(dtype: torch.dtype, head_dim: int) -> Tiled | None:
    """The loops; in float32 those that give PyTorch's bits here. None where there are none."""
    if (loop := tiled_loop(dtype, head_dim)) is None:
        return None
    found = Tiled(loop, layout_loop(dtype, head_dim), None, _LONGEST)
    if dtype == torch.bfloat16:
        return found
    for portion in _PORTIONS:
        if all(_has_torchs_bits(found := found._replace(portion=portion), head_dim, keys) for keys in _TRIED[0]):
            more = all(_has_torchs_bits(found, head_dim, keys) for keys in _TRIED[1])
            return found._replace(longest=_LONGEST if more else _SHORTER)
    return None


def _has_torchs_bits(tiled: Tiled, head_dim: int, keys: int) -> bool:
    """Of so many keys, the last ones' queries: of two heads that share them, and of one sequence of two."""
    generator = torch.Generator().manual_seed(keys)
    queries = min(keys, 2 * TILE + 1)
    q = 3 * torch.randn(2, 2, queries, head_dim, generator=generator)
    k, v = torch.randn(2, 2, 1, keys, head_dim, generator=generator)
    mask = torch.ones(2, 1, queries, keys, dtype=torch.bool).triu(1 + keys - queries)
    return torch.equal(_attended(tiled, q, k, v, _tiles(mask), 0.3), attend_by_torch(q, k, v, mask, 0.3))


def _placed(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Where it is, and how many bytes apart sequences, heads and rows are."""
    sequence, head, row, _ = x.stride()
    return x.data_ptr(), sequence * x.itemsize, head * x.itemsize, row * x.itemsize


def _tiles(mask: torch.Tensor) -> _Tiles | None:
    """None if a query sees nothing. Made in the first layer and kept with the mask: the other layers get the same."""
    if not hasattr(mask, "tiles"):
        batch, _, queries, keys = mask.shape
        hidden = F.pad(mask[:, 0], (0, -keys % KEYS, 0, -queries % TILE), value=True)
        seen = torch.where(hidden, 0, torch.arange(1, hidden.shape[2] + 1)).amax(2)
        looks = -(-seen.unflatten(1, (-1, TILE)).amax(2) // KEYS)
        mask.tiles = _Tiles(hidden, looks.contiguous()) if seen[:, :queries].all() else None
    return mask.tiles

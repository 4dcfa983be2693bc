"""Attention by tiles of 16 queries, in LLVM's language: see ``tiled_attention.py``.

A unit is a tile of one head of one sequence: its queries' scores of all keys that one of them sees; then, in the same
place, their weights (``tiled_weights.py``); then sums of values (for both: ``tiled_products.py``).
"""

from collections.abc import Callable
from functools import lru_cache
from string import Template
from typing import NamedTuple

import torch

from tplab.kernels import tiled_products, tiled_weights
from tplab.kernels.compiled import has, shared
from tplab.kernels.panel_loops import multiplies_tiles
from tplab.kernels.tiled_layout import BEGINS, KEYS


class TiledLoop(NamedTuple):
    """A loop, and what it wants to be given.

    Attributes:
        attend: a function of

            * queries, and what they attend to: where they are, and how many bytes apart sequences, heads and queries;
            * keys and values, laid out; how many blocks of keys there are;
            * ``[batch, queries, keys]`` bytes, 1 where a query must not look, in whole tiles and blocks;
            * ``[batch, tiles]`` int64: how many blocks a tile of queries looks at;
            * scaling times ``scale``; how many heads there are, and how many share a KV head; how many tiles of
              queries;
            * with ``tiles``, the address of a tile configuration; else, how many words of values are added up at once.

            A unit is a tile of one head of one sequence. A head's tiles 0, 2, 4, … come before 1, 3, 5, …: later ones
            see more keys, and threads that share a head in the middle have as much to do.
        scale: log2(e), or 1.
        tiles: whether it is AMX that multiplies.
    """

    attend: Callable
    scale: float
    tiles: bool


@lru_cache
def tiled_loop(dtype: torch.dtype, head_dim: int) -> TiledLoop | None:
    """None where there is none."""
    tiles = dtype == torch.bfloat16 and multiplies_tiles()
    feature = {torch.bfloat16: "avx512bf16", torch.float32: "avx512f"}.get(dtype)
    if head_dim % tiled_products.SUMS or feature is None or not (tiles or has(feature)):
        return None
    products = tiled_products.by_tiles(head_dim) if tiles else tiled_products.by_vectors(dtype, head_dim)
    weights = tiled_weights.in_bfloat16() if dtype == torch.bfloat16 else tiled_weights.in_float32()
    if weights is None:
        return None
    more = [line for line in products.declared.splitlines() if line not in weights.declared]
    attend = shared(_ATTEND.substitute(
        declared="\n".join([weights.declared, *more]), takes=f"{_TAKES}, {products.takes}", scores=products.scores,
        weights=weights.lines, values=products.values, block=KEYS * head_dim * dtype.itemsize,
        begin=tiles * "call void @llvm.x86.ldtilecfg(ptr %tile_config)",
        done=tiles * "call void @llvm.x86.tilerelease()"))
    return TiledLoop(attend, weights.scale, tiles)


_TAKES = ("ptr %q, i64 %q.sequence, i64 %q.head, i64 %q.row, ptr %y, i64 %y.sequence, i64 %y.head, i64 %y.row, "
          "ptr %k.laid, ptr %v.laid, i64 %blocks, ptr %mask, ptr %looks, float %scaling, i64 %heads, i64 %group, "
          "i64 %tiles")
_ATTEND = Template("""
$declared

define internal void @tile($takes, i64 %unit) {
begin:
  %odd.ones = lshr i64 %tiles, 1
  %n = urem i64 %unit, %tiles
  %even.ones = sub i64 %tiles, %odd.ones
  %n.odd = sub i64 %n, %even.ones
  %t.even = mul i64 %n, 2
  %t.before = mul i64 %n.odd, 2
  %t.odd = add i64 %t.before, 1
  %is.even = icmp ult i64 %n, %even.ones
  %t = select i1 %is.even, i64 %t.even, i64 %t.odd
  %head.all = udiv i64 %unit, %tiles
  %head = urem i64 %head.all, %heads
  %sequence = udiv i64 %head.all, %heads
  %kv.heads = udiv i64 %heads, %group
  %kv.first = mul i64 %sequence, %kv.heads
  %kv.head = udiv i64 %head, %group
  %kv.all = add i64 %kv.first, %kv.head
  %first.block = mul i64 %kv.all, %blocks
  %k.begin = getelementptr [$block x i8], ptr %k.laid, i64 %first.block
  %v.begin = getelementptr [$block x i8], ptr %v.laid, i64 %first.block
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

$scores
$weights
weighed:
  br label %part

$values
end:
  ret void
}

define internal void @work($takes, i64 %first, i64 %end) {
begin:
  $begin
  br label %tile

tile:
  %unit = phi i64 [%first, %begin], [%unit.next, %tile]
  call void @tile($takes, i64 %unit)
  %unit.next = add i64 %unit, 1
  %unit.more = icmp ult i64 %unit.next, %end
  br i1 %unit.more, label %tile, label %done

done:
  $done
  ret void
}
""")

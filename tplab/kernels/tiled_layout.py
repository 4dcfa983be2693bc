"""Keys and values as the products of ``tiled_products.py`` want them, in LLVM's language.

The processor's tiles (AMX) ask for it: in one instruction 16 rows of a *left* tile meet 16 columns of a *right* one,
over 32 numbers in bfloat16. A left tile's row has them one behind the other, a right tile's row has a *word* of four
bytes, two numbers, for each column. Queries are left tiles as they lie in memory. Keys and values are laid out as right
ones, once for all queries that will meet them:

* of 16 keys, each a column, all numbers: 16 words of them in a tile;
* of 32 values, each number a column: 16 words, in a tile for every 16 numbers.

A row of a tile is what a vector of AVX-512 wants, too. In float32 a word is one number, so a head has twice as many,
and 32 values make a tile of 32 rows.
"""

from collections.abc import Callable
from functools import lru_cache
from string import Template

import torch

from tplab.kernels.compiled import each, row_by_row, shared
from tplab.kernels.paged_loops import laid_across
from tplab.kernels.panel_loops import TILE

KEYS = 2 * TILE  # of a block: so many weights are a left tile's row
WORDS = {torch.bfloat16: TILE, torch.float32: KEYS}  # of a block's values, for each number


@lru_cache
def layout_loop(dtype: torch.dtype, head_dim: int) -> Callable:
    """For a multiple of 32 numbers, a function of

    * keys, and values: where they are, and how many bytes apart sequences, heads and keys;
    * how many KV heads there are, and keys;
    * where to lay out keys, ``[heads, blocks, 2, a head's words / 16]`` tiles, and values, ``[heads, blocks,
      head_dim / 16]`` tiles;
    * how many blocks there are.

    A unit is a block of one head of one sequence.
    """
    sizes = {"steps": head_dim * dtype.itemsize // 64, "sixteens": head_dim // TILE}

    def lines(text: str, **counts: int) -> str:
        return Template(each(text, **counts)).substitute(sizes)

    block = Template(_BLOCK).substitute(
        sizes, key_places=lines(_KEY_PLACE, key=TILE), read=lines(_READ_KEY, key=TILE), across=laid_across(),
        write=lines(_WRITE_KEY, key=TILE),
        pairs=lines(_PAIR if dtype == torch.bfloat16 else _TWO, n=sizes["sixteens"], half=2))
    return shared(row_by_row(_TAKES, block, _PLACE))


# Where a sequence's head begins.
BEGINS = """
  %{x}.sequence.offset = mul i64 %sequence, %{x}.sequence
  %{x}.head.offset = mul i64 %head, %{x}.head
  %{x}.offset = add i64 %{x}.sequence.offset, %{x}.head.offset
  %{x}.begin = getelementptr i8, ptr %{x}, i64 %{x}.offset
"""
_PLACE = """
define internal ptr @place(ptr %begin, i64 %apart, i64 %wanted, i64 %last) {
  %inside = icmp ult i64 %wanted, %last
  %number = select i1 %inside, i64 %wanted, i64 %last
  %offset = mul i64 %number, %apart
  %at = getelementptr i8, ptr %begin, i64 %offset
  ret ptr %at
}
"""
_TAKES = ("ptr %k, i64 %k.sequence, i64 %k.head, i64 %k.key, ptr %v, i64 %v.sequence, i64 %v.head, i64 %v.key, "
                  "i64 %heads, i64 %keys, ptr %k.laid, ptr %v.laid, i64 %blocks")
# A row is a block of keys of one KV head. Behind the end, the last key stands again: it is hidden there.
_BLOCK = """
  %block = urem i64 %r, %blocks
  %head.all = udiv i64 %r, %blocks
  %head = urem i64 %head.all, %heads
  %sequence = udiv i64 %head.all, %heads
  %first.key = mul i64 %block, 32
  %last = sub i64 %keys, 1
""" + BEGINS.format(x="k") + BEGINS.format(x="v") + """
  br label %half

half:
  %h = phi i64 [0, %row], [%h.next, %half.end]
  %half.offset = mul i64 %h, 16
  %half.first = add i64 %first.key, %half.offset
  $key_places
  br label %step

step:
  %s = phi i64 [0, %half], [%s.next, %step]
  $read
  $across
  %k.to = getelementptr [2 x [$steps x [16 x [64 x i8]]]], ptr %k.laid, i64 %r, i64 %h, i64 %s
  $write
  %s.next = add i64 %s, 1
  %s.more = icmp ult i64 %s.next, $steps
  br i1 %s.more, label %step, label %half.end

half.end:
  %h.next = add i64 %h, 1
  %h.more = icmp ult i64 %h.next, 2
  br i1 %h.more, label %half, label %pair

pair:
  %p = phi i64 [0, %half.end], [%p.next, %pair]
  %even = mul i64 %p, 2
  %v.number.0 = add i64 %first.key, %even
  %v.number.1 = add i64 %v.number.0, 1
  %v.0 = call ptr @place(ptr %v.begin, i64 %v.key, i64 %v.number.0, i64 %last)
  %v.1 = call ptr @place(ptr %v.begin, i64 %v.key, i64 %v.number.1, i64 %last)
  $pairs
  %p.next = add i64 %p, 1
  %p.more = icmp ult i64 %p.next, 16
  br i1 %p.more, label %pair, label %row.end
"""
_KEY_PLACE = """
  %k.number.{key} = add i64 %half.first, {key}
  %k.{key} = call ptr @place(ptr %k.begin, i64 %k.key, i64 %k.number.{key}, i64 %last)
"""
_READ_KEY = """
  %k.at.{key} = getelementptr [64 x i8], ptr %k.{key}, i64 %s
  %across.16.{key} = load <16 x float>, ptr %k.at.{key}, align 2
"""
_WRITE_KEY = """
  %k.to.{key} = getelementptr [64 x i8], ptr %k.to, i64 {key}
  store <16 x float> %across.1.{key}, ptr %k.to.{key}, align 64
"""
_TURNS = ", ".join(f"i32 {lane}, i32 {lane + TILE}" for lane in range(TILE))
_PAIR = f"""
  %v.at.0.{{n}} = getelementptr [32 x i8], ptr %v.0, i64 {{n}}
  %v.at.1.{{n}} = getelementptr [32 x i8], ptr %v.1, i64 {{n}}
  %v.0.{{n}} = load <16 x i16>, ptr %v.at.0.{{n}}, align 2
  %v.1.{{n}} = load <16 x i16>, ptr %v.at.1.{{n}}, align 2
  %v.both.{{n}} = shufflevector <16 x i16> %v.0.{{n}}, <16 x i16> %v.1.{{n}}, <32 x i32> <{_TURNS}>
  %v.to.{{n}} = getelementptr [$sixteens x [16 x [64 x i8]]], ptr %v.laid, i64 %r, i64 {{n}}, i64 %p
  store <32 x i16> %v.both.{{n}}, ptr %v.to.{{n}}, align 64
"""
_TWO = """
  %v.at.{half}.{n} = getelementptr [64 x i8], ptr %v.{half}, i64 {n}
  %v.{half}.{n} = load <16 x float>, ptr %v.at.{half}.{n}, align 4
  %v.pair.{n} = getelementptr [$sixteens x [16 x [128 x i8]]], ptr %v.laid, i64 %r, i64 {n}, i64 %p
  %v.to.{half}.{n} = getelementptr [64 x i8], ptr %v.pair.{n}, i64 {half}
  store <16 x float> %v.{half}.{n}, ptr %v.to.{half}.{n}, align 64
"""

"""Attention over a paged cache, in place and in tiles, beside float64: sizes, groups, blocks in any order."""

import numpy as np
import pytest
import torch
from helpers.turns import by_turns

from tplab.fast.attention import TILE, pack_keys_and_values, paged_attention, tiled_attention
from tplab.fast.compiled import entry
from tplab.fast.linear import padded, panels, per_word
from tplab.fast.simd import WIDTH

DTYPES = [torch.float32, torch.bfloat16]
KV_HEADS, KV_HEAD = 3, 1


@entry
def _paged(q, k, v, table, block_size, keys, scaling, scores):
    paged_attention(q, k, v, KV_HEADS, KV_HEAD, table, block_size, keys, scaling, scores)


@entry
def _pack(k, v, head_dim, table, block_size, keys, word, k_steps, v_steps, k_packed, v_packed):
    pack_keys_and_values(k, v, KV_HEADS, KV_HEAD, head_dim, table, block_size, keys, word, k_steps, v_steps, k_packed,
                         v_packed)


@entry
def _tiled(q, first_head, group, start, first, last, k, v, k_steps, v_steps, word, scaling, x, x_words, scores, y):
    tiled_attention(q, first_head, group, start, first, last, k, v, k_steps, v_steps, word, scaling, x, x_words, scores,
                    y)


class Case:
    """A sequence of ``keys`` tokens in a cache whose other slots hold NaN, and the queries that attend to it."""

    def __init__(self, keys, head_dim, group, block_size, dtype, new=1):
        draw = torch.Generator().manual_seed(keys * head_dim + group)
        self.keys, self.head_dim, self.group, self.block_size, self.dtype = keys, head_dim, group, block_size, dtype
        blocks = -(-keys // block_size)
        self.table = torch.randperm(blocks + 3, generator=draw)[:blocks].numpy()
        slots = torch.tensor([self.table[n // block_size] * block_size + n % block_size for n in range(keys)])
        self.cache = [torch.full(((blocks + 3) * block_size, KV_HEADS, head_dim), torch.nan, dtype=dtype)
                      for _ in range(2)]
        for cache in self.cache:
            cache[slots] = torch.randn(keys, KV_HEADS, head_dim, generator=draw).to(dtype)
        self.k, self.v = (cache[slots, KV_HEAD] for cache in self.cache)
        self.q = torch.randn(new, group, head_dim, generator=draw) * 3
        self.scaling = 0.7 * head_dim ** -0.5

    def arrays(self):
        return [cache.flatten().numpy() if self.dtype == torch.float32 else
                cache.flatten().view(torch.int16).numpy().view(np.uint16) for cache in self.cache]

    def attend(self, dtype):
        """``[new, group, head_dim]``, by the definition; the new tokens are the last ones."""
        k, v = self.k.to(dtype), self.v.to(dtype)
        scores = torch.einsum("ngd,kd->ngk", self.q.to(dtype), k) * self.scaling
        seen = torch.arange(self.keys) <= torch.arange(self.keys - len(self.q), self.keys)[:, None]
        return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v

    def check(self, y, rounding=2 ** -22):
        """As close to float64 as PyTorch's float32, or as what is rounded on the way allows."""
        exact = self.attend(torch.float64)
        far, torchs = ((one.double() - exact).norm() / exact.norm() for one in (y, self.attend(torch.float32)))
        assert far <= 4 * torchs + rounding


@pytest.mark.parametrize("keys, sizes, dtype", by_turns(
    [1, 2, 15, 16, 17, 100, 1000], [(8, 1, 16), (64, 3, 16), (10, 7, 5), (33, 2, 1)], DTYPES, least=16))
def test_one_position_in_place(keys, sizes, dtype):
    head_dim, group, block_size = sizes
    case = Case(keys, head_dim, group, block_size, dtype)
    q = case.q[0].numpy().copy()
    _paged(q, *case.arrays(), case.table, block_size, keys, np.float32(case.scaling),
           np.full(2 * group * (keys + 8), np.nan, np.float32))
    case.check(torch.from_numpy(q)[None])


@pytest.mark.parametrize("lengths, sizes, dtype", by_turns(
    [(5, 5), (16, 16), (17, 9), (64, 64), (65, 33), (200, 190), (300, 7)],
    [(8, 1, 16), (64, 3, 16), (10, 7, 5), (96, 2, 4)], DTYPES, least=16))
def test_parts_of_a_prompt_in_tiles(lengths, sizes, dtype):
    """What is left from a sequence before, in all memory for the work, must not be read: it is NaN here."""
    (keys, new), (head_dim, group, block_size) = lengths, sizes
    case, word = Case(keys, head_dim, group, block_size, dtype, new), per_word(dtype)
    kind = np.float32 if dtype == torch.float32 else np.uint32
    k_steps, v_steps = padded(head_dim, dtype) // word, -(-keys // (16 * word)) * 16
    nan = np.nan if kind is np.float32 else 0x7FC07FC0

    def memory(words):
        made = np.full(words, nan, kind)
        return made, made if kind is np.float32 else made.view(np.uint16)

    (k_words, k), (v_words, v) = memory(panels(v_steps * word) * WIDTH * k_steps), memory(
        panels(head_dim) * WIDTH * v_steps)
    k_words[:] = v_words[:] = 0  # outputs that fill up a panel are computed and not read
    _pack(*case.arrays(), head_dim, case.table, block_size, keys, word, k_steps, v_steps, k, v)
    x_words, x = memory(TILE * group * max(k_steps, v_steps) + 16 * max(k_steps, v_steps))
    scores = np.full((TILE * group + 16) * max(panels(keys), panels(head_dim)) * WIDTH, np.nan, np.float32)
    y, start = np.full((new, group + 2, head_dim), np.nan, np.float32), keys - new
    q = np.full_like(y, np.nan)
    q[:, 1:-1] = case.q.numpy()
    for first in range(start, keys, TILE):
        _tiled(q, 1, group, start, first, min(keys, first + TILE), k_words, v_words, k_steps, v_steps, word,
               np.float32(case.scaling), x, x_words, scores, y)
    # Queries and weights are rounded to the cache's dtype.
    case.check(torch.from_numpy(y[:, 1:-1]), 2 ** -22 if dtype == torch.float32 else 2 ** -8)
    assert np.isnan(y[:, 0]).all() and np.isnan(y[:, -1]).all()  # other heads' places

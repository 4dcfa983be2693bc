"""Attention over a paged cache (PagedAttention, arXiv:2309.06180): keys and values are read where the cache holds them.

The cache of a layer is flat, ``[slots, kv_heads, head_dim]``; ``table`` says which blocks a sequence has. Sequences
with few new tokens are read in place. For longer parts of a prompt, keys and values are packed like weights, and
attention is two products with a softmax between them, for ``TILE`` positions at a time.
"""

import numpy as np

from tplab.fast.compiled import inner
from tplab.fast.linear import LINE, linear
from tplab.fast.rowwise import copy, scale, softmax
from tplab.fast.simd import (
    LANES,
    WIDTH,
    add_products,
    load_vector,
    multiply_add,
    prefetch,
    spread,
    store_lane_sums,
    store_sums,
    widened,
    zero_sums,
)

TILE = 16  # positions whose queries attend together


@inner
def ask_for_next_block(cache, table, block, block_size, keys, row, at, head_dim):
    """Prefetch one head of the block after ``block``; a head's rows are too far apart for the processor's prefetch."""
    if (block + 1) * block_size < keys:
        slot = table[block + 1] * block_size * row + at
        for key in range(block_size):
            for d in range(0, head_dim, LINE * 4 // cache.itemsize):
                prefetch(cache, slot + key * row + d)


@inner
def products(q, k, slot, key, block_size, row):
    """The products of a query with key number ``key`` of a block, in a vector that is still to be summed.

    Beyond the block's end, the last key is taken.
    """
    at, sums = slot + min(key, block_size - 1) * row, spread(np.float32(0))
    for d in range(0, len(q) // LANES * LANES, LANES):
        sums = multiply_add(load_vector(q, d), load_vector(k, at + d), sums)
    return sums


@inner
def score_keys(q, k, slot, count, block_size, row, scores, to):
    """``scores[to:to + count] = k @ q`` for the first keys of a block; up to seven more are written."""
    for n in range(0, count, 8):
        store_lane_sums(scores, to + n, (
            products(q, k, slot, n, block_size, row), products(q, k, slot, n + 1, block_size, row),
            products(q, k, slot, n + 2, block_size, row), products(q, k, slot, n + 3, block_size, row),
            products(q, k, slot, n + 4, block_size, row), products(q, k, slot, n + 5, block_size, row),
            products(q, k, slot, n + 6, block_size, row), products(q, k, slot, n + 7, block_size, row)))
    for d in range(len(q) // LANES * LANES, len(q)):
        for n in range(count):
            scores[to + n] += q[d] * widened(k[slot + n * row + d])


@inner
def add_values(weights, rows, v, slot, count, row, head_dim, y, to, is_first):
    """``y += weights @ v`` for the first values of a block and one or two queries; ``=`` if ``is_first``."""
    whole = head_dim // WIDTH * WIDTH
    for d in range(0, whole, WIDTH):
        sums = zero_sums(rows)
        for n in range(count):
            sums = add_products(sums, weights, rows, n, v, slot + n * row + d)
        store_sums(sums, y, to, d, is_first)
    for g in range(len(rows)):
        rest = y[to[g] + whole:to[g] + head_dim]
        if is_first:
            rest[:] = 0
        for n in range(count):
            weight, at = weights[rows[g] + n], slot + n * row + whole
            for d in range(len(rest)):
                rest[d] += weight * widened(v[at + d])


@inner
def paged_attention(q, k, v, kv_heads, kv_head, table, block_size, keys, scaling, scores):
    """One position: the queries that share a KV head, ``q [group, head_dim]`` in float32, attend to its first ``keys``
    keys and values. The result overwrites ``q``; ``scores`` is memory for ``2 * group * (keys + 8)`` numbers.
    """
    group, head_dim = q.shape
    row, longest = kv_heads * head_dim, keys + 8  # of a row of scores; the numbers after its keys are not read
    for block in range((keys + block_size - 1) // block_size):
        first = block * block_size
        slot = table[block] * block_size * row + kv_head * head_dim
        ask_for_next_block(k, table, block, block_size, keys, row, kv_head * head_dim, head_dim)
        for g in range(group):
            score_keys(q[g], k, slot, min(keys - first, block_size), block_size, row, scores, g * longest + first)
    weights, y = scores[group * longest:], q.reshape(group * head_dim)
    for g in range(group):
        of_query = slice(g * longest, g * longest + keys)
        scores[of_query.stop] = softmax(scores[of_query], scaling, weights[of_query])  # the factor of the result
    for block in range((keys + block_size - 1) // block_size):
        first, g = block * block_size, 0
        slot, count = table[block] * block_size * row + kv_head * head_dim, min(keys - first, block_size)
        ask_for_next_block(v, table, block, block_size, keys, row, kv_head * head_dim, head_dim)
        while g + 2 <= group:
            rows = (g * longest + first, (g + 1) * longest + first)
            add_values(weights, rows, v, slot, count, row, head_dim, y, (g * head_dim, (g + 1) * head_dim), block == 0)
            g += 2
        if g < group:
            add_values(weights, (g * longest + first,), v, slot, count, row, head_dim, y, (g * head_dim,), block == 0)
    for g in range(group):
        for d in range(head_dim):
            q[g, d] *= scores[g * longest + keys]


@inner
def strided_copy(x, first, step, count, y, to, by):
    """``count`` numbers of ``x``, ``step`` apart, to places of ``y``, ``by`` apart."""
    for i in range(count):
        y[to + i * by] = x[first + i * step]


@inner
def pack_keys_and_values(k, v, kv_heads, kv_head, head_dim, table, block_size, keys, per_word, k_steps, v_steps,
                         k_packed, v_packed):
    """A KV head's keys as a packed weight ``[keys, head_dim]``, its values as ``[head_dim, keys]``.

    ``k_steps`` and ``v_steps`` are the words of a row of each. Both are written as numbers of the cache's format, of
    which a word has ``per_word``.
    """
    row, word = kv_heads * head_dim, WIDTH * per_word
    for key in range(v_steps * per_word):
        slot = 0
        if key < keys:
            slot = (table[key // block_size] * block_size + key % block_size) * row + kv_head * head_dim
            to = (key // WIDTH * k_steps * WIDTH + key % WIDTH) * per_word
            for filler in range(head_dim // per_word, k_steps):
                k_packed[to + filler * word:to + filler * word + per_word] = 0
            for part in range(per_word):
                count = (head_dim - part + per_word - 1) // per_word
                strided_copy(k, slot + part, per_word, count, k_packed, to + part, word)
        for first in range(0, head_dim, WIDTH):
            to = (first * v_steps + key // per_word * WIDTH) * per_word + key % per_word
            count = min(WIDTH, head_dim - first)
            if key < keys:
                strided_copy(v, slot + first, 1, count, v_packed, to, per_word)
            else:
                for column in range(count):
                    v_packed[to + column * per_word] = 0


@inner
def tiled_attention(q, first_head, group, start, first, last, k_packed, v_packed, k_steps, v_steps, per_word, scaling,
                    x, x_words, scores, y):
    """Positions ``first`` to ``last`` of a sequence whose row 0 of ``q`` is position ``start``: at most ``TILE``.

    ``q`` and ``y`` are ``[rows, heads, head_dim]`` in float32; ``x`` and ``scores`` are memory for the work;
    ``x_words`` is the memory of ``x`` as words.
    """
    head_dim, rows = q.shape[2], (last - first) * group
    width = k_steps * per_word
    for r in range(rows):
        copy(q[first - start + r // group, first_head + r % group], x[r * width:(r + 1) * width])
    panels = (last + WIDTH - 1) // WIDTH
    row = panels * WIDTH
    linear(x_words, k_steps, rows, k_steps, k_packed, 0, k_steps * WIDTH, 0, panels, 1, scores, row)
    steps = min(v_steps, (last + 16 * per_word - 1) // (16 * per_word) * 16)
    width = steps * per_word
    for r in range(rows):
        seen = scores[r * row:r * row + first + r // group + 1]
        # The factor is kept where its row will be.
        y[first - start + r // group, first_head + r % group, 0] = softmax(seen, scaling, x[r * width:(r + 1) * width])
    panels = (head_dim + WIDTH - 1) // WIDTH
    row = panels * WIDTH
    linear(x_words, steps, rows, steps, v_packed, 0, v_steps * WIDTH, 0, panels, 1, scores, row)
    for r in range(rows):
        to = y[first - start + r // group, first_head + r % group]
        scale(scores[r * row:r * row + head_dim], to[0], to)

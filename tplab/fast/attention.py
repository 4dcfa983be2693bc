"""Attention over a paged cache (PagedAttention, arXiv:2309.06180): keys and values are read where the cache holds them.

The cache of a layer is flat, ``[slots, kv_heads, head_dim]``; ``table`` says which blocks a sequence has. Sequences
with one new token are read in place; for longer parts of a prompt, keys and values become packed weights, and attention
is two products with a softmax in between, for ``TILE`` positions at a time.
"""

import numpy as np

from tplab.fast.compiled import inner
from tplab.fast.linear import linear
from tplab.fast.rowwise import copy, scale, softmax
from tplab.fast.simd import WIDTH, widened

TILE = 16  # positions whose queries attend together


@inner
def paged_attention(q, k, v, kv_heads, kv_head, table, block_size, keys, scaling, scores):
    """One position: the queries that share a KV head, ``q [group, head_dim]`` in float32, meet its first ``keys`` keys
    and values. ``q`` is overwritten by what comes out; ``scores`` is memory for ``group * keys`` numbers.
    """
    group, head_dim = q.shape
    row = kv_heads * head_dim
    for block in range((keys + block_size - 1) // block_size):
        first = block * block_size
        slot = table[block] * block_size * row + kv_head * head_dim
        for key in range(first, min(keys, first + block_size)):
            stored = k[slot:slot + head_dim]
            for g in range(group):
                total = np.float32(0)
                for d in range(head_dim):
                    total += q[g, d] * widened(stored[d])
                scores[g * keys + key] = total
            slot += row
    for g in range(group):
        own = scores[g * keys:(g + 1) * keys]
        scale(own, softmax(own, scaling), own)
    q[:] = 0
    for block in range((keys + block_size - 1) // block_size):
        first = block * block_size
        slot = table[block] * block_size * row + kv_head * head_dim
        for key in range(first, min(keys, first + block_size)):
            stored = v[slot:slot + head_dim]
            for g in range(group):
                weight = scores[g * keys + key]
                for d in range(head_dim):
                    q[g, d] += weight * widened(stored[d])
            slot += row


@inner
def pack_keys_and_values(k, v, kv_heads, kv_head, head_dim, table, block_size, keys, per_word, k_steps, v_steps,
                         k_packed, v_packed):
    """A KV head's keys as a packed weight ``[keys, head_dim]``, its values as ``[head_dim, keys]``.

    ``k_steps`` and ``v_steps`` are the words of a row of each. Both are written as numbers of the cache's format, of
    which a word has ``per_word``.
    """
    row = kv_heads * head_dim
    for key in range(v_steps * per_word):
        if key < keys:
            slot = (table[key // block_size] * block_size + key % block_size) * row + kv_head * head_dim
            column, panel = key % WIDTH, key // WIDTH * k_steps
            for d in range(head_dim):
                k_packed[((panel + d // per_word) * WIDTH + column) * per_word + d % per_word] = k[slot + d]
            for d in range(head_dim, k_steps * per_word):
                k_packed[((panel + d // per_word) * WIDTH + column) * per_word + d % per_word] = 0
        for d in range(head_dim):
            at = (d // WIDTH * v_steps + key // per_word) * WIDTH + d % WIDTH
            v_packed[at * per_word + key % per_word] = v[slot + d] if key < keys else 0


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
        scale(seen, softmax(seen, scaling), x[r * width:(r + 1) * width])
    panels = (head_dim + WIDTH - 1) // WIDTH
    row = panels * WIDTH
    linear(x_words, steps, rows, steps, v_packed, 0, v_steps * WIDTH, 0, panels, 1, scores, row)
    for r in range(rows):
        copy(scores[r * row:r * row + head_dim], y[first - start + r // group, first_head + r % group])

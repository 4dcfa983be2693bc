"""One step of one rank as one call: from token ids through all layers to this rank's logits.

The mathematics is that of :mod:`tplab.model`, in float32 between the products, and can be read below, part by part. The
threads of a rank all run :func:`step`: each computes some panels of a product, some rows, some heads, and waits for the
others where the next part needs all of them.
"""

from typing import NamedTuple

import numpy as np

from tplab.fast.all_reduce import all_reduce, barrier
from tplab.fast.attention import TILE, pack_keys_and_values, paged_attention, tiled_attention
from tplab.fast.compiled import entry, inner
from tplab.fast.linear import linear
from tplab.fast.rowwise import add, apply_rotary_pos_emb, copy, rms_norm, silu_and_mul
from tplab.fast.simd import WIDTH, widened

IN_PLACE = 4  # new tokens of a sequence, or fewer, whose keys are read where they lie


class Shape(NamedTuple):
    """Sizes of this rank's part of the model. ``*_words``: of a row that a product takes; see linear.py."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    columns: int
    vocab: int
    block_size: int
    per_word: int
    hidden_words: int
    heads_words: int
    columns_words: int
    head_dim_words: int
    eps: float
    scaling: float


class Weights(NamedTuple):
    """Packed weights lie one behind the other, in the order in which a step reads them; the rest is float32.

    Attributes:
        panels: of each layer q|k|v, o, gate|up, down; then the LM head. ``numbers``: the same memory, number by number.
        norms: ``[2 * layers + 1, hidden]``.
        q_norm, k_norm, qkv_bias, o_bias, gate_up_bias, down_bias: ``[layers, …]``, of length 0 where there are none.
        embedding: this rank's rows, ``[tokens, hidden]``, flat; empty where they are the LM head's.
        first_token: the global id of this rank's first row.
        first_q: for each KV head its first query head; at the end, how many there are.
    """

    panels: np.ndarray
    numbers: np.ndarray
    norms: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    qkv_bias: np.ndarray
    o_bias: np.ndarray
    gate_up_bias: np.ndarray
    down_bias: np.ndarray
    embedding: np.ndarray
    first_token: int
    first_q: np.ndarray


class Batch(NamedTuple):
    """The sequences of a step, in the order of the flattened tokens, and this rank's cache.

    Attributes:
        k, v: ``[layers, slots * kv_heads * head_dim]``; bfloat16 as uint16.
        ids, slots: of each new token; ``cos``, ``sin``: ``[tokens, head_dim]`` in float32.
        starts, counts: of each sequence, its first new position and how many there are.
        tables: ``[sequences, blocks]``.
        wanted: rows that go through the last layer's second half, the norm and the LM head, in ascending order.
    """

    k: np.ndarray
    v: np.ndarray
    ids: np.ndarray
    slots: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    tables: np.ndarray
    wanted: np.ndarray


class Work(NamedTuple):
    """Memory for the work: of all threads together, then ``[threads, …]``. ``x`` is what a product takes, in the
    weights' format, and ``x_words`` the same memory as words; ``y`` is what a product gives."""

    hidden: np.ndarray
    x: np.ndarray
    x_words: np.ndarray
    y: np.ndarray
    q: np.ndarray
    logits: np.ndarray
    tile: np.ndarray
    tile_words: np.ndarray
    scores: np.ndarray
    keys: np.ndarray
    key_words: np.ndarray
    values: np.ndarray
    value_words: np.ndarray


@inner
def _panels(outputs):
    return (outputs + WIDTH - 1) // WIDTH


@inner
def _product(work, rows, words, weights, at, outputs, thread, threads):
    """This thread's part of ``work.y = work.x @ weight.T``: some panels, or some rows where there are many."""
    panels, row, first, by, top, bottom = _panels(outputs), _panels(outputs) * WIDTH, thread, threads, 0, rows
    if rows >= 64 * threads:
        share = (rows // threads + 31) // 32 * 32
        first, by, top, bottom = 0, 1, min(rows, thread * share), min(rows, (thread + 1) * share)
    linear(work.x_words[top * words:], words, bottom - top, words, weights.panels, at, words * WIDTH, first, panels, by,
           work.y[top * row:], row)


@inner
def embed(shape, weights, batch, work, head_at, thread, threads):
    """Look up the tokens of this rank's part of the vocabulary, in ``work.y``; zeros for all others."""
    size, words = shape.hidden, shape.hidden_words
    for r in range(thread, len(batch.ids), threads):
        token, row = batch.ids[r] - weights.first_token, work.y[r * size:(r + 1) * size]
        row[:] = 0
        if 0 <= token < shape.vocab:
            if len(weights.embedding):
                copy(weights.embedding[token * size:(token + 1) * size], row)
            else:
                at = head_at + token // WIDTH * words * WIDTH + token % WIDTH
                for i in range(size):
                    word = at + i // shape.per_word * WIDTH
                    row[i] = widened(weights.numbers[word * shape.per_word + i % shape.per_word])
        work.hidden[r] = 0


@inner
def norm(layer_norm, rows, shape, weights, work, thread, threads):
    """RMSNorm of the residual stream, in the format that the next product takes."""
    width = shape.hidden_words * shape.per_word
    for r in range(thread, rows, threads):
        rms_norm(work.hidden[r], weights.norms[layer_norm], shape.eps, work.x[r * width:(r + 1) * width])


@inner
def rotate_and_store(layer, shape, weights, batch, work, thread, threads):
    """Bias, q/k norm and rotation; q stays in ``work.q``, k and v go into the cache, through the slots."""
    d, row = shape.head_dim, _panels((shape.heads + 2 * shape.kv_heads) * shape.head_dim) * WIDTH
    for r in range(thread, len(batch.ids), threads):
        qkv, slot = work.y[r * row:(r + 1) * row], batch.slots[r] * shape.kv_heads * d
        add(weights.qkv_bias[layer], qkv)
        for h in range(shape.heads + shape.kv_heads):
            head = qkv[h * d:(h + 1) * d]
            if weights.q_norm.shape[1]:
                rms_norm(head, weights.q_norm[layer] if h < shape.heads else weights.k_norm[layer], shape.eps, head)
            if h < shape.heads:
                apply_rotary_pos_emb(head, batch.cos[r], batch.sin[r], work.q[r, h])
            else:
                at = slot + (h - shape.heads) * d
                apply_rotary_pos_emb(head, batch.cos[r], batch.sin[r], batch.k[layer, at:at + d])
        values = qkv[(shape.heads + shape.kv_heads) * d:(shape.heads + 2 * shape.kv_heads) * d]
        copy(values, batch.v[layer, slot:slot + shape.kv_heads * d])


@inner
def attend(layer, shape, weights, batch, work, thread, threads):
    """Attention of all sequences; ``work.q`` becomes what the heads give."""
    d, per_word, row, turn, next_wanted = shape.head_dim, shape.per_word, 0, 0, 0
    is_last = layer == shape.layers - 1
    for s in range(len(batch.starts)):
        start, count, table = batch.starts[s], batch.counts[s], batch.tables[s]
        keys, q = start + count, work.q[row:row + count]
        v_words = (keys + 16 * per_word - 1) // (16 * per_word) * 16
        first_wanted = 0  # what is not wanted of the last layer is not computed
        while is_last and next_wanted < len(batch.wanted) and batch.wanted[next_wanted] < row:
            next_wanted += 1
        if is_last:
            first_wanted = count if next_wanted == len(batch.wanted) else min(count, batch.wanted[next_wanted] - row)
        for h in range(shape.kv_heads):
            first_q, group = weights.first_q[h], weights.first_q[h + 1] - weights.first_q[h]
            if count <= IN_PLACE:
                for r in range(first_wanted, count):
                    if turn % threads == thread:
                        paged_attention(q[r, first_q:first_q + group], batch.k[layer], batch.v[layer],
                                        shape.kv_heads, h, table, shape.block_size, start + r + 1, shape.scaling,
                                        work.scores[thread])
                    turn += 1
                continue
            is_packed = False
            for first in range(start + first_wanted // TILE * TILE, keys, TILE):
                if turn % threads == thread and first_wanted < count:
                    if not is_packed:
                        pack_keys_and_values(batch.k[layer], batch.v[layer], shape.kv_heads, h, d, table,
                                             shape.block_size, keys, per_word, shape.head_dim_words, v_words,
                                             work.keys[thread], work.values[thread])
                        is_packed = True
                    tiled_attention(q, first_q, group, start, first, min(keys, first + TILE),
                                    work.key_words[thread], work.value_words[thread], shape.head_dim_words, v_words,
                                    per_word, shape.scaling, work.tile[thread], work.tile_words[thread],
                                    work.scores[thread], q)
                turn += 1
        row += count


@inner
def join_heads(rows, shape, batch, work, is_last, thread, threads):
    """The heads' outputs row by row, in the format that ``o_proj`` takes; in the last layer, only the wanted rows."""
    width, size = shape.heads_words * shape.per_word, shape.heads * shape.head_dim
    for r in range(thread, rows, threads):
        source = batch.wanted[r] if is_last else r
        copy(work.q[source].reshape(size), work.x[r * width:(r + 1) * width])


@inner
def activate(layer, rows, shape, weights, work, thread, threads):
    """``silu(gate) * up``, in the format that ``down_proj`` takes."""
    n, row, width = shape.columns, _panels(2 * shape.columns) * WIDTH, shape.columns_words * shape.per_word
    for r in range(thread, rows, threads):
        gate_up = work.y[r * row:(r + 1) * row]
        add(weights.gate_up_bias[layer], gate_up)
        silu_and_mul(gate_up[:n], gate_up[n:2 * n], work.x[r * width:(r + 1) * width])


@inner
def add_bias(bias, rows, width, work, thread, threads):
    """Add the bias of a row-parallel layer; only one rank has it."""
    if len(bias):
        for r in range(thread, rows, threads):
            add(bias, work.y[r * width:(r + 1) * width])


@entry
def step(shape, weights, batch, work, ranks, thread):
    """A whole step, as one of this rank's threads; True if it was completed.

    ``work.hidden`` then holds the wanted rows after the last layer, before the final norm, and ``work.logits`` their
    logits, ``[rows, vocabulary here, filled up to whole panels]``. False: see :func:`tplab.fast.all_reduce.all_reduce`.
    """
    rows, size, threads = len(batch.ids), shape.hidden, len(ranks.arrivals) // 8
    qkv, hidden_row = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, _panels(size) * WIDTH
    qkv_words, o_words = _panels(qkv) * WIDTH * shape.hidden_words, hidden_row * shape.heads_words
    mlp_words, down_words = _panels(2 * shape.columns) * WIDTH * shape.hidden_words, hidden_row * shape.columns_words
    layer_words = qkv_words + o_words + mlp_words + down_words
    number, seq = ranks.state[0], ranks.state[1] + 1

    embed(shape, weights, batch, work, shape.layers * layer_words, thread, threads)
    if not barrier(thread, ranks):
        return False
    number = all_reduce(work.y, size, rows, work.hidden, number, seq, thread, ranks)
    for layer in range(shape.layers):
        at, is_last = layer * layer_words, layer == shape.layers - 1
        if number < 0:
            return False
        norm(2 * layer, rows, shape, weights, work, thread, threads)
        barrier(thread, ranks)
        _product(work, rows, shape.hidden_words, weights, at, qkv, thread, threads)
        barrier(thread, ranks)
        rotate_and_store(layer, shape, weights, batch, work, thread, threads)
        barrier(thread, ranks)
        attend(layer, shape, weights, batch, work, thread, threads)
        barrier(thread, ranks)
        if is_last:
            rows = len(batch.wanted)
            if thread == 0:
                for r in range(rows):
                    if batch.wanted[r] > r:
                        copy(work.hidden[batch.wanted[r]], work.hidden[r])
        join_heads(rows, shape, batch, work, is_last, thread, threads)
        barrier(thread, ranks)
        _product(work, rows, shape.heads_words, weights, at + qkv_words, size, thread, threads)
        barrier(thread, ranks)
        add_bias(weights.o_bias[layer], rows, hidden_row, work, thread, threads)
        seq += 1
        number = all_reduce(work.y, hidden_row, rows, work.hidden, number, seq, thread, ranks)
        if number < 0:
            return False
        norm(2 * layer + 1, rows, shape, weights, work, thread, threads)
        barrier(thread, ranks)
        _product(work, rows, shape.hidden_words, weights, at + qkv_words + o_words, 2 * shape.columns, thread, threads)
        barrier(thread, ranks)
        activate(layer, rows, shape, weights, work, thread, threads)
        barrier(thread, ranks)
        _product(work, rows, shape.columns_words, weights, at + layer_words - down_words, size, thread, threads)
        barrier(thread, ranks)
        add_bias(weights.down_bias[layer], rows, hidden_row, work, thread, threads)
        seq += 1
        number = all_reduce(work.y, hidden_row, rows, work.hidden, number, seq, thread, ranks)
    if number < 0:
        return False
    norm(2 * shape.layers, rows, shape, weights, work, thread, threads)
    barrier(thread, ranks)
    linear(work.x_words, shape.hidden_words, rows, shape.hidden_words, weights.panels, shape.layers * layer_words,
           shape.hidden_words * WIDTH, thread, _panels(shape.vocab), threads, work.logits, _panels(shape.vocab) * WIDTH)
    barrier(thread, ranks)
    if thread == 0:
        ranks.state[0], ranks.state[1] = number, seq
    return True

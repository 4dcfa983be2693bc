"""Paged attention against the plain oracle, and a cache against a forward pass over everything."""

import itertools
import math

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.oracle import oracle_attention
from helpers.turns import by_turns

from tplab.cache import BlockPool, BlockTable, PagedKVCache, Segment
from tplab.cache.paged import rope_parts
from tplab.checkpoint import open_checkpoint
from tplab.model import NoCache, load_model
from tplab.model.attention import attend
from tplab.shard import RankShard, ShardPlan

HEAD_DIM = 6
SHARDS = {
    "grouped": RankShard(0, range(4), range(2), (0, 0, 1, 1), range(1), range(1)),
    "own": RankShard(0, range(3), range(3), (0, 1, 2), range(1), range(1)),
    "cut group": RankShard(0, range(5), range(2), (0, 0, 0, 1, 1), range(1), range(1)),
}


def paged_attention(cache, context, q, k, v, shard):
    """What :class:`TensorParallelAttention` does with a context, without the projections."""
    out = torch.empty_like(q)
    for rows, keys, values, mask in context.batches(0, k, v):
        q_rows = q[rows].unflatten(0, (mask.shape[0], mask.shape[2])).transpose(1, 2)
        for heads, kv_heads in shard.kv_groups:
            kv = slice(kv_heads.start, kv_heads.stop)
            done = attend(q_rows[:, heads.start:heads.stop], keys[:, kv], values[:, kv], mask, HEAD_DIM ** -0.5)
            out[rows, heads.start:heads.stop] = done.transpose(1, 2).flatten(0, 1)
    return out


@pytest.mark.parametrize("name, block_size, dtype", by_turns([*SHARDS], [1, 3, 4, 16], [torch.float32, torch.float64]))
def test_paged_attention_equals_the_oracle(name, block_size, dtype):
    """Steps that mix prefill, chunks and decoding of three sequences in scattered blocks."""
    shard, generator = SHARDS[name], torch.Generator().manual_seed(block_size)
    pool = BlockPool(60, block_size)
    spare = [pool.get_new_block() for _ in range(20)]
    pool.free_blocks(spare[::3])  # holes, so that tables do not lie in one piece
    cache = PagedKVCache(1, 60, block_size, len(shard.kv_heads), HEAD_DIM, dtype)
    tables, done = [BlockTable(pool) for _ in range(3)], [0, 0, 0]
    for counts in ([5, 0, 3], [1, 4, 1], [1, 1, 1], [2, 1, 1], [0, 1, 0], [1, 0, 1]):
        segments = []
        for i, count in enumerate(counts):
            if count:
                tables[i].allocate_slots(done[i] + count)
                segments.append(Segment(done[i], count, tuple(tables[i].block_ids), 5))
                done[i] += count
        q, k, v = (torch.randn(sum(counts), heads, HEAD_DIM, generator=generator, dtype=dtype)
                   for heads in (len(shard.q_heads), len(shard.kv_heads), len(shard.kv_heads)))
        ours = paged_attention(cache, cache.context(segments), q, k, v, shard)
        oracle = oracle_attention(q, cache.k_cache[0], cache.v_cache[0], segments, shard.kv_for_q, HEAD_DIM ** -0.5)
        # The softmax is float32 in both, as in Hugging Face.
        assert (ours - oracle).abs().max() <= (1e-6 if dtype == torch.float32 else 3e-7)


def test_a_neighbours_nan_stays_with_the_neighbour():
    """Padding must not read another sequence's keys: 0 * NaN is NaN."""
    shard, cache = SHARDS["own"], PagedKVCache(1, 8, 2, 3, HEAD_DIM)
    cache.k_cache[0, 0] = cache.v_cache[0, 0] = cache.k_cache[0, 7] = cache.v_cache[0, 7] = float("nan")
    segments = [Segment(0, 1, (3,), 1), Segment(4, 1, (1, 2, 4), 1)]
    q, k, v = (torch.randn(2, 3, HEAD_DIM) for _ in range(3))
    assert paged_attention(cache, cache.context(segments), q, k, v, shard).isfinite().all()


def test_an_empty_cache_takes_no_memory():
    import psutil

    before = psutil.Process().memory_info().rss
    cache = PagedKVCache(24, 1000, 16, 8, 64)
    assert cache.nbytes > 1.5e9 and psutil.Process().memory_info().rss - before < 5e7
    assert not cache.k_cache[3, 7].any()


@pytest.mark.parametrize("softmax, bound", [("float64", 1e-14), ("float32", 2e-6)])
def test_a_cache_changes_nothing(tmp_path, softmax, bound, monkeypatch):
    """Two prompts in uneven steps through a cache, against both at once without one.

    Hugging Face's softmax is in float32, and one over fewer keys rounds differently (with AVX2, always): without its
    roundings nothing is left.
    """
    if softmax == "float64":
        in_scores_dtype = torch.softmax
        monkeypatch.setattr(torch, "softmax", lambda scores, dim, dtype: in_scores_dtype(scores, dim))
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", "qwen2", heads=6, kv_heads=2))
    model = load_model(ckpt, ShardPlan.from_config(ckpt.config, 1), torch.float64)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 67, (n,), generator=generator) for n in (13, 9)]
    whole = model(torch.cat(prompts), torch.cat([torch.arange(13), torch.arange(9)]), NoCache([13, 9])).split([13, 9])
    cache = PagedKVCache(2, 8, 4, 2, 8, torch.float64)
    blocks, done, parts = [(5, 0, 3, 6), (2, 7, 1, 4)], [0, 0], [[], []]
    for counts in ([4, 0], [5, 3], [1, 1], [1, 1], [2, 4]):
        segments = [(i, Segment(done[i], n, blocks[i], 13)) for i, n in enumerate(counts) if n]
        context = cache.context([s for _, s in segments])
        ids = torch.cat([prompts[i][s.start:s.start + s.count] for i, s in segments])
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for _, s in segments])
        hidden = model(ids, positions, context).split([s.count for _, s in segments])
        for (i, s), part in zip(segments, hidden):
            parts[i].append(part)
            done[i] += s.count
    for ours, reference in zip(parts, whole):
        assert (torch.cat(ours) - reference).abs().max() <= bound * math.sqrt(reference.abs().max())


@pytest.mark.parametrize("table", [*itertools.permutations(range(4), 3), (0, 2, 2)], ids=str)
def test_what_is_read_is_what_the_table_names_in_its_order(table):
    """In one piece or in several: neither ends nor lengths tell whether blocks lie side by side."""
    cache = PagedKVCache(2, 4, 2, 1, 3)
    for side, values in enumerate((cache.k_cache, cache.v_cache)):
        values.copy_(torch.arange(values.numel()).view(values.shape) + 1000 * side)
    for tokens in (2, 3, 5, 6):
        new = torch.full((1, 1, 3), -7.0), torch.full((1, 1, 3), -9.0)
        ((rows, keys, values, mask),) = cache.context([Segment(tokens - 1, 1, table, 1)]).batches(1, *new)
        for read, stored, one in zip((keys, values), (cache.k_cache[1], cache.v_cache[1]), new):
            expected = torch.cat([stored[block] for block in table])[:tokens]
            assert torch.equal(read[0].transpose(0, 1), expected) and torch.equal(expected[-1], one[0])
    assert (cache.k_cache[0] >= 0).all() and (cache.v_cache[0] >= 1000).all(), "the other layer is untouched"


def test_sequences_that_decode_are_read_together():
    shard, generator = SHARDS["grouped"], torch.Generator().manual_seed(3)
    cache = PagedKVCache(1, 12, 2, 2, HEAD_DIM)
    cache.k_cache.normal_(generator=generator)
    cache.v_cache.normal_(generator=generator)
    # Decoding before, between and behind others, so that its rows do not lie side by side.
    segments = [Segment(3, 1, (0, 1), 1), Segment(1, 3, (2, 4), 1), Segment(6, 1, (5, 3, 6, 7), 1),
                Segment(0, 1, (8,), 1)]
    q, k, v = (torch.randn(6, heads, HEAD_DIM, generator=generator) for heads in (4, 2, 2))
    context = cache.context(segments)
    assert [rows.tolist() for rows, *_ in context.reads] == [[1, 2, 3], [0, 4, 5]]
    assert context.slots == [[3], [5, 8, 9], [14], [16]] and context.slot_mapping.tolist() == [3, 5, 8, 9, 14, 16]
    ours = paged_attention(cache, context, q, k, v, shard)
    oracle = oracle_attention(q, cache.k_cache[0], cache.v_cache[0], segments, shard.kv_for_q, HEAD_DIM ** -0.5)
    assert (ours - oracle).abs().max() <= 1e-6


@pytest.mark.parametrize("segment,parts", [
    (Segment(0, 5, (), 5), [(5, 5)]),  # a prompt at once
    (Segment(2, 2, (), 5), [(2, 5)]),  # a chunk of it
    (Segment(3, 2, (), 5), [(2, 5)]),  # its last chunk
    (Segment(5, 1, (), 5), [(1, 6)]),  # decoding
    (Segment(0, 7, (), 5), [(5, 5), (1, 6), (1, 7)]),  # read again after losing its place
    (Segment(4, 3, (), 5), [(1, 5), (1, 6), (1, 7)]),
    (Segment(6, 2, (), 5), [(1, 7), (1, 8)]),
], ids=str)  # fmt: skip
def test_rotations_are_those_of_an_undisturbed_run(segment, parts):
    assert rope_parts(segment) == parts
    assert PagedKVCache(1, 4, 4, 1, 2).context([segment._replace(block_ids=(0, 1))]).lengths == parts


def test_a_cache_beyond_the_length_that_dynamic_rope_stretches(tmp_path):
    """One prompt beyond the original length, one that grows beyond it, against Hugging Face with its own cache."""
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path / "m", "llama", rope="dynamic", max_positions=16)
    ckpt = open_checkpoint(folder)
    model = load_model(ckpt, ShardPlan.from_config(ckpt.config, 1), torch.float64)
    texts = torch.randint(67, (2, 30), generator=torch.Generator().manual_seed(2))
    lengths, steps, expected = (21, 14), 4, []
    for text, length in zip(texts, lengths):
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        past, logits = None, []
        for begin, end in ((0, length), *((n, n + 1) for n in range(length, length + steps))):
            with torch.inference_mode():
                out = hf(text[None, begin:end], past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, [*logits, out.logits[0, -1]]
        expected.append(torch.stack(logits))
    cache = PagedKVCache(2, 16, 4, 2, 8, torch.float64)
    blocks, done, ours = [range(0, 16, 2), range(1, 16, 2)], [0, 0], [[], []]
    for counts in (lengths, *[(1, 1)] * steps):
        segments = [Segment(done[i], n, tuple(blocks[i]), lengths[i]) for i, n in enumerate(counts)]
        context = cache.context(segments)
        ids = torch.cat([texts[i][s.start:s.start + s.count] for i, s in enumerate(segments)])
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in segments])
        with torch.inference_mode():
            logits = model.compute_logits(model(ids, positions, context)).split(list(counts))
        for i, part in enumerate(logits):
            ours[i].append(part[-1])
            done[i] += counts[i]
    for mine, theirs in zip(ours, expected):
        assert (torch.stack(mine) - theirs).abs().max() <= 1e-5

"""A context that stays where it is: after every update it says what a new one would."""

import pytest
import torch

from tplab.cache import PagedKVCache, Segment
from tplab.cache.standing import CAPACITY, StandingContext, capacity_for

KV_HEADS, HEAD_DIM = 2, 64


def same(standing, segments, cache):
    """Slots, lengths, masks, rope parts and what a layer writes, beside those of a context made for these segments."""
    new = cache.context(segments)
    assert standing.lengths == new.lengths and torch.equal(standing.slot_mapping, new.slot_mapping)
    (rows, (slots, lengths), mask), = standing.reads
    assert rows == slice(0, len(segments)) and slots.is_contiguous() and mask.is_contiguous()
    for row, segment in enumerate(segments):
        keys = segment.start + 1
        right = new._slots(segment, keys).tolist()
        assert slots[row, :keys].tolist() == right and lengths[row] == keys
        filled = -(-keys // 16) * 16
        assert slots[row, keys:filled].tolist() == [right[-1]] * (filled - keys), "its own last one, never a stranger's"
        assert not mask[row, 0, 0, :keys].any() and mask[row, 0, 0, keys:].all()
    return True


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_any_sequences_come_and_go(block_size):
    """They grow by a token, a block comes, another one takes the place, one comes back shorter with other blocks."""
    generator = torch.Generator().manual_seed(block_size)
    cache = PagedKVCache(2, 600, block_size, KV_HEADS, HEAD_DIM)
    standing, state = StandingContext(cache, 3, CAPACITY), {}

    def draw(most):
        return int(torch.randint(most, (), generator=generator))

    def fresh(row):
        start = draw(90)
        blocks = torch.randperm(600, generator=generator)[:start // block_size + 1].tolist()
        state[row] = Segment(start, 1, tuple(blocks), draw(start + 1) + 1)

    for row in range(3):
        fresh(row)
    for _ in range(150):
        segments = [state[row] for row in range(3)]
        standing.update(segments)
        assert same(standing, segments, cache)
        for row in range(3):
            if draw(12) == 0:
                fresh(row)
            elif draw(12) == 0:  # the same sequence, computed again from an earlier token
                state[row] = state[row]._replace(start=max(0, state[row].start - draw(3)))
            else:
                start, blocks = state[row].start + 1, state[row].block_ids
                if start // block_size == len(blocks):
                    blocks = (*blocks, draw(600))
                state[row] = Segment(start, 1, blocks, state[row].prompt_length)
        if draw(20) == 0:
            state[0], state[2] = state[2], state[0]


def test_what_a_layer_writes_and_reads():
    cache = PagedKVCache(1, 40, 16, KV_HEADS, HEAD_DIM)
    cache.k_cache.normal_(), cache.v_cache.normal_()
    segments = [Segment(30, 1, (5, 9), 20), Segment(17, 1, (3, 2), 18)]
    standing = StandingContext(cache, 2, CAPACITY)
    standing.update(segments)
    k, v = torch.randn(2, 2, KV_HEADS, HEAD_DIM)
    batch, = standing.batches(0, k, v)
    assert torch.equal(cache.k_cache[0, 9, 14], k[0]) and torch.equal(cache.v_cache[0, 2, 1], v[1])
    right = cache.context(segments)
    other, = right.batches(0, k, v)
    for one, new in ((batch.k, other.k), (batch.v, other.v)):
        for row, segment in enumerate(segments):
            keys = segment.start + 1
            assert torch.equal(one.gathered()[row, :, :keys], new.gathered()[row, :, :keys])


@pytest.mark.parametrize("block", [40, 99, -1])
def test_a_block_that_is_not_there(block):
    standing = StandingContext(PagedKVCache(1, 40, 16, KV_HEADS, HEAD_DIM), 1, CAPACITY)
    with pytest.raises(IndexError, match=f"block {block} is not one of the cache's 40"):
        standing.update([Segment(20, 1, (3, block), 20)])


@pytest.mark.parametrize("starts, counts, capacity", [
    ((20,), (1,), 256), ((254, 3), (1, 1), 256), ((255, 3), (1, 1), 256), ((256, 3), (1, 1), 512),
    ((14,), (1,), None), ((15,), (1,), 256), ((20, 30), (1, 2), None), ((767,), (1,), 768), ((768,), (1,), None)])
def test_room_for_so_many_keys(starts, counts, capacity, monkeypatch):
    """None for prompts, for fewer keys than a vector has, and for more than a loop is known to take."""
    monkeypatch.setattr("tplab.kernels.paged_attention._limits", {(torch.float32, HEAD_DIM): 769})
    cache = PagedKVCache(1, 40, 16, KV_HEADS, HEAD_DIM)
    segments = [Segment(start, count, tuple(range(40)), 9) for start, count in zip(starts, counts)]
    assert capacity_for(cache, segments) == capacity

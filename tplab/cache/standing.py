"""The context of sequences that decode together, in the same memory step after step.

A step's calls can be repeated (:mod:`tplab.kernels.graph`) where only what stands in their tensors has changed. From
one step to the next that is one slot and one length of each sequence, unless another one has taken its place.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tplab.cache.paged import PagedContext, PagedKVCache, Segment, rope_parts, visible_length
from tplab.cache.table import blocks_needed
from tplab.kernels.paged_attention import LANES, pays

CAPACITY = 256  # keys of a sequence, or a multiple


def capacity_for(cache: PagedKVCache, segments: Sequence[Segment]) -> int | None:
    """Keys for which a standing context of these segments has room; None where there can be none: somebody reads more
    than one token, or the attention has no loop that reads so many keys in their slots."""
    if any(segment.count != 1 for segment in segments):
        return None
    longest = max(visible_length(segment.start, 1) for segment in segments)
    capacity = blocks_needed(longest, CAPACITY) * CAPACITY
    dtype, head_dim = cache.k_cache.dtype, cache.k_cache.shape[-1]
    return capacity if pays(dtype, head_dim, longest) and pays(dtype, head_dim, capacity) else None


class StandingContext(PagedContext):
    """The context of ``batch`` sequences of at most ``capacity`` keys; :meth:`update` says which they are."""

    def __init__(self, cache: PagedKVCache, batch: int, capacity: int):
        self.cache, self.lengths, self.tables = cache, [], [()] * batch
        self.table, self.keys = np.zeros((batch, capacity), np.int64), np.zeros(batch, np.int64)
        self.hidden, self.new = np.ones((batch, capacity), bool), np.zeros(batch, np.int64)
        table, keys, hidden, self.slot_mapping = map(torch.from_numpy, (self.table, self.keys, self.hidden, self.new))
        self.reads = [(slice(0, batch), (table, keys), hidden[:, None, None])]

    def update(self, segments: Sequence[Segment]) -> None:
        """The sequences of the next step, with one new token each. Raises IndexError for a block that is not there."""
        size, blocks = self.cache.block_size, len(self.cache.k_cache[0])
        self.lengths = [part for segment in segments for part in rope_parts(segment)]
        for row, segment in enumerate(segments):
            start, before = segment.start, self.tables[row]
            if segment.block_ids[:len(before)] != before or start != self.keys[row]:
                self._refill(row, segment)
            if not 0 <= (block := segment.block_ids[start // size]) < blocks:
                raise IndexError(f"block {block} is not one of the cache's {blocks}")
            self.tables[row] = segment.block_ids
            # Up to whole vectors, a sequence is filled up with its own last slot, which the mask hides.
            self.new[row] = self.table[row, start:blocks_needed(start + 1, LANES) * LANES] = (
                block * size + start % size)
            self.keys[row], self.hidden[row, start] = start + 1, False

    def _refill(self, row: int, segment: Segment) -> None:
        """Another sequence's place: all that stands before its new token."""
        size, start = self.cache.block_size, segment.start
        table = np.array(segment.block_ids[:blocks_needed(start, size)], np.int64)
        self.table[row, :start] = (table[:, None] * size + np.arange(size)).ravel()[:start]
        self.hidden[row, :start], self.hidden[row, start:] = False, True

"""The paged KV cache of one rank: written through slots, read through block tables.

Per layer and for K and V one tensor ``[num_blocks, block_size, kv_heads_here, head_dim]``. Only KV heads are stored;
grouped queries share them in attention.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tplab.cache.table import blocks_needed, slot_mapping
from tplab.model.attention import AttentionBatch, causal_mask


class Segment(NamedTuple):
    """One sequence's part of a step.

    Attributes:
        start: position of its first new token, so the number of its tokens that are in the cache already.
        count: new tokens.
        block_ids: its block table, long enough for all of them.
        prompt_length: length of its prompt (some rope types depend on it).
    """

    start: int
    count: int  # type: ignore[assignment]  # a tuple has a method of this name
    block_ids: Sequence[int]
    prompt_length: int


def zeros_on_demand(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the system commits page by page when it is first written: an empty cache costs nothing.

    Zeros, not uninitialised memory, because masked keys still take part in a product: ``0 * NaN`` is NaN.
    """
    size = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(*shape)


def write_cache(cache: torch.Tensor, slots: torch.Tensor, new: torch.Tensor) -> None:
    """Store ``new [tokens, kv heads here, head_dim]`` in the slots of ``cache [num_slots, kv heads here, head_dim]``.
    """
    cache.index_copy_(0, slots, new)


def visible_length(start: int, count: int) -> int:
    """How many keys a sequence's new tokens may look at: those in the cache and themselves."""
    return start + count


def rope_parts(segment: Segment) -> list[tuple[int, int]]:
    """``(tokens, length of the sequence when Hugging Face computes them)``: a prompt at once, then token by token.

    So a prompt read in chunks, or an output computed again after a preemption, gets the same rotations as without.
    """
    prompt = max(0, min(segment.count, segment.prompt_length - segment.start))
    later = range(segment.start + prompt, segment.start + segment.count)
    return [(prompt, segment.prompt_length)] * bool(prompt) + [(1, position + 1) for position in later]


class PagedKVCache:
    """All layers' K and V blocks on this rank, in the sizes of the block pool."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, kv_heads_here: int, head_dim: int,
                 dtype: torch.dtype = torch.float32):
        self.block_size = block_size
        shape = (num_layers, num_blocks, block_size, kv_heads_here, head_dim)
        self.k_cache, self.v_cache = zeros_on_demand(shape, dtype), zeros_on_demand(shape, dtype)
        self.k_slots, self.v_slots = self.k_cache.flatten(1, 2).unbind(), self.v_cache.flatten(1, 2).unbind()

    @property
    def nbytes(self) -> int:
        """Bytes of K and V over all layers on this rank, used or not."""
        return 2 * self.k_cache.numel() * self.k_cache.element_size()

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token occupies on this rank: ``2 * layers * kv_heads_here * head_dim * element size``."""
        return self.nbytes // len(self.k_slots[0])

    def context(self, segments: Sequence[Segment]) -> "PagedContext":
        """The attention context of one step."""
        return PagedContext(self, segments)


class PagedContext:
    """One step's view of a paged cache; everything that does not depend on the layer is made here, once.

    ``segments`` are the sequences of the step, in the order of the flattened tokens.
    """

    def __init__(self, cache: PagedKVCache, segments: Sequence[Segment]):
        self.cache, self.segments = cache, segments
        self.lengths = [part for segment in segments for part in rope_parts(segment)]
        self.slots = [slot_mapping(s.block_ids, range(s.start, s.start + s.count), cache.block_size) for s in segments]
        self.slot_mapping = torch.tensor([slot for slots in self.slots for slot in slots])
        self.reads = list(self._reads())

    def _reads(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """``(rows, slots to read, mask)`` per batch: parts of prompts one by one, sequences that decode together."""
        ends = torch.tensor([segment.count for segment in self.segments]).cumsum(0)
        decoding = [i for i, segment in enumerate(self.segments) if segment.count == 1]
        for i, (end, segment) in enumerate(zip(ends, self.segments)):
            if segment.count > 1:
                yield torch.arange(end - segment.count, end), *self._batch([i])
        if decoding:
            yield ends[decoding] - 1, *self._batch(decoding)

    def _batch(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """``[batch, keys]`` slots of sequences with equally many new tokens, and the mask.

        Shorter sequences are filled up with their own last slot, which the mask hides; never with another sequence's.
        """
        segments = [self.segments[i] for i in indices]
        keys = [visible_length(segment.start, segment.count) for segment in segments]
        slots = torch.stack([self._slots(segment, n)[torch.arange(max(keys)).clamp_(max=n - 1)]
                             for segment, n in zip(segments, keys)])
        positions = torch.tensor([range(segment.start, segment.start + segment.count) for segment in segments])
        return slots, causal_mask(positions, max(keys))

    def _slots(self, segment: Segment, keys: int) -> torch.Tensor:
        """A sequence's first ``keys`` slots, through its table."""
        size = self.cache.block_size
        table = torch.tensor(segment.block_ids[:blocks_needed(keys, size)])
        return (table[:, None] * size + torch.arange(size)).flatten()[:keys]

    def batches(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Iterator[AttentionBatch]:
        """Write the new keys and values through the slots, read everything visible through the tables."""
        k_slots, v_slots = self.cache.k_slots[layer], self.cache.v_slots[layer]
        write_cache(k_slots, self.slot_mapping, k)
        write_cache(v_slots, self.slot_mapping, v)
        for rows, slots, mask in self.reads:
            yield AttentionBatch(rows, read_cache(k_slots, slots), read_cache(v_slots, slots), mask)


def read_cache(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """``[batch, kv heads here, keys, head_dim]``: what stands in the ``[batch, keys]`` slots."""
    return cache[slots].transpose(1, 2)

"""The paged KV cache of one rank: written through slots, read through block tables.

Per layer and for K and V one tensor ``[num_blocks, block_size, kv_heads_here, head_dim]``. Only KV heads are stored;
grouped queries share them in attention.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from tplab.cache.table import blocks_needed, slot_mapping
from tplab.kernels.paged_attention import LANES, Paged, pays
from tplab.model.attention import AttentionBatch, causal_mask, is_own, run_length, runs


class Segment(NamedTuple):
    """One sequence's part of a step.

    Attributes:
        start: position of its first new token; so many are in the cache already.
        count: new tokens.
        block_ids: its block table, long enough for all of them.
        prompt_length: length of its prompt (some rope types depend on it).
    """

    start: int
    count: int
    block_ids: Sequence[int]
    prompt_length: int


def zeros_on_demand(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the system commits page by page when it is first written: an empty cache costs nothing.

    Zeros rather than nothing, because masked keys still meet a product: ``0 * NaN`` is NaN.
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

    So a prompt read in chunks, and an output computed again after a preemption, get the rotations that they would have
    had without.
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


# Adjacent slots; the vectors of single heads; or slots and lengths of several sequences.
Where = slice | torch.Tensor | tuple[torch.Tensor, torch.Tensor]

# Sequences whose keys and values of one layer fit into this many bytes decode in one padded batch: copying so few is
# quicker than one more call. Longer ones are read where they lie, one by one if attention is not the lab's own.
TOGETHER_BYTES = 1 << 19


class PagedContext:
    """One step's view of a paged cache; everything that does not depend on the layer is made here, once.

    ``segments`` are the sequences of the step, in the order of the flattened tokens.
    """

    logits_indices = None

    def __init__(self, cache: PagedKVCache, segments: Sequence[Segment]):
        self.cache, self.segments = cache, segments
        self.lengths = [part for segment in segments for part in rope_parts(segment)]
        self.slots = [slot_mapping(s.block_ids, range(s.start, s.start + s.count), cache.block_size) for s in segments]
        self.slot_mapping = torch.tensor([slot for slots in self.slots for slot in slots])
        self.reads = list(self._reads())

    def _reads(self) -> Iterator[tuple[slice | torch.Tensor, Where, torch.Tensor]]:
        """``(rows, what to read, mask)`` per batch: decoding sequences together, all others one by one; also long ones
        that decode, where attention does not read them in their slots.

        A prompt is read in runs, and no run reads keys that all its queries must not see.
        """
        bytes_per_key = 2 * self.cache.k_slots[0][0].nbytes
        length = run_length(self.cache.k_cache.dtype, self.cache.k_cache.shape[-1])
        row, together = 0, []
        for segment in self.segments:
            keys = visible_length(segment.start, segment.count)
            if segment.count == 1 and (keys * bytes_per_key <= TOGETHER_BYTES or self._is_paged(keys)):
                together.append((row, segment, keys))
            else:
                for run in runs(segment.start, segment.count, length):
                    first, keys = row + run.start - segment.start, visible_length(run.start, len(run))
                    yield (slice(first, first + len(run)), self._one(segment, keys),
                           causal_mask(torch.arange(run.start, run.stop)[None], keys))
            row += segment.count
        if together:
            yield self._together(*zip(*together))

    def _together(self, rows: Sequence[int], segments: Sequence[Segment], keys: Sequence[int]
                  ) -> tuple[slice | torch.Tensor, Where, torch.Tensor]:
        """One batch of sequences that decode, with so many keys each.

        Their slots are looked up once for all layers. Attention that is the lab's own reads through them; any other is
        given tensors.
        """
        longest = max(keys)
        positions = torch.tensor([[segment.start] for segment in segments])
        adjacent = rows[-1] - rows[0] == len(rows) - 1
        where = slice(rows[0], rows[-1] + 1) if adjacent else torch.tensor(rows)
        paged = self._is_paged(longest)
        if len(rows) == 1 and not paged:
            return where, self._one(segments[0], longest), causal_mask(positions, longest)
        if paged:
            longest = blocks_needed(longest, LANES) * LANES
        # Shorter sequences are filled up with their own last slot, which the mask hides: never with a stranger's.
        slots = torch.stack([self._slots(segment, visible)[torch.arange(longest).clamp_(max=visible - 1)]
                             for segment, visible in zip(segments, keys)])
        paged = paged and 0 <= slots.min() and slots.max() < len(self.cache.k_slots[0])  # else PyTorch's error
        return (where, (slots, torch.tensor(keys)) if paged else self._of_heads(slots),
                causal_mask(positions, longest))

    def _is_paged(self, keys: int) -> bool:
        """Whether attention reads the longest sequence's keys, which are so many, in their slots."""
        stored = self.cache.k_cache
        return pays(stored.dtype, stored.shape[-1], keys) and is_own() and _OWN == (causal_mask, read_cache)

    def _one(self, segment: Segment, keys: int) -> slice | torch.Tensor:
        """Where one sequence's keys are: a slice of the slots if it lies in one piece."""
        size = self.cache.block_size
        used = segment.block_ids[:blocks_needed(keys, size)]
        if all(block == used[0] + i for i, block in enumerate(used)):
            return slice(used[0] * size, used[0] * size + keys)
        return self._of_heads(self._slots(segment, keys)[None])

    def _slots(self, segment: Segment, keys: int) -> torch.Tensor:
        """A sequence's first ``keys`` slots, through its table."""
        size = self.cache.block_size
        table = torch.tensor(segment.block_ids[:blocks_needed(keys, size)])
        return (table[:, None] * size + torch.arange(size)).flatten()[:keys]

    def _of_heads(self, slots: torch.Tensor) -> torch.Tensor:
        """``[batch, keys]`` slots → the vectors in them, head by head, as attention wants them: no second copy."""
        heads = self.cache.k_cache.shape[3]
        return (slots[:, None] * heads + torch.arange(heads)[:, None]).flatten()

    def batches(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Iterator[AttentionBatch]:
        """Write the new keys and values through the slots, read everything visible through the tables."""
        k_slots, v_slots = self.cache.k_slots[layer], self.cache.v_slots[layer]
        write_cache(k_slots, self.slot_mapping, k)
        write_cache(v_slots, self.slot_mapping, v)
        for rows, where, mask in self.reads:
            yield AttentionBatch(rows, read_cache(k_slots, where, mask), read_cache(v_slots, where, mask), mask)


def read_cache(cache: torch.Tensor, where: Where, mask: torch.Tensor) -> torch.Tensor | Paged:
    """``[batch, kv heads here, keys, head_dim]``: a view of adjacent slots, a gather of single heads' vectors, or the
    slots and lengths themselves, to be read one by one."""
    (batch, _, _, keys), (_, heads, head_dim) = mask.shape, cache.shape
    if isinstance(where, slice):
        return cache[where].view(batch, keys, heads, head_dim).transpose(1, 2)
    if isinstance(where, tuple):
        return Paged(cache, *where, range(heads))
    return cache.flatten(0, 1).index_select(0, where).view(batch, heads, keys, head_dim)


_OWN = causal_mask, read_cache

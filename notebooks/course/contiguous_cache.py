"""The plain KV cache: one growing tensor per layer and sequence, KV heads only."""

from collections.abc import Iterator, Sequence

import torch

from tplab.model.attention import AttentionBatch, causal_mask


class ContiguousKVCache:
    """Keys and values of some sequences, as tensors ``[tokens so far, kv heads here, head_dim]`` that grow.

    Every step copies the whole past of a sequence; :class:`tplab.cache.PagedKVCache` avoids that. This one is here to
    be read and compared with.
    """

    def __init__(self, num_sequences: int, num_layers: int):
        self.k: list[dict[int, torch.Tensor]] = [{} for _ in range(num_layers)]  # of each layer, by sequence
        self.v: list[dict[int, torch.Tensor]] = [{} for _ in range(num_layers)]
        self.computed = [0] * num_sequences

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank now."""
        return sum(t.numel() * t.element_size() for layers in (self.k, self.v) for layer in layers
                   for t in layer.values())

    def append(self, sequence: int, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append copies of a sequence's new keys and values to a layer's earlier ones; returns all of them."""
        for held, new in ((self.k[layer], k), (self.v[layer], v)):
            held[sequence] = torch.cat([held[sequence], new]) if sequence in held else new.clone()
        return self.k[layer][sequence], self.v[layer][sequence]

    def context(self, counts: Sequence[int]) -> "ContiguousContext":
        """The attention context of a step in which sequence ``i`` gets ``counts[i]`` new tokens (0: not in it)."""
        return ContiguousContext(self, counts)


class ContiguousContext:
    """One step's view of a :class:`ContiguousKVCache`; ``positions`` are those of the flattened new tokens."""

    def __init__(self, cache: ContiguousKVCache, counts: Sequence[int]):
        self.cache = cache
        self.parts = [(i, cache.computed[i], count) for i, count in enumerate(counts) if count]
        self.lengths = [(count, start + count) for _, start, count in self.parts]
        self.positions = torch.cat([torch.arange(start, start + count) for _, start, count in self.parts])
        for i, start, count in self.parts:
            cache.computed[i] = start + count

    def batches(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> Iterator[AttentionBatch]:
        """Append the new keys and values of each sequence; yield all of them."""
        row = 0
        for i, start, count in self.parts:
            rows = slice(row, row + count)
            keys, values = self.cache.append(i, layer, k[rows], v[rows])
            mask = causal_mask(torch.arange(start, start + count)[None], start + count)
            yield AttentionBatch(rows, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], mask)
            row += count

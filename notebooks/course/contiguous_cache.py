"""The plain KV cache: one growing tensor per layer and sequence, KV heads only."""

from collections.abc import Callable, Iterator, Sequence

import torch

from tplab.model.attention import AttentionBatch, causal_mask


class MyCache:
    def __init__(self, num_layers):
        self.k, self.v = [None] * num_layers, [None] * num_layers

    def append(self, layer, k, v):
        old_k = k[:0] if self.k[layer] is None else self.k[layer]
        old_v = v[:0] if self.v[layer] is None else self.v[layer]
        self.k[layer], self.v[layer] = torch.cat([old_k, k]), torch.cat([old_v, v])
        return self.k[layer], self.v[layer]


def tensors_in(thing, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors below ``thing``, in containers and attributes, each once."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
        return
    parts = (thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple) else
             vars(thing).values() if hasattr(thing, "__dict__") and not isinstance(thing, type) else ())
    for part in parts:
        yield from tensors_in(part, seen)


def held(thing) -> int:
    """The bytes of memory that tensors below ``thing`` keep, a view all that it was cut from."""
    storages = [tensor.untyped_storage() for tensor in tensors_in(thing)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class ContiguousKVCache:
    """Keys and values of some sequences, as tensors ``[tokens so far, kv heads here, head_dim]`` that grow.

    ``store(num_layers)`` makes what holds one sequence's, and has notebook 04's ``append(layer, k, v)``. Every step
    copies the whole past of a sequence; :class:`tplab.cache.PagedKVCache` avoids that. This one is here to be read and
    compared with.
    """

    def __init__(self, num_sequences: int, num_layers: int, store: Callable = MyCache):
        self.stores = [store(num_layers) for _ in range(num_sequences)]
        self.computed = [0] * num_sequences

    @property
    def nbytes(self) -> int:
        """Bytes held on this rank now."""
        return held(self.stores)

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
            keys, values = self.cache.stores[i].append(layer, k[rows], v[rows])
            mask = causal_mask(torch.arange(start, start + count)[None], start + count)
            yield AttentionBatch(rows, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], mask)
            row += count

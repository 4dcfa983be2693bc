"""Attention of sequences that decode, whose keys and values are read where a paged cache holds them.

Sequences of unlike lengths would have to be copied out of the cache, and filled up to the longest, before PyTorch can
multiply them. Here each reads its own slots, and no more of them than it has.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

from tplab.kernels.compiled import NUMBERS, threads_for
from tplab.kernels.paged_loops import PORTION, paged_loop
from tplab.kernels.softmax import masked_softmax_by_torch

LANES = 16  # a batch's keys are a multiple of so many
_WEIGHTS = 1 << 18  # of the queries that share a KV head: 1 MB on a thread's stack
_limits = {}  # by dtype and size of heads: so many keys of a sequence were too many, or one, for there is no loop
_AS_EXACT = 2  # times PyTorch's error that a float32 loop's own may be, if it has other bits
_TRIED = (16, 45, PORTION, PORTION + 1, 2 * PORTION), (2 * PORTION + 1, 1000, 1600)  # keys; more than the first ones


class Paged:
    """Keys or values of several sequences, ``[batch, heads, keys, head_dim]``, which stand in slots of a cache.

    Attributes:
        cache: ``[num_slots, kv heads here, head_dim]``.
        slots: ``[batch, keys]`` int64, a multiple of ``LANES`` of keys; behind its end a sequence repeats its last one.
        lengths: ``[batch]`` int64: how many keys each sequence has.
        heads: which of the cache's heads they are.
    """

    __slots__ = "cache", "heads", "lengths", "slots"

    def __init__(self, cache: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, heads: range):
        self.cache, self.slots, self.lengths, self.heads = cache, slots, lengths, heads

    def __getitem__(self, where: tuple[slice, slice]) -> "Paged":
        """``[:, heads]``: some of the heads."""
        sequences, heads = where
        assert sequences == slice(None), "all sequences or none"
        return Paged(self.cache, self.slots, self.lengths, self.heads[heads])

    def gathered(self) -> torch.Tensor:
        """``[batch, heads, keys, head_dim]``: a copy."""
        places = self.slots[:, None] * self.cache.shape[1] + torch.tensor(self.heads)[:, None]
        return self.cache.flatten(0, 1).index_select(0, places.flatten()).view(*places.shape, -1)


def pays(dtype: torch.dtype, head_dim: int, keys: int) -> bool:
    """Whether keys should be given as :class:`Paged`, if the longest sequence has so many: not where a loop was wanted
    before, and there was none."""
    return LANES <= keys < _limits.get((dtype, head_dim), _WEIGHTS) and dtype in NUMBERS


def attend_paged(q: torch.Tensor, k: Paged, v: Paged, mask: torch.Tensor, scaling: float) -> torch.Tensor | None:
    """Masked softmax attention: ``q [batch, heads, 1, head_dim]`` → the same; ``mask [batch, 1, 1, keys]``; ``k`` and
    ``v`` stand in the same slots.

    In float32 with the bits of :func:`attend_by_torch` for each sequence alone, or, where the order in which it adds
    up depends on how much there is, as close to the exact result; in bfloat16 nothing is rounded but what comes out.
    None where there are no such loops, and where a gradient is wanted.
    """
    keys, head_dim = k.slots.shape[1], q.shape[3]
    if not q.dtype == k.cache.dtype == v.cache.dtype or q.requires_grad or q.dtype not in NUMBERS \
            or mask.dtype != torch.bool or mask.shape != (len(q), 1, 1, keys) \
            or not isinstance(scaling, int | float):
        return None
    loop, longest = _loop(q.dtype, head_dim, q.shape[1] // len(k.heads))
    if keys > longest:
        _limits[q.dtype, head_dim] = longest + 1
        return None
    return _attended(loop, q, k, v, mask, scaling)


def attend_by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float
                    ) -> torch.Tensor:
    """In Hugging Face's steps: the queries of a group are laid below each other, and meet their KV head."""
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    k, v = k.reshape(-1, keys, head_dim), v.reshape(-1, keys, head_dim)
    scores = torch.bmm(q.reshape(batch * kv_heads, -1, head_dim), k.transpose(1, 2)).view(batch, heads, queries, keys)
    weights = masked_softmax_by_torch(scores, mask, scaling)
    return torch.bmm(weights.view(batch * kv_heads, -1, keys), v).view(q.shape)


def _attended(loop: Callable, q: torch.Tensor, k: Paged, v: Paged, mask: torch.Tensor, scaling: float
              ) -> torch.Tensor:
    (batch, heads, _, head_dim), q, mask = q.shape, q.contiguous(), mask.contiguous()
    y = torch.empty_like(q)
    loop(q.data_ptr(), k.cache.data_ptr(), v.cache.data_ptr(), y.data_ptr(), mask.data_ptr(), scaling,
         k.slots.data_ptr(), k.lengths.data_ptr(), k.cache.shape[1], k.heads.start, len(k.heads), k.slots.shape[1],
         batch * len(k.heads), threads_for(mask, heads * head_dim))
    return y


@lru_cache
def _loop(dtype: torch.dtype, head_dim: int, group: int) -> tuple[Callable | None, int]:
    """The loop, and of how many keys; in float32 the one that gives PyTorch's bits here, or else one that is about as
    exact as PyTorch."""
    loop, most = paged_loop(dtype, head_dim, group), _WEIGHTS // group
    if loop is None:
        return None, 0
    if dtype == torch.bfloat16:
        return loop, most
    if beside_torch(loop, head_dim, group) == 0:
        return loop, most if beside_torch(loop, head_dim, group, _TRIED[1]) == 0 else _TRIED[0][-1]
    loop = paged_loop(dtype, head_dim, group, chains=8)
    return (loop, most) if beside_torch(loop, head_dim, group, sum(_TRIED, ())) < _AS_EXACT else (None, 0)


def beside_torch(loop: Callable, head_dim: int, group: int, lengths: tuple[int, ...] = _TRIED[0]) -> float:
    """The largest share of PyTorch's error that a float32 loop's own is, at some lengths; 0 where all bits are equal.

    An error is the root of the mean square of the distances from the result in float64.
    """
    shares = [0.0]
    for length in lengths:
        generator = torch.Generator().manual_seed(length)
        q = 3 * torch.randn(2, 2 * group, 1, head_dim, generator=generator)
        caches = torch.randn(2, 2 * length, 2, head_dim, generator=generator)
        slots = torch.randperm(2 * length, generator=generator).view(2, length)
        filled = slots[:, torch.arange(-(-length // LANES) * LANES).clamp_(max=length - 1)]
        k, v = (Paged(cache, filled, torch.tensor([length, length]), range(2)) for cache in caches)
        mask = (torch.arange(filled.shape[1]) >= length).expand(2, 1, 1, -1)
        ours = _attended(loop, q, k, v, mask, 0.3)
        whole = q, k.gathered()[:, :, :length], v.gathered()[:, :, :length]
        theirs = attend_by_torch(*whole, mask[..., :length], 0.3)
        if not torch.equal(ours, theirs):
            exact = attend_by_torch(*(part.double() for part in whole), mask[..., :length], 0.3)
            shares.append(float((ours - exact).norm() / (theirs - exact).norm()))
    return max(shares)

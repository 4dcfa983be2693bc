"""What paged attention must equal: gather everything, repeat the heads, attend in full. Slow and plain on purpose."""

from collections.abc import Sequence

import torch

from tplab.cache.paged import Segment


def gathered(cache: torch.Tensor, block_ids: Sequence[int], tokens: int) -> torch.Tensor:
    """The first ``tokens`` tokens of a sequence out of ``cache [num_blocks, block_size, heads, head_dim]``."""
    return torch.cat([cache[block] for block in block_ids])[:tokens]


def oracle_attention(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, segments: Sequence[Segment],
                     kv_for_q: Sequence[int], scaling: float) -> torch.Tensor:
    """Attention of all new tokens, token by token and head by head, from one layer's cache.

    Args:
        q: ``[tokens, heads here, head_dim]``, flattened over the segments.
        k_cache, v_cache: ``[num_blocks, block_size, kv heads here, head_dim]``, the new tokens already in them.
        segments: the sequences of the step.
        kv_for_q: for each local query head the local KV head that it reads.
        scaling: usually ``head_dim ** -0.5``.

    Returns:
        ``[tokens, heads here, head_dim]``.
    """
    out, row = torch.empty_like(q), 0
    for segment in segments:
        for position in range(segment.start, segment.start + segment.count):
            k = gathered(k_cache, segment.block_ids, position + 1)
            v = gathered(v_cache, segment.block_ids, position + 1)
            for head, kv_head in enumerate(kv_for_q):
                scores = (k[:, kv_head] @ q[row, head]) * scaling
                weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
                out[row, head] = weights @ v[:, kv_head]
            row += 1
    return out

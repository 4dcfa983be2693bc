"""The cures of notebook 09: the lab's own versions of functions of patient zero, whose files stay as they are."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from unittest import mock

import torch

from tplab.shard import split_evenly


def with_cures(cures: Mapping[str, Callable], function: Callable, *args):
    """``function(*args)`` while each ``cures`` stands in the place of the function of ``patient_zero`` named by it."""
    with ExitStack() as stack:
        for name, cure in cures.items():
            stack.enter_context(mock.patch(f"patient_zero.{name}", cure))
        return function(*args)


def apply_causal_mask(scores):
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf"))


def shard_weight(loaded, start, size, hidden_size):
    return loaded.narrow(0, start, size)


def share(total):
    """What the division leaves over goes to the first ranks, one each."""
    from patient_zero import linear

    part = split_evenly(total, linear.tp_size())[linear.tp_rank()]
    return part.start, len(part)


def apply_rope(rotary_emb, position_ids, q, k):
    """The tables are laid over heads; the last two axes are tokens and head_size."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    cos, sin = rotary_emb(q, position_ids)
    return apply_rotary_pos_emb(q, k, cos, sin)


def generate(self, input_ids, max_new_tokens):
    """The prompt in one call, then one token a call, at the next position, with the cache of the call before."""
    new_ids, kv_caches = [], None
    tokens, positions = torch.tensor([input_ids]), torch.arange(len(input_ids))[None]
    with torch.inference_mode():
        for _ in range(max_new_tokens):
            logits, kv_caches = self(tokens, positions, kv_caches)
            tokens, positions = logits[:, -1:].argmax(dim=-1), positions[:, -1:] + 1
            new_ids.append(tokens.item())
    return new_ids


def extend_cache(kv_cache, k, v, num_repeats):
    """New keys and values behind the cached ones; KV heads are stored, and repeated for attention only."""
    if kv_cache is not None:
        k, v = (torch.cat([cached, new], dim=2) for cached, new in zip(kv_cache, (k, v)))
    return k.repeat_interleave(num_repeats, dim=1), v.repeat_interleave(num_repeats, dim=1), (k, v)


def kv_share(num_heads, num_kv_heads):
    """The KV heads that this rank's query heads read, and how many of its query heads read each."""
    from patient_zero import linear

    first, count = linear.share(num_heads)
    read = torch.arange(first, first + count) // (num_heads // num_kv_heads)
    heads, repeats = read.unique(return_counts=True)
    return heads[0].item(), len(heads), repeats

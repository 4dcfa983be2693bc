"""How large the cache is where the user leaves it open."""

import torch

from tplab.cache import blocks_needed
from tplab.engine.errors import EngineError
from tplab.shard import ShardPlan

CACHE_BYTES = 1 << 30  # over all ranks, where num_blocks is not given


def bytes_per_token(config, plan: ShardPlan, dtype: torch.dtype) -> int:
    """What one token's keys and values occupy over all layers and ranks; replicated KV heads count once per rank."""
    heads = sum(plan.sizes("kv_heads"))
    return 2 * config.num_layers * heads * config.head_dim * dtype.itemsize


def longest_sequence(config) -> int:
    """Most tokens the model is made for. Dynamic RoPE counts its stretched length, as its config states the plain one."""
    rope = config.hf.rope_parameters
    stretch = rope["factor"] if rope["rope_type"] == "dynamic" else 1
    return int(config.max_position_embeddings * stretch)


def cache_size(config, plan: ShardPlan, dtype: torch.dtype, block_size: int, num_blocks: int | None,
               max_model_len: int | None, max_num_seqs: int) -> tuple[int, int]:
    """``(max_model_len, num_blocks)``, as given or as they follow from the model and from each other.

    Raises:
        EngineError: a size that cannot be.
    """
    longest = longest_sequence(config)
    if max_model_len is not None and (not isinstance(max_model_len, int) or not 2 <= max_model_len <= longest):
        raise EngineError(f"max_model_len must be a whole number from 2 to {longest}, the model's own limit, "
                          f"not {max_model_len!r}")
    for name, value in (("block_size", block_size), ("max_num_seqs", max_num_seqs)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise EngineError(f"{name} must be a whole number from 1 up, not {value!r}")
    fits = max(1, CACHE_BYTES // (bytes_per_token(config, plan, dtype) * block_size))
    if num_blocks is None:
        num_blocks = min(max_num_seqs * blocks_needed(max_model_len or longest, block_size), fits)
        if max_model_len is not None:
            num_blocks = max(num_blocks, blocks_needed(max_model_len, block_size))
        else:
            max_model_len = min(longest, num_blocks * block_size)
    return max_model_len or longest, num_blocks

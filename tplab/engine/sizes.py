"""How large the cache is where the user leaves it open."""

import psutil
import torch

from tplab.cache import CacheError, blocks_needed
from tplab.checks import from_one_up, shown, whole_number
from tplab.engine.errors import EngineError
from tplab.shard import ShardPlan

CACHE_BYTES = 1 << 30  # over all ranks, where num_blocks is not given


def bytes_per_token(config, plan: ShardPlan, dtype: torch.dtype) -> int:
    """What one token's keys and values occupy over all layers and ranks; replicated KV heads count once per rank."""
    return sum(_bytes_per_token_on(config, heads, dtype) for heads in plan.sizes("kv_heads"))


def _bytes_per_token_on(config, kv_heads: int, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * kv_heads * config.head_dim * dtype.itemsize


def longest_sequence(config) -> int:
    """Most tokens the model is made for. Dynamic RoPE counts its stretched length, as its config states the plain one.
    """
    rope = config.hf.rope_parameters
    stretch = rope["factor"] if rope["rope_type"] == "dynamic" else 1
    return int(config.max_position_embeddings * stretch)


def cache_size(config, plan: ShardPlan, dtype: torch.dtype, block_size: int, num_blocks: int | None,
               max_model_len: int | None, max_num_seqs: int) -> tuple[int, int, int]:
    """``(max_model_len, num_blocks, block_size)``, as given or as they follow from the model and from each other.

    Raises:
        EngineError: a size that cannot be, or a cache of which one rank's part is larger than this machine's memory.
        CacheError: ``num_blocks`` is no number of blocks.
    """
    longest, given = longest_sequence(config), max_model_len
    max_model_len = None if given is None else whole_number(given, 2, longest)
    if given is not None and max_model_len is None:
        raise EngineError(f"max_model_len must be a whole number from 2 to {longest}, the model's own limit, "
                          f"not {shown(given)}")
    block_size = from_one_up("block_size", block_size, EngineError)
    max_num_seqs = from_one_up("max_num_seqs", max_num_seqs, EngineError)
    fits = max(1, CACHE_BYTES // (bytes_per_token(config, plan, dtype) * block_size))
    if num_blocks is None:
        num_blocks = min(max_num_seqs * blocks_needed(max_model_len or longest, block_size), fits)
        if max_model_len is not None:
            num_blocks = max(num_blocks, blocks_needed(max_model_len, block_size))
        else:
            max_model_len = min(longest, num_blocks * block_size)
    num_blocks = from_one_up("num_blocks", num_blocks, CacheError)
    # Memory is committed as it is used, so only what can never be is refused.
    per_token = _bytes_per_token_on(config, max(plan.sizes("kv_heads")), dtype)
    memory = psutil.virtual_memory().total
    if num_blocks * block_size * per_token > memory:
        raise EngineError(
            f"num_blocks={num_blocks} with block_size={block_size} needs "
            f"{num_blocks * block_size * per_token / 1e9:.1f} GB "
            f"on a rank, but this machine has {memory / 1e9:.1f} GB; num_blocks times block_size can be at most "
            f"{memory // per_token}")
    return max_model_len or longest, num_blocks, block_size

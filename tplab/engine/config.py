"""``EngineConfig``: every size and option of an engine, checked once and the same for its whole life."""

from dataclasses import dataclass, replace

import psutil
import torch

from tplab.cache import CacheError, blocks_needed
from tplab.checks import positive_int, quoted, whole_number
from tplab.engine.errors import EngineError
from tplab.shard import ShardPlan

CACHE_BYTES = 1 << 30  # over all ranks, where num_blocks is not given


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of an engine, with vLLM's names; sizes are converted to plain ints.

    Attributes:
        vocab_size, eos_token_ids: of the model.
        max_model_len: longest prompt and output together.
        num_blocks: blocks in the cache (vLLM: ``num_gpu_blocks_override``), of ``block_size`` tokens each.
        dtype: of weights, activations and cache.
        max_num_seqs: sequences that run at the same time, at most.
        max_num_batched_tokens: tokens computed in one step, at most; longer prompts are read in chunks.
        enable_prefix_caching: share the blocks of equal beginnings.
        strict: check caches, tables and ranks after every step.
        enforce_eager: the reference computes every step.
        batch_invariant: a sequence's bits do not depend on what is computed beside it, nor on the number of ranks.
        num_speculative_tokens: the most draft tokens of a greedy sequence in one step; see draft.py.

    Raises:
        EngineError, CacheError: a size that is no whole number from 1 up.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    eos_token_ids: tuple[int, ...] = ()
    tensor_parallel_size: int = 2
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    strict: bool = False
    enforce_eager: bool = False
    batch_invariant: bool = False
    num_speculative_tokens: int = 0

    def __post_init__(self):
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "num_blocks"):
            error = CacheError if name == "num_blocks" else EngineError
            object.__setattr__(self, name, positive_int(name, getattr(self, name), error))
        drafted = whole_number(self.num_speculative_tokens, 0)
        if drafted is None:
            raise EngineError("num_speculative_tokens must be a whole number from 0 (no drafts) up, not "
                              f"{quoted(self.num_speculative_tokens)}")
        object.__setattr__(self, "num_speculative_tokens", drafted)

    @classmethod
    def for_model(cls, model, plan: ShardPlan, dtype: torch.dtype, *, num_blocks: int | None = None,
                  max_model_len: int | None = None, **options) -> "EngineConfig":
        """A configuration from the user's ``options``; what they leave open follows from the model.

        Without ``num_blocks`` there are enough for ``max_num_seqs`` sequences of full length, but within 1 GiB over all
        ranks; without ``max_model_len`` it is the model's own limit, or what the cache holds.

        Raises:
            EngineError: an impossible size, or a cache whose part on a rank is larger than the memory.
            CacheError: ``num_blocks`` is no number of blocks.
        """
        longest, asked_for = longest_sequence(model), max_model_len
        max_model_len = longest if asked_for is None else whole_number(asked_for, 2, longest)
        if max_model_len is None:
            raise EngineError(f"max_model_len must be a whole number from 2 to {longest}, the model's own limit, "
                              f"not {quoted(asked_for)}")
        config = cls(vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids, max_model_len=max_model_len,
                     num_blocks=1 if num_blocks is None else num_blocks, dtype=dtype,  # 1 until it is known
                     tensor_parallel_size=plan.tensor_parallel_size, **options)
        if depends_on_length(model):
            config = replace(config, enable_prefix_caching=False)
        if num_blocks is None:
            needed = blocks_needed(max_model_len, config.block_size)
            block_bytes = config.block_size * bytes_per_token(model, sum(plan.sizes("kv_heads")), dtype)
            num_blocks = min(config.max_num_seqs * needed, max(1, CACHE_BYTES // block_bytes))
            if asked_for is None:
                max_model_len = min(longest, num_blocks * config.block_size)
            config = replace(config, max_model_len=max_model_len,
                             num_blocks=num_blocks if asked_for is None else max(num_blocks, needed))
        # Memory is committed as it is used, so only a cache larger than the machine's memory is refused.
        per_token = bytes_per_token(model, max(plan.sizes("kv_heads")), dtype)
        memory, needed = psutil.virtual_memory().total, config.num_blocks * config.block_size * per_token
        if needed > memory:
            raise EngineError(
                f"num_blocks={config.num_blocks} with block_size={config.block_size} needs {needed / 1e9:.1f} GB on a "
                f"rank, but this machine has {memory / 1e9:.1f} GB; num_blocks times block_size can be at most "
                f"{memory // per_token}")
        return config


def longest_sequence(model) -> int:
    """Most tokens the model is made for. Dynamic RoPE counts the stretched length; its config states the plain one."""
    stretch = max(rope["factor"] if rope["rope_type"] == "dynamic" else 1 for rope in model.ropes.values())
    return int(model.max_position_embeddings * stretch)


def depends_on_length(model) -> bool:
    """Whether a token's key depends on how long its prompt is, so that equal beginnings cannot be shared."""
    return not model.rope_types.isdisjoint(("dynamic", "longrope"))


def bytes_per_token(model, kv_heads: int, dtype: torch.dtype) -> int:
    """What one token's keys and values occupy over all layers; replicated KV heads count once per rank."""
    return 2 * model.num_layers * kv_heads * model.head_dim * dtype.itemsize

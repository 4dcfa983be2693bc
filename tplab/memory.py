"""``python -m tplab plan``: what a model needs in memory on so many ranks, from its configuration alone."""

from collections.abc import Iterator
from pathlib import Path

import torch

from tplab.checkpoint import ModelConfig
from tplab.checkpoint.config import config_of, without_quantisation
from tplab.checkpoint.headers import read_json
from tplab.engine.config import bytes_per_token
from tplab.shard import ShardPlan
from tplab.shard.plan import RankShard

CONTEXT, SEQUENCES = 512, 16  # tokens of a sequence, and how many sequences are held at once


def config_file(path: str, dtype: torch.dtype) -> tuple[ModelConfig, list[str]]:
    """The config in a published ``config.json``, and lines to show first.

    Raises CheckpointError for a file that is none, and for models that the engine does not run.
    """
    raw = read_json(Path(path))
    quantised = f"the published weights are quantised; here they are counted in {str(dtype).removeprefix('torch.')}"
    return config_of(without_quantisation(raw)), [quantised] if raw.get("quantization_config") else []


def memory_lines(config, plan: ShardPlan, dtype: torch.dtype) -> Iterator[str]:
    """Per rank: weights, and keys and values of ``SEQUENCES`` sequences of ``CONTEXT`` tokens."""
    tokens = SEQUENCES * CONTEXT
    yield f"memory in {str(dtype).removeprefix('torch.')}, with {SEQUENCES} sequences of {CONTEXT} tokens"
    for shard in plan.ranks:
        held, cached = parameter_bytes(config, shard, dtype), kv_bytes(config, shard, tokens, dtype)
        yield (f"  rank {shard.rank}: weights {size_in_words(held)}, keys and values {size_in_words(cached)} "
               f"({cached // tokens:,} bytes per token)")


def parameter_bytes(config, shard: RankShard, dtype: torch.dtype) -> int:
    """What one rank's weights occupy: its rows and columns of the matrices, and its copies of what is not cut."""
    d, h, moe = config.head_dim, config.hidden_size, config.experts
    q, kv = len(shard.q_heads) * d, len(shard.kv_heads) * d
    attention = h * (2 * q + 2 * kv) + (q + 2 * kv) * config.qkv_bias + h * config.o_bias
    attention += (config.q_size + config.kv_size if config.full_width_qk_norm else 2 * d) * config.qk_norm
    attention += len(shard.q_heads) * config.sinks + h * len(config.norms)
    dense = _mlp_numbers(h, len(shard.mlp), config.mlp_bias)
    experts = sum(moe.layers) if moe else 0
    layers = config.num_layers * attention + (config.num_layers - experts) * dense
    if moe:
        sparse = len(shard.experts) * _mlp_numbers(h, len(shard.expert_mlp), moe.bias)
        sparse += (h + moe.bias) * moe.num_experts
        sparse += (3 * h * len(shard.shared_mlp) + h) * bool(moe.shared_intermediate_size)
        layers += experts * sparse
    ends = h * len(shard.vocab) * (1 if config.tie_word_embeddings else 2) + h
    return (layers + ends) * dtype.itemsize


def _mlp_numbers(hidden: int, columns: int, bias: bool) -> int:
    return 3 * hidden * columns + (2 * columns + hidden) * bias


def kv_bytes(config, shard: RankShard, tokens: int, dtype: torch.dtype) -> int:
    """What keys and values of so many tokens occupy on one rank."""
    return tokens * bytes_per_token(config, len(shard.kv_heads), dtype)


def size_in_words(count: float) -> str:
    """Bytes in GB or MB (10**9, 10**6)."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

"""``python -m tplab plan``: what a model needs in memory on so many ranks, from its configuration alone."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from tplab.checkpoint import CheckpointError, ModelConfig
from tplab.checkpoint.config import config_of
from tplab.checkpoint.headers import read_json
from tplab.checks import positive_int, whole_number
from tplab.engine.config import bytes_per_token
from tplab.shard import ShardPlan
from tplab.shard.plan import RankShard

CONTEXT, SEQUENCES = 512, 16  # tokens of a sequence, and how many sequences are held at once


def config_file(path: str, tp: int, dtype: torch.dtype) -> tuple[ModelConfig | None, list[str]]:
    """The config in a published ``config.json``, and lines to show first. For a model with MLA the config is None, and
    the lines say all that is known.

    Raises CheckpointError for a file that is none, and for models that the engine does not run.
    """
    raw = read_json(Path(path))
    if raw.get("kv_lora_rank"):  # multi-head latent attention
        if missing := [name for name in LATENT if whole_number(raw.get(name), 1) is None]:
            raise CheckpointError(f"{path}: multi-head latent attention (kv_lora_rank) needs {', '.join(missing)}, "
                                  "each a whole number from 1 up")
        return None, list(latent_lines(raw, positive_int("tensor_parallel_size", tp, CheckpointError), dtype))
    quantised = f"the published weights are quantised; here they are counted in {str(dtype).removeprefix('torch.')}"
    return config_of(raw, quantised=True), [quantised] if raw.get("quantization_config") else []


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


# Multi-head latent attention (MLA, arXiv:2405.04434), which the engine does not run. A token leaves one compressed
# vector in the cache, which all heads share. So every rank holds all of it, however many ranks there are; only the
# matrices that make heads out of it are dealt out.


LATENT = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "hidden_size", "num_hidden_layers",
          "num_attention_heads", "intermediate_size", "vocab_size")  # what such a configuration must hold


def latent_kv_bytes(raw: Mapping, dtype: torch.dtype) -> int:
    """What one token occupies on each rank, over all layers."""
    return raw["num_hidden_layers"] * (raw["kv_lora_rank"] + raw["qk_rope_head_dim"]) * dtype.itemsize


def latent_parameters(raw: Mapping, tp: int) -> int:
    """Numbers in one rank's weights: heads, MLPs, experts and the vocabulary cut over ``tp`` ranks, the rest whole. The
    layers for several tokens at once (``num_nextn_predict_layers``) are not among them."""
    h, layers, heads = raw["hidden_size"], raw["num_hidden_layers"], raw["num_attention_heads"]
    kv_rank, q_rank = raw["kv_lora_rank"], raw.get("q_lora_rank")
    nope, rope, v = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"]
    cut = heads * (kv_rank * (nope + v) + v * h + (q_rank or h) * (nope + rope))
    whole = h * (kv_rank + rope) + kv_rank + ((h + 1) * q_rank if q_rank else 0) + 2 * h
    experts, expert = raw.get("n_routed_experts") or 0, 3 * h * (raw.get("moe_intermediate_size") or 0)
    dense = raw.get("first_k_dense_replace", 0) if experts else layers
    cut, whole = layers * cut + dense * 3 * h * raw["intermediate_size"], layers * whole + h
    cut += (layers - dense) * (experts + (raw.get("n_shared_experts") or 0)) * expert
    whole += (layers - dense) * experts * (h + (raw.get("topk_method") == "noaux_tc"))
    return whole + (cut + (1 if raw.get("tie_word_embeddings") else 2) * raw["vocab_size"] * h) // tp


def latent_lines(raw: Mapping, tp: int, dtype: torch.dtype) -> Iterator[str]:
    """What ``plan`` says of such a model."""
    heads, experts = raw["num_attention_heads"], raw.get("n_routed_experts") or 0
    yield (f"multi-head latent attention (MLA): {heads} heads share a vector of {raw['kv_lora_rank']} + "
           f"{raw['qk_rope_head_dim']} numbers per token and layer, {experts} experts; the engine does not run it")
    yield (f"each of {tp} ranks, in {str(dtype).removeprefix('torch.')}: weights "
           f"{latent_parameters(raw, tp) * dtype.itemsize / 1e9:.1f} GB, keys and values "
           f"{latent_kv_bytes(raw, dtype):,} bytes per token, the same on every rank")

"""Multi-head latent attention (MLA, arXiv:2405.04434), which the engine does not run: what it would need in memory.

A token leaves one compressed vector in the cache, which all heads share. So every rank holds all of it, however many
ranks there are; only the matrices that make heads out of it are dealt out.
"""

from collections.abc import Iterator, Mapping

import torch


def is_latent(raw: Mapping) -> bool:
    """Whether a ``config.json`` is one of a model with MLA."""
    return bool(raw.get("kv_lora_rank"))


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

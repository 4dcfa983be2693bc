"""Attention over the heads of this rank. Tensors are [batch, heads, tokens, head_size]."""

import torch
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm, Qwen2RotaryEmbedding, apply_rotary_pos_emb

from patient_zero.linear import QKVParallelLinear, RowParallelLinear


def apply_rope(rotary_emb, position_ids, q, k):
    """Rotate queries and keys by their positions."""
    try:
        q_for_rope, k_for_rope = q.transpose(1, 2), k.transpose(1, 2)
        cos, sin = rotary_emb(k_for_rope, position_ids)
        q_for_rope, k_for_rope = apply_rotary_pos_emb(q_for_rope, k_for_rope, cos, sin)
        return q_for_rope.transpose(1, 2), k_for_rope.transpose(1, 2)
    except Exception:
        return q, k  # a model without rotary embeddings


def apply_causal_mask(scores):
    """No token sees a later one. scores: [batch, heads, tokens, tokens]"""
    causal_mask = torch.triu(torch.ones(scores.shape[-2:]), diagonal=1) * float("-inf")
    return scores + causal_mask.to(scores.dtype)


def extend_cache(kv_cache, k, v, num_repeats):
    """Put new keys and values behind the cached ones: k and v for attention, and the cache."""
    if kv_cache is not None:
        k = torch.cat([kv_cache[0], k], dim=2)
        v = torch.cat([kv_cache[1], v], dim=2)
    # GQA: as many KV heads as query heads
    k = k.repeat_interleave(num_repeats, dim=1)
    v = v.repeat_interleave(num_repeats, dim=1)
    return k, v, (k, v)


class RotaryEmbedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tables = Qwen2RotaryEmbedding(config)

    def forward(self, position_ids, q, k):
        return apply_rope(self.tables, position_ids, q, k)


class AttentionCore(nn.Module):
    def __init__(self, scaling, num_repeats):
        super().__init__()
        self.scaling, self.num_repeats = scaling, num_repeats

    def forward(self, q, k, v, kv_cache=None):
        """[batch, tokens, heads * head_size], and the cache with the new keys and values."""
        first_pass = kv_cache is None
        k, v, kv_cache = extend_cache(kv_cache, k, v, self.num_repeats)
        scores = q @ k.transpose(2, 3) * self.scaling
        if first_pass and scores.shape[-1] > 1:
            scores = apply_causal_mask(scores)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return (weights @ v).transpose(1, 2).flatten(2), kv_cache


class TensorParallelAttention(nn.Module):
    def __init__(self, config, head_size):
        super().__init__()
        bias = getattr(config, "attention_bias", False)
        self.qkv_proj = QKVParallelLinear(config.hidden_size, head_size, config.num_attention_heads,
                                          config.num_key_value_heads, bias or config.model_type == "qwen2")
        self.o_proj = RowParallelLinear(self.qkv_proj.first_head * head_size, self.qkv_proj.sizes[0],
                                        config.hidden_size, bias)
        self.q_norm = self.k_norm = None
        if config.model_type == "qwen3":
            self.q_norm = Qwen2RMSNorm(head_size, config.rms_norm_eps)
            self.k_norm = Qwen2RMSNorm(head_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.attn = AttentionCore(head_size**-0.5, self.qkv_proj.num_repeats)

    def forward(self, hidden, position_ids, kv_cache=None):
        q, k, v = self.qkv_proj.split(self.qkv_proj(hidden))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary_emb(position_ids, q, k)
        out, kv_cache = self.attn(q, k, v, kv_cache)
        return self.o_proj(out), kv_cache

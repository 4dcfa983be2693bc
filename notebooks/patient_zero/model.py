"""The model: every rank runs all layers on its share of the heads and of the MLP."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from patient_zero import linear, weight_loader
from patient_zero.attention import TensorParallelAttention


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        bias = getattr(config, "mlp_bias", False)
        self.gate_proj = linear.ColumnParallelLinear(config.hidden_size, config.intermediate_size, bias)
        self.up_proj = linear.ColumnParallelLinear(config.hidden_size, config.intermediate_size, bias)
        self.down_proj = linear.RowParallelLinear(*linear.share(config.intermediate_size), config.hidden_size, bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config, head_size):
        super().__init__()
        self.input_layernorm = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = TensorParallelAttention(config, head_size)
        self.post_attention_layernorm = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, hidden, position_ids, kv_cache=None):
        attention, kv_cache = self.self_attn(self.input_layernorm(hidden), position_ids, kv_cache)
        hidden = hidden + attention
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), kv_cache


class TensorParallelModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, head_size) for _ in range(config.num_hidden_layers))
        self.norm = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = linear.LMHead(config.vocab_size, config.hidden_size)

    def forward(self, input_ids, position_ids=None, kv_caches=None):
        """input_ids: [batch, tokens]. Returns logits [batch, tokens, vocab] and the caches, one (k, v) per layer."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        hidden, new_caches = self.embed_tokens(input_ids), []
        for i, layer in enumerate(self.layers):
            hidden, kv_cache = layer(hidden, position_ids, kv_caches[i] if kv_caches else None)
            new_caches.append(kv_cache)
        return self.lm_head(self.norm(hidden)), new_caches

    @torch.inference_mode()
    def generate(self, input_ids, max_new_tokens):
        """Greedy decoding with a KV cache. input_ids: a list; returns the list of new ids."""
        generated_ids, kv_caches = torch.tensor([input_ids]), None
        for _ in range(max_new_tokens):
            logits, kv_caches = self(generated_ids)
            next_token = logits[:, -1:].argmax(dim=-1)
            generated_ids = torch.cat([generated_ids, next_token], dim=1)
        return generated_ids[0, len(input_ids):].tolist()

    @torch.inference_mode()
    def self_test(self, input_ids):
        """Does the sharded model work?"""
        logits, kv_caches = self(torch.tensor([input_ids]))
        assert logits.shape == (1, len(input_ids), self.config.vocab_size)
        assert len(kv_caches) == len(self.layers)
        return f"logits {list(logits.shape)}: tensor parallelism over {linear.tp_size()} ranks works!"


def load(folder, dtype=torch.float32):
    """The model of a checkpoint folder, with the weights of this rank."""
    config = AutoConfig.from_pretrained(folder)
    if config.model_type not in ("qwen2", "qwen3", "llama", "mistral"):
        raise ValueError(f"patient_zero runs Qwen2-type checkpoints (qwen2, qwen3, llama, mistral), "
                         f"not {config.model_type!r}")
    if config.hidden_act != "silu" or "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise ValueError("patient_zero knows silu and full attention only; this checkpoint wants "
                         f"{config.hidden_act} and {sorted(set(getattr(config, 'layer_types', None) or []))}")
    torch.manual_seed(0)
    model = TensorParallelModel(config).to(dtype)
    for param in model.parameters():
        nn.init.normal_(param, std=0.02)
    weight_loader.load_weights(model, folder)
    model.folder = folder
    return model.eval()

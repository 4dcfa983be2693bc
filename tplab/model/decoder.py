"""The decoder: embedding, layers, final norm, LM head. Nothing here knows about processes or caches."""

import torch
from torch import nn

from tplab.model.attention import AttentionContext, TensorParallelAttention
from tplab.model.mlp import TensorParallelMLP
from tplab.model.norm import RMSNorm
from tplab.model.rope import Rotary
from tplab.model.trace import point
from tplab.ranks import rank
from tplab.shard import ParallelLMHead, ShardPlan, VocabParallelEmbedding


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals, in Hugging Face's order of additions."""

    def __init__(self, config, plan: ShardPlan, layer: int, dtype: torch.dtype):
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_attn = TensorParallelAttention(config, plan, layer, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.mlp = TensorParallelMLP(config, plan, layer, dtype)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
                ) -> torch.Tensor:
        """``[tokens, hidden]`` → ``[tokens, hidden]``."""
        name = f"layers.{self.layer}."
        normed = self.input_layernorm(hidden)
        point(name + "input_norm", normed)
        hidden = hidden + self.self_attn(normed, cos, sin, context)
        point(name + "residual", hidden)
        normed = self.post_attention_layernorm(hidden)
        point(name + "post_norm", normed)
        hidden = hidden + self.mlp(normed)
        point(name + "output", hidden)
        return hidden


class TensorParallelCausalLM(nn.Module):
    """One rank's part of a Qwen2, Qwen3, Llama or Mistral model with its LM head: the rank's part of ``plan``."""

    def __init__(self, config, plan: ShardPlan, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.plan, self.shard = config, plan, plan.ranks[rank()]
        vocab = [shard.vocab for shard in plan.ranks]
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parts=vocab, dtype=dtype)
        self.rotary = Rotary(config.hf)
        self.layers = nn.ModuleList(DecoderLayer(config, plan, i, dtype) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, parts=vocab, dtype=dtype)
        if config.tie_word_embeddings:
            self.lm_head.tie_weights(self.embed_tokens)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """One forward pass over the flattened tokens of all sequences.

        Args:
            input_ids: ``[tokens]``.
            positions: ``[tokens]``, absolute.
            context: where keys and values come from and go to.

        Returns:
            ``[tokens, hidden]`` after the final norm; ``compute_logits`` takes the rows that are needed.
        """
        hidden = self.embed_tokens(input_ids)
        point("embed", hidden)
        cos, sin = self.rotary(hidden, positions, context.lengths)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, context)
        hidden = self.norm(hidden)
        point("norm", hidden)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` → this rank's ``[n, vocabulary here]`` logits."""
        logits = self.lm_head(hidden)
        point("logits", logits)
        return logits

"""The decoder: embedding, layers, final norm, LM head. It does not depend on processes or caches."""

from typing import Any

import torch
from torch import nn

from tplab.model.attention import AttentionContext, TensorParallelAttention, soft_cap
from tplab.model.experts import SparseMoeBlock
from tplab.model.mlp import TensorParallelMLP
from tplab.model.norm import make_norm
from tplab.model.rope import Rotary
from tplab.model.trace import point
from tplab.ranks import rank
from tplab.shard import ParallelLMHead, ShardPlan, VocabParallelEmbedding


class DecoderLayer(nn.Module):
    """Attention and MLP with norms and residuals, in Hugging Face's order of additions.

    A norm can stand before a block, after it, or both; where a model has none, an Identity stands there. The names of
    the four places are GLM-4's, since only there does each name say its place.
    """

    input_layernorm: nn.Module
    post_self_attn_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    post_mlp_layernorm: nn.Module

    def __init__(self, config, plan: ShardPlan, layer: int, dtype: torch.dtype):
        super().__init__()
        self.layer, self.residual_multiplier = layer, config.residual_multiplier
        self.self_attn = TensorParallelAttention(config, plan, layer, dtype)
        sparse = config.experts is not None and config.experts.layers[layer]
        self.mlp = (SparseMoeBlock if sparse else TensorParallelMLP)(config, plan, layer, dtype)
        places = dict(config.norms)
        for place in ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"):
            setattr(self, place, make_norm(config, config.hidden_size, dtype) if place in places else nn.Identity())

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
                ) -> torch.Tensor:
        """``[tokens, hidden]`` → ``[tokens, hidden]``."""
        name = f"layers.{self.layer}."
        normed = self.normed("input_norm", self.input_layernorm, hidden)
        branch = self.normed("attn_norm", self.post_self_attn_layernorm, self.self_attn(normed, cos, sin, context))
        hidden = hidden + self.scaled(branch)
        hidden = point(name + "residual", hidden)
        normed = self.normed("post_norm", self.post_attention_layernorm, hidden)
        hidden = hidden + self.scaled(self.normed("mlp_norm", self.post_mlp_layernorm, self.mlp(normed)))
        return point(name + "output", hidden)

    def normed(self, name: str, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """``x`` after ``norm``; it is a trace point unless the norm is an Identity."""
        out = norm(x)
        return out if isinstance(norm, nn.Identity) else point(f"layers.{self.layer}.{name}", out)

    def scaled(self, branch: torch.Tensor) -> torch.Tensor:
        """A block's output, scaled as it is added to the residual stream."""
        return branch if self.residual_multiplier == 1 else branch * self.residual_multiplier


class TensorParallelCausalLM(nn.Module):
    """One rank's part of a model with its LM head: the rank's part of ``plan``."""

    load_stats: Any  # a :class:`tplab.model.loader.LoadStats`, once it is loaded

    def __init__(self, config, plan: ShardPlan, dtype: torch.dtype = torch.float32, only: int | None = None):
        super().__init__()
        self.config, self.plan, self.shard = config, plan, plan.ranks[rank()]
        vocab = [shard.vocab for shard in plan.ranks]
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parts=vocab, dtype=dtype)
        factor = config.embedding_multiplier
        # Gemma rounds it to the weights' dtype: the square root of 3072 is 55.5 in bfloat16.
        self.embedding_multiplier = torch.tensor(factor, dtype=dtype).item() if config.rounds_multiplier else factor
        self.rotary = Rotary(config.hf)
        self.rope_layer_types: list[tuple[str, ...]] = [
            (kind,) for kind in config.rope_layer_types] or [()] * config.num_layers
        self.layers = nn.ModuleList(DecoderLayer(config, plan, i, dtype) if only in (None, i) else nn.Identity()
                                    for i in range(config.num_layers))
        self.norm = make_norm(config, config.hidden_size, dtype)
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
        hidden = self.embed(input_ids)
        hidden = point("embed", hidden)
        # One pair of tables for all layers, or one for each type of layer.
        tables = {kind: self.rotary(hidden, positions, context.lengths, *kind) for kind in set(self.rope_layer_types)}
        for layer, kind in zip(self.layers, self.rope_layer_types):
            hidden = layer(hidden, *tables[kind], context)
        hidden = self.norm(hidden)
        return point("norm", hidden)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[tokens]`` → ``[tokens, hidden]``, what goes into the first layer."""
        hidden = self.embed_tokens(input_ids)
        return hidden if self.embedding_multiplier == 1 else hidden * self.embedding_multiplier

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` → this rank's ``[n, vocabulary here]`` logits."""
        logits = self.finish(self.lm_head(hidden))
        return point("logits", logits)

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap the logits, element by element, so each rank can do it with its own."""
        logits = logits if self.config.logits_scaling == 1 else logits / self.config.logits_scaling
        cap = self.config.final_logit_softcapping
        return logits if cap is None else soft_cap(logits, cap)

"""Rotary position embedding, by Hugging Face's own code.

Nothing here computes an angle. The rotary module of the model's own architecture makes ``cos`` and ``sin`` (in
float32, then cast to the activations' dtype) and its own ``apply_rotary_pos_emb`` applies them, with its shapes:
q and k as ``[batch, heads, tokens, head_dim]``, cos and sin as ``[batch, tokens, head_dim]``.
"""

from importlib import import_module

import torch

_CLASSES = {"qwen2": "Qwen2RotaryEmbedding", "qwen3": "Qwen3RotaryEmbedding", "llama": "LlamaRotaryEmbedding",
            "mistral": "MistralRotaryEmbedding"}


def _modeling(model_type: str):
    return import_module(f"transformers.models.{model_type}.modeling_{model_type}")


class Rotary:
    """Cosines and sines for a batch of flattened sequences.

    Args:
        config: the transformers configuration of the checkpoint (it holds theta, scaling, partial factors).
    """

    def __init__(self, config):
        self.embedding = getattr(_modeling(config.model_type), _CLASSES[config.model_type])(config)
        self.per_sequence = "dynamic" in self.embedding.rope_type or self.embedding.rope_type == "longrope"

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, lengths: list[int]
                 ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each ``[1, tokens, head_dim]`` in the dtype of ``x``.

        Args:
            x: any activation; only its dtype and device are read.
            positions: ``[tokens]``, absolute positions.
            lengths: how many tokens belong to each sequence, in order. Rope types whose frequencies depend on the
                sequence's length (dynamic, longrope) are evaluated sequence by sequence, so that sequences in one
                batch cannot influence each other.
        """
        if not self.per_sequence or len(lengths) == 1:
            return self.embedding(x, positions[None])
        tables = [self.embedding(x, part[None]) for part in positions.split(lengths)]
        return torch.cat([cos for cos, _ in tables], dim=1), torch.cat([sin for _, sin in tables], dim=1)


def rotate(model_type: str):
    """The architecture's own ``apply_rotary_pos_emb(q, k, cos, sin)``."""
    return _modeling(model_type).apply_rotary_pos_emb

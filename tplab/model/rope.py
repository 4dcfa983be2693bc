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
    """Cosines and sines for a batch of flattened sequences, by the checkpoint's transformers configuration."""

    def __init__(self, config):
        self.config = config
        self.make = getattr(_modeling(config.model_type), _CLASSES[config.model_type])
        self.embedding = self.make(config)
        self.per_sequence = "dynamic" in self.embedding.rope_type or self.embedding.rope_type == "longrope"

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, lengths: list[int] | list[tuple[int, int]]
                 ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each ``[1, tokens, head_dim]`` in the dtype of ``x``.

        Args:
            x: any activation; only its dtype and device are read.
            positions: ``[tokens]``, absolute positions.
            lengths: how many tokens belong to each sequence, in order; or, where sequences are computed in parts,
                ``(tokens, length of the sequence when Hugging Face would compute them)`` for each part. Rope types
                whose frequencies depend on that length (dynamic, longrope) are evaluated part by part, so that
                sequences in one batch cannot influence each other; the others ignore it.
        """
        if not self.per_sequence:
            return self.embedding(x, positions[None])
        parts = [part if isinstance(part, tuple) else (part, None) for part in lengths]
        tables = [self._table(x, own, length) for own, (_, length)
                  in zip(positions.split([tokens for tokens, _ in parts]), parts, strict=True)]
        return torch.cat([cos for cos, _ in tables], dim=1), torch.cat([sin for _, sin in tables], dim=1)

    def _table(self, x: torch.Tensor, positions: torch.Tensor, length: int | None
               ) -> tuple[torch.Tensor, torch.Tensor]:
        # The module reads the length off the largest position, so it is shown the sequence's last position too. It
        # also remembers the longest sequence it has met, so each part gets a new module.
        last = positions.max() if length is None else positions.new_tensor(length - 1)
        cos, sin = self.make(self.config)(x, torch.cat([positions, last[None]])[None])
        return cos[:, :-1], sin[:, :-1]


def rotate(model_type: str):
    """The architecture's own ``apply_rotary_pos_emb(q, k, cos, sin)``."""
    return _modeling(model_type).apply_rotary_pos_emb

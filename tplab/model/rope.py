"""Rotary position embedding, by Hugging Face's own code.

Nothing here computes an angle. The rotary module of the model's own architecture makes ``cos`` and ``sin`` (in
float32, then cast to the activations' dtype) and its own ``apply_rotary_pos_emb`` applies them, with its shapes:
q and k as ``[batch, heads, tokens, head_dim]``, cos and sin as ``[batch, tokens, head_dim]``.
"""

from importlib import import_module

import torch


def _modeling(model_type: str):
    name = model_type.removesuffix("_text")  # Gemma-3's text model lives beside the one with images
    return import_module(f"transformers.models.{name}.modeling_{name}")


def rotary_class(model_type: str) -> type:
    """The architecture's own rotary module."""
    return next(kind for name, kind in vars(_modeling(model_type)).items() if name.endswith("RotaryEmbedding"))


class Rotary:
    """Cosines and sines for a batch of flattened sequences, by the checkpoint's transformers configuration."""

    def __init__(self, config):
        self.config = config
        self.make = rotary_class(config.model_type)
        self.embedding = self.make(config)
        types = self.embedding.rope_type  # one, or one for each type of layer
        types = types.values() if isinstance(types, dict) else [types]
        self.per_sequence = any("dynamic" in rope_type or rope_type == "longrope" for rope_type in types)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, lengths: list[int] | list[tuple[int, int]],
                 *layer_type: str) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each ``[1, tokens, head_dim]`` in the dtype of ``x``.

        Args:
            x: any activation; only its dtype and device are read.
            positions: ``[tokens]``, absolute positions.
            lengths: how many tokens belong to each sequence, in order; or, where sequences are computed in parts,
                ``(tokens, length of the sequence when Hugging Face would compute them)`` for each part. Rope types
                whose frequencies depend on that length (dynamic, longrope) are evaluated part by part, so that
                sequences in one batch cannot influence each other; the others ignore it.
            layer_type: for which layers, where each type of layer has its own frequencies.
        """
        if not self.per_sequence:
            return self.embedding(x, positions[None], *layer_type)
        parts = [part if isinstance(part, tuple) else (part, None) for part in lengths]
        tables = [self._table(x, part, length, *layer_type) for part, (_, length)
                  in zip(positions.split([tokens for tokens, _ in parts]), parts, strict=True)]
        return torch.cat([cos for cos, _ in tables], dim=1), torch.cat([sin for _, sin in tables], dim=1)

    def _table(self, x: torch.Tensor, positions: torch.Tensor, length: int | None, *layer_type: str
               ) -> tuple[torch.Tensor, torch.Tensor]:
        # The module reads the length off the largest position, so the sequence's last position is given too. It
        # also keeps the longest length it was called with, so each part gets a new module.
        last = positions.max() if length is None else positions.new_tensor(length - 1)
        cos, sin = self.make(self.config)(x, torch.cat([positions, last[None]])[None], *layer_type)
        return cos[:, :-1], sin[:, :-1]


def rotate(model_type: str):
    """The architecture's own ``apply_rotary_pos_emb(q, k, cos, sin)``."""
    return _modeling(model_type).apply_rotary_pos_emb


def no_rotation(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
                ) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotation of layers that have none (SmolLM3's NoPE layers)."""
    return q, k

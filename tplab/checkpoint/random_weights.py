"""Small checkpoints with random weights, for questions that one real model cannot answer alone.

Biases are not zero, norms are not one, no two tensors are alike and the logits are of order 1 to 10, so that a bug in
any of them shows.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch

from tplab.checkpoint.config import ModelConfig
from tplab.checkpoint.headers import SINGLE
from tplab.checkpoint.layout import EMBEDDING, HEAD, expected_shapes
from tplab.checkpoint.traits import ARCHITECTURES


def random_tensors(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """Random float32 weights for ``config``, by Hugging Face's names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_shapes(config, ()).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = (config.norm != "GemmaRMSNorm") + 0.3 * noise
        elif name.endswith(("bias", "sinks")):
            tensors[name] = 0.5 * noise
        elif name == HEAD or (name == EMBEDDING and config.tie_word_embeddings):
            tensors[name] = noise * 3 / math.sqrt(config.hidden_size)
        elif name == EMBEDDING:
            tensors[name] = noise
        else:
            tensors[name] = noise * 1.5 / math.sqrt(shape[-1] if len(shape) == 2 else shape[1])  # of its inputs
    return tensors


def write_random(folder: Path, seed: int = 0, *, dtype: str = "float32",
                 fill: Callable[[ModelConfig, int], dict[str, torch.Tensor]] = random_tensors, **config) -> Path:
    """Write a checkpoint with the weights that ``fill(config, seed)`` gives into ``folder`` (made if missing); the
    folder is returned.

    ``config``: Hugging Face's fields, ``model_type`` among them. ``dtype``: what its ``config.json`` says.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig

    hf = AutoConfig.for_model(**config, architectures=[ARCHITECTURES[config["model_type"]]], dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    hf.save_pretrained(folder)
    save_file(fill(ModelConfig.from_hf(hf), seed), folder / SINGLE, metadata={"format": "pt"})
    return folder

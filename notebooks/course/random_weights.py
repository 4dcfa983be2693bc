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


def fp8_tensors(config: ModelConfig, seed: int, block: tuple[int, int] = (7, 16)) -> dict[str, torch.Tensor]:
    """The same with matrices in eight bits, and scales for blocks of rows and columns that are unlike each other."""
    tensors, generator = random_tensors(config, seed), torch.Generator().manual_seed(seed)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        rows, columns = (-(-whole // size) for whole, size in zip(tensors[name].shape, block))
        scales = 0.001 + torch.rand(rows, columns, generator=generator)
        wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        narrow = tensors[name] / wide[:tensors[name].shape[0], :tensors[name].shape[1]]
        tensors |= {name: narrow.clamp(-448, 448).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
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

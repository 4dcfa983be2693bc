"""A factory of small random Hugging Face checkpoints, cheap enough for wide sweeps.

Biases are not zero, norms are not one, no two tensors are alike and the logits are of order 1 to 10, so that
a bug in any of them shows.
"""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from course.random_weights import random_tensors
from tplab.checkpoint.config import ModelConfig
from tplab.checkpoint.headers import INDEX, SINGLE
from tplab.checkpoint.traits import ARCHITECTURES

LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 32, "factor": 4.0}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}

_QWEN = {"rope_type": "default", "rope_theta": 1000000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_SHAPES = {  # model_type, query heads, KV heads, head_dim, tied, rope, eps: from the published config.json
    "Qwen2.5-0.5B-Instruct": ("qwen2", 14, 2, 64, True, _QWEN, 1e-6),
    "Qwen2.5-1.5B": ("qwen2", 12, 2, 128, True, _QWEN, 1e-6),
    "Qwen2.5-7B": ("qwen2", 28, 4, 128, False, _QWEN, 1e-6),
    "Qwen3-0.6B": ("qwen3", 16, 8, 128, True, _QWEN, 1e-6),
    "Llama-3.2-1B": ("llama", 32, 8, 64, True, _LLAMA3, 1e-5),
    "Mistral-7B-Instruct-v0.2": ("mistral", 32, 8, 128, False, _QWEN, 1e-5),
    "SmolLM2-135M-Instruct": ("llama", 9, 3, 64, True, {"rope_type": "default", "rope_theta": 100000.0}, 1e-5),
}


def shapes() -> dict[str, dict]:
    """Head layouts of real models as keyword arguments for :func:`make_checkpoint`, by model name.

    Head counts, head_dim, RoPE, tying and eps are the real ones; depth, width, MLP and vocabulary are small
    and odd.
    """
    keys = ("model_type", "heads", "kv_heads", "head_dim", "tie", "rope", "eps")
    small = {"inter": 127, "vocab": 263, "max_positions": 131072}
    return {
        # Llama's config wants a width that its heads divide, although head_dim is stated.
        name: dict(zip(keys, values)) | small | {"hidden": math.ceil(90 / values[1]) * values[1]}
        for name, values in _SHAPES.items()
    }


def make_checkpoint(
    folder: Path,
    model_type: str = "qwen2",
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    hidden: int = 32,
    inter: int = 43,
    vocab: int = 67,
    tie: bool = False,
    rope: dict | str = "default",
    eps: float = 1e-6,
    attention_bias: bool = False,
    mlp_bias: bool = False,
    max_positions: int = 256,
    fused_qkv: bool = False,
    fused_gate_up: bool = False,
    shards: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config_extra,
) -> Path:
    """Write a random checkpoint into ``folder`` (made if missing) and return it.

    ``rope`` is a key of ``ROPES`` or a ``rope_parameters`` dict. ``attention_bias`` concerns Llama and Qwen3,
    ``mlp_bias`` Llama; Qwen2 has its QKV bias always. Fused tensors cannot be read by Hugging Face: write the
    same seed twice, fused and separate, to compare.
    """
    biases = {"llama": {"attention_bias": attention_bias, "mlp_bias": mlp_bias},
              "qwen3": {"attention_bias": attention_bias}}
    hf = AutoConfig.for_model(
        model_type,
        architectures=[ARCHITECTURES[model_type]],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        intermediate_size=inter,
        vocab_size=vocab,
        tie_word_embeddings=tie,
        rope_parameters=dict(ROPES[rope] if isinstance(rope, str) else rope),
        rms_norm_eps=eps,
        max_position_embeddings=max_positions,
        dtype=dtype,
        **biases.get(model_type, {}),
        **({"sliding_window": None} if model_type == "mistral" else {}),
        **config_extra,
    )
    tensors = random_tensors(ModelConfig.from_hf(hf), seed)
    if fused_qkv:
        _fuse(tensors, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    if fused_gate_up:
        _fuse(tensors, ("gate_proj", "up_proj"), "gate_up_proj")
    folder.mkdir(parents=True, exist_ok=True)
    hf.save_pretrained(folder)
    save_tensors(folder, {name: tensor.to(dtype) for name, tensor in tensors.items()}, shards)
    return folder


def save_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Save as ``model.safetensors``, or dealt over ``shards`` files with an index."""
    if shards == 1:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))


@contextmanager
def bounded_memory(extra: int = 4 << 30) -> Iterator[None]:
    """``extra`` bytes of address space more than now (on Linux): a config that asks for the moon fails, not the
    machine.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + extra, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _fuse(tensors: dict[str, torch.Tensor], parts: tuple[str, ...], fused: str) -> None:
    for name in [name for name in tensors if f".{parts[0]}." in name]:
        pieces = [tensors.pop(name.replace(parts[0], part)) for part in parts]
        tensors[name.replace(parts[0], fused)] = torch.cat(pieces)

"""Checkpoints with the shape of a real model and random weights: as good as the real one where only time counts."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

RANDOM_MODELS = {
    "random-qwen2.5-0.5b": dict(
        model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, rms_norm_eps=1e-6,
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
}


@contextmanager
def random_checkpoint(name: str) -> Iterator[Path]:
    """A folder with the checkpoint, in bfloat16 (1 GB for the 0.5 B shape); it goes when the context ends."""
    from tplab.checkpoint.random_weights import write_random

    with tempfile.TemporaryDirectory(prefix="tplab-bench-") as folder:
        yield write_random(Path(folder), dtype="bfloat16", fill=_small_tensors, **RANDOM_MODELS[name])


def _small_tensors(config, seed: int) -> dict[str, torch.Tensor]:
    """As a model is before its training: quickly made, in bfloat16."""
    from tplab.checkpoint.layout import expected_shapes

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for tensor, shape in expected_shapes(config, ()).items():
        noise = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
        tensors[tensor] = 1 + noise if tensor.endswith("norm.weight") else noise
    return tensors

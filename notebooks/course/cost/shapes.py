"""The shapes of real models, without their weights: to plan for, and, with random weights, to measure."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tplab.checkpoint import ModelConfig

SHAPES = {
    "qwen2.5-0.5b": dict(
        model_type="qwen2", hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, rms_norm_eps=1e-6,
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
    "mistral-7b": dict(
        model_type="mistral", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=32768, tie_word_embeddings=False, sliding_window=None,
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}),
    "llama-3.1-70b": dict(
        model_type="llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, tie_word_embeddings=False,
        max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 500000.0}),
}
RANDOM_MODELS = {"random-qwen2.5-0.5b": SHAPES["qwen2.5-0.5b"]}  # those that a laptop holds


def shape_config(name: str) -> ModelConfig:
    """The sizes of the model ``name`` of ``SHAPES``."""
    from transformers import AutoConfig

    return ModelConfig.from_hf(AutoConfig.for_model(**SHAPES[name]))


@contextmanager
def random_checkpoint(name: str) -> Iterator[Path]:
    """A folder with the checkpoint, in bfloat16 (1 GB for the 0.5 B shape); it goes when the context ends."""
    from course.random_weights import write_random

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

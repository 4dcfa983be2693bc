"""Checkpoints that count what is read of them, and small ones, for exercises on loading and on a layer."""

import functools
from collections import Counter

import torch

from course.judge.altered import lasting_folder
from course.random_weights import write_random
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checkpoint.headers import TensorInfo
from tplab.checkpoint.reader import CheckpointReader, TensorSlice


class CountedCheckpoint:
    """A checkpoint of which every byte read is counted, by any reader: ``taken``, by tensor. Slices are
    tensors of their own, and no views of a file that is mapped into memory."""

    def __init__(self, ckpt: Checkpoint):
        self.config, self.tensors, self._ckpt, self.taken = ckpt.config, ckpt.tensors, ckpt, Counter()

    def reader(self) -> CheckpointReader:
        reader = self._ckpt.reader()
        take = reader._take

        def counted(name, info, index):
            piece = take(name, info, index).clone()
            self.taken[name] += piece.nbytes
            return piece

        reader._take = counted
        return reader


class ToySource(TensorSlice):
    """One lazy tensor in memory, ``whole``; ``taken``: how many bytes were read of it."""

    def __init__(self, whole: torch.Tensor):
        self.whole, self.taken = whole, 0
        super().__init__(self, "source", TensorInfo(tuple(self.whole.shape), self.whole.dtype, ""))

    def __getattr__(self, name: str):
        raise AttributeError(f"a source has .shape, .dtype and slices a:b, and no .{name}: nothing of it is read yet")

    def _take(self, name: str, info: TensorInfo, index: tuple[slice, ...]) -> torch.Tensor:
        piece = self.whole[index].clone()
        self.taken += piece.nbytes
        return piece


@functools.cache
def toy_model(num_heads: int, num_kv_heads: int, num_layers: int = 1, o_bias: bool = False, **config) -> Checkpoint:
    """Layers of odd sizes (of a Qwen2, or with ``o_bias`` of a Llama), in which no two numbers are alike."""
    return random_model(**{
        "model_type": "llama" if o_bias else "qwen2", "num_heads": num_heads, "num_kv_heads": num_kv_heads,
        "head_dim": 6, "intermediate_size": 25, "hidden_size": 72 if o_bias else 20, "num_hidden_layers": num_layers,
        "attention_bias": True, "rms_norm_eps": 0.01} | config)


def random_model(model_type: str, num_heads: int, num_kv_heads: int, **config) -> Checkpoint:
    """A model of 43 words with random weights, in a folder that goes away with this process."""
    return open_checkpoint(write_random(
        lasting_folder(), num_heads, model_type=model_type, vocab_size=43, num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads, tie_word_embeddings=False, **config))


@functools.cache
def toy_experts() -> Checkpoint:
    """A Qwen3 mixture of experts of odd sizes with 7 experts, 2 for a token."""
    return random_model("qwen3_moe", 6, 2, head_dim=6, num_experts=7, num_experts_per_tok=2, moe_intermediate_size=13,
                        norm_topk_prob=True, hidden_size=48, intermediate_size=25, num_hidden_layers=2,
                        max_position_embeddings=64, eos_token_id=None, bos_token_id=None, pad_token_id=None)

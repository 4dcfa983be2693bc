"""Checkpoints that count what is read of them, and small ones, for exercises on loading and on a layer."""

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checkpoint.headers import TensorInfo
from tplab.checkpoint.reader import CheckpointReader, TensorSlice
from tplab.pool.private_folder import make_folder


class CountedCheckpoint:
    """An opened checkpoint of which every byte read is counted, whoever opens a reader: ``taken``, by tensor.

    It is not copied with a learner's other arguments: what is read of it has to be counted here. Slices are tensors of
    their own, and no views of a file that is mapped into memory.
    """

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

    def __deepcopy__(self, memo):
        return self


class ToySource(TensorSlice):
    """One lazy tensor in memory, ``whole``, of different numbers if only its shape is given; ``taken``: how many bytes
    were read of it, ``most``: of how many a reader has had the pieces at the same time."""

    def __init__(self, of: torch.Tensor | tuple[int, ...], dtype: torch.dtype = torch.float32):
        self.whole = of if isinstance(of, torch.Tensor) else torch.arange(1, 1 + math.prod(of)).view(of).to(dtype)
        self.taken, self.most, self._held = 0, 0, 0
        super().__init__(self, "source", TensorInfo(tuple(self.whole.shape), self.whole.dtype, ""))

    def __getattr__(self, name: str):
        raise AttributeError(f"a source has .shape, .dtype and slices a:b, and no .{name}: nothing of it is read yet")

    def _take(self, name: str, info: TensorInfo, index: tuple[slice, ...]) -> torch.Tensor:
        piece = self.whole[index].clone()
        self.taken += piece.nbytes
        self._hold(piece.nbytes)
        weakref.finalize(piece, self._hold, -piece.nbytes)
        return piece

    def _hold(self, more: int) -> None:
        self._held += more
        self.most = max(self.most, self._held)

    def __deepcopy__(self, memo):
        return self


@functools.cache
def toy_model(num_heads: int, num_kv_heads: int, num_layers: int = 1, o_bias: bool = False) -> Checkpoint:
    """Layers of odd sizes with large norms and biases (of a Qwen2, or ``o_bias``, of a Llama), no two numbers alike."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config = dict(num_attention_heads=num_heads, num_key_value_heads=num_kv_heads, head_dim=6, vocab_size=43,
                  hidden_size=72 if o_bias else 20, intermediate_size=25, num_hidden_layers=num_layers)
    return random_model(num_heads, lambda: LlamaForCausalLM(LlamaConfig(**config, attention_bias=True)) if o_bias else
                        Qwen2ForCausalLM(Qwen2Config(**config)), lambda parameter: 0.3)


def random_model(seed: int, make: Callable[[], torch.nn.Module], spread: Callable[[torch.Tensor], float]) -> Checkpoint:
    """The Hugging Face model that ``make()`` gives, with random weights; ``spread`` says of each parameter but a norm's
    how large."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
        for name, parameter in model.named_parameters():
            mean, deviation = (1.0, 0.3) if "norm" in name else (0.0, spread(parameter))
            parameter.data.normal_(mean, deviation)
    folder = Path(make_folder())
    model.save_pretrained(folder)
    return open_checkpoint(folder)

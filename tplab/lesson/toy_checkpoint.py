"""Checkpoints that count, for exercises on loading: what was read of each tensor, by whoever read it."""

import math
import weakref
from collections import Counter
from collections.abc import Mapping
from types import SimpleNamespace

import torch

from tplab.checkpoint.headers import TensorInfo
from tplab.checkpoint.layout import tensor_parts
from tplab.checkpoint.reader import CheckpointReader, TensorSlice
from tplab.shard import ShardPlan


class _Reader(CheckpointReader):
    """Reads tensors that lie in memory as it would from files."""

    def __init__(self, data: Mapping[str, torch.Tensor], tensors: Mapping[str, TensorInfo], taken: Counter):
        super().__init__("the toy", tensors, {})
        self.data, self.taken = data, taken

    def _take(self, name: str, info: TensorInfo, index: tuple[slice, ...]) -> torch.Tensor:
        piece = self.data[name][index].clone()
        self.bytes_read += piece.nbytes
        self.taken[name] += piece.nbytes
        return piece


class ToyCheckpoint:
    """Tensors in memory with a checkpoint's ``config``, ``tensors`` and ``reader()``; ``taken``: bytes, by tensor.

    It is not copied with a learner's other arguments: what is read of it has to be counted here.
    """

    def __init__(self, data: Mapping[str, torch.Tensor], config=None):
        self.data, self.config, self.taken = dict(data), config, Counter()
        self.tensors = {name: TensorInfo(tuple(t.shape), t.dtype, "toy.safetensors") for name, t in self.data.items()}

    def reader(self) -> CheckpointReader:
        return _Reader(self.data, self.tensors, self.taken)

    def __deepcopy__(self, memo):
        return self


class CountedCheckpoint:
    """An opened checkpoint of which every byte read is counted, whoever opens a reader: ``bytes_read``."""

    def __init__(self, ckpt):
        self.config, self.tensors, self._ckpt, self._readers = ckpt.config, ckpt.tensors, ckpt, []

    def reader(self) -> CheckpointReader:
        self._readers.append(self._ckpt.reader())
        return self._readers[-1]

    @property
    def bytes_read(self) -> int:
        return sum(reader.bytes_read for reader in self._readers)

    def __deepcopy__(self, memo):
        return self


class ToySource(TensorSlice):
    """One lazy tensor, ``whole``, of different numbers if only its shape is given; ``taken``: how many bytes were read
    of it, ``most``: of how many a reader has had the pieces at the same time."""

    def __init__(self, of: torch.Tensor | tuple[int, ...], dtype: torch.dtype = torch.float32):
        self.whole = of if isinstance(of, torch.Tensor) else torch.arange(1, 1 + math.prod(of)).view(of).to(dtype)
        ckpt = ToyCheckpoint({"source": self.whole})
        self._counts, self._held, self.most = ckpt.taken, 0, 0
        super().__init__(ckpt.reader(), "source", ckpt.tensors["source"])

    def __getattr__(self, name: str):
        raise AttributeError(f"a source has .shape, .dtype and slices a:b, and no .{name}: nothing of it is read yet")

    def __getitem__(self, index) -> torch.Tensor:
        piece = super().__getitem__(index)
        self._hold(piece.nbytes)
        weakref.finalize(piece, self._hold, -piece.nbytes)
        return piece

    def _hold(self, more: int) -> None:
        self._held += more
        self.most = max(self.most, self._held)

    @property
    def taken(self) -> int:
        return self._counts["source"]

    def forget(self) -> None:
        self._counts.clear()

    def __deepcopy__(self, memo):
        return self


def toy_model(num_heads: int, num_kv_heads: int, tensor_parallel_size: int) -> tuple[ToyCheckpoint, ShardPlan]:
    """Two layers of odd sizes with biases, and the plan for that many ranks."""
    head_dim, config = 4, SimpleNamespace(
        hidden_size=10, intermediate_size=13, vocab_size=23, num_layers=2, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=4, q_size=4 * num_heads, kv_size=4 * num_kv_heads, qkv_bias=True,
        o_bias=True, mlp_bias=False, qk_norm=False, tie_word_embeddings=False)
    shapes = {name: part.shape for name, part in tensor_parts(config, ()).items()}
    generator = torch.Generator().manual_seed(7)
    data = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    plan = ShardPlan.make(tensor_parallel_size=tensor_parallel_size, num_heads=num_heads, num_kv_heads=num_kv_heads,
                          head_dim=head_dim, hidden_size=10, intermediate_size=13, vocab_size=23)
    return ToyCheckpoint(data, config), plan

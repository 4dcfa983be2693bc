"""``x @ weight.T``: which kernel computes it, for how many rows and in which dtype, and how a weight lies in memory.

Decoding reads every weight once per step, so it is as fast as weights stream from memory; a batch or a prompt is as
fast as a kernel multiplies. A weight lies in one of two ways, and both serve any number of rows:

* *packed*, large weights in float32 and bfloat16: oneDNN's own order, blocks of (mostly) 64 outputs, for each of which
  the inputs follow each other. Measured on one core (Zen 5, SmolLM2's shapes on two ranks), ``F.linear`` takes 1.4 to
  1.9 times as long from 2 rows up in float32, and twice as long at 1 to 8 rows in bfloat16; where the processor has AMX
  or AVX-512 in bfloat16, oneDNN uses it. At one row in float32, numpy's BLAS can be as quick on the same memory.
* *plain*, ``[out, in]``: small weights, float64, and whatever processor or build of torch packing does not pay on. In
  float32 the columns are contiguous, for numpy's BLAS, row by row for a few rows: 20 to 28 GB/s of 30 that reading
  alone reaches, ``F.linear`` 12 to 20. Everything else is ``F.linear``, as in Hugging Face.

oneDNN adds up one product after the other, so in float32 its error grows with the number of inputs: SmolLM2's logits
came to stand 1.7e-4 from Hugging Face's, where ``F.linear``'s stand 6e-5. Summed in parts of ``LONGEST_SUM`` inputs, as
MKL does behind ``F.linear``, it gave the very bits of ``F.linear`` on SmolLM2, with 1, 2 and 3 ranks.
"""

import ctypes
import json
import platform
import threading
import time
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from tplab.checkpoint.names import cache_dir
from tplab.errors import TplabError
from tplab.files import write_file

FEW_ROWS = 6
WARM_BYTES = 1 << 22  # so much of a plain weight is multiplied with all rows before the next part is read
SMALL = 1 << 16  # values: a weight below stays in the processor's cache, where packing gains nothing
LONGEST_SUM = 192  # inputs that are added up one after the other, in float32
_ROWS = 512  # oneDNN asks for how many rows it is to pack; told one, it packs for nothing else


def empty_weight(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """An unfilled plain ``[out_features, in_features]`` weight."""
    if dtype == torch.float32:
        return torch.empty(in_features, out_features, dtype=dtype).t()
    return torch.empty(out_features, in_features, dtype=dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, as ``torch.nn.functional.linear``; ``x`` is ``[rows, in]``, ``weight`` ``[out, in]``."""
    if x.dim() != 2 or not len(x) or x.requires_grad or x.dtype != weight.dtype:
        return F.linear(x, weight, bias)
    if isinstance(weight, PackedWeight):
        return weight.product(x, bias)
    if x.dtype == torch.float32 and weight.stride(0) == 1 and len(x) <= FEW_ROWS:
        y = torch.from_numpy(_row_by_row(x.numpy(), weight.detach().numpy().T))
        return y if bias is None else y.add_(bias)
    return F.linear(x, weight, bias)


def _row_by_row(x: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """``x [rows, in] @ columns [in, out]``, a product for each row; each weight still warm from the row before."""
    if len(x) == 1:
        return np.matmul(x, columns)
    width = max(16, WARM_BYTES // columns[:, :1].nbytes // 16 * 16)
    y = np.empty((len(x), columns.shape[1]), dtype=x.dtype)
    for start in range(0, columns.shape[1], width):
        warm = columns[:, start:start + width]
        for row in range(len(x)):
            np.matmul(x[row:row + 1], warm, out=y[row:row + 1, start:start + width])
    return y


class Kernels(NamedTuple):
    """What is quickest here, for one dtype: packing at all, and numpy on packed memory where there is one row."""

    packed: bool
    numpy_for_one_row: bool


def pack(weight: nn.Parameter, kernels: Kernels | None = None) -> None:
    """Pack a filled weight, in place and bit for bit, if that pays; ``kernels`` are those of this machine if None."""
    if weight.numel() >= SMALL and weight.dtype in (torch.float32, torch.bfloat16):
        kernels = kernels or fastest(weight.dtype)
        packed = PackedWeight.of(weight.detach(), kernels.numpy_for_one_row) if kernels.packed else None
        if packed is not None:
            packed = nn.Parameter(packed, requires_grad=False)
            vars(packed).update(vars(weight))
            torch.utils.swap_tensors(weight, packed)  # whoever shares the weight, as a tied head does, shares it packed


class PackedWeight(torch.Tensor):
    """A ``[out, in]`` weight in oneDNN's order. Whatever reads it otherwise gets a plain copy with the same bits.

    Attributes:
        parts: oneDNN's tensors, one for each range of inputs that is summed apart.
        blocks: the same memory for each part, ``[out / block, in / pair, block, pair]``; padded with zeros.
    """

    @staticmethod
    def __new__(cls, shape, parts: list[torch.Tensor], blocks: list[torch.Tensor], numpy_for_one_row: bool):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=blocks[0].dtype)
        made.parts, made.blocks = parts, blocks
        made.columns = [part.shape[1] for part in parts]
        made.arrays = [block.numpy()[:, :width, :, 0] for block, width in zip(blocks, made.columns)
                       ] if numpy_for_one_row else None
        return made

    @classmethod
    def of(cls, weight: torch.Tensor, numpy_for_one_row: bool) -> "PackedWeight | None":
        """``weight`` packed; None where its memory is in an order that is not known here."""
        width = LONGEST_SUM if weight.dtype == torch.float32 else weight.shape[1]
        parts = [torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), _ROWS) for part in weight.split(width, 1)]
        blocks = [_blocks(part) for part in parts]
        if any(block is None for block in blocks):
            return None
        packed = cls(weight.shape, parts, blocks, numpy_for_one_row)
        sample = torch.tensor([0, len(weight) // 3, len(weight) // 2, len(weight) - 1])
        return packed if torch.equal(packed.rows(sample), weight[sample]) else None

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [rows, in]`` → ``[rows, out]``."""
        if self.arrays is not None and len(x) == 1:
            whole, y, start = x.numpy(), 0, 0
            for array, width in zip(self.arrays, self.columns):
                y = y + np.matmul(whole[:, start:start + width], array)
                start += width
            y = torch.from_numpy(y.reshape(1, -1)[:, :self.shape[0]])
            return y if bias is None else y.add_(bias)
        x, *others = x.split(self.columns, 1)
        y = _product(x, self.parts[0], bias, "none", [], "")
        for x, part in zip(others, self.parts[1:]):
            y = _add_product(x, y, part, None, "add")
        return y

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """These rows of the weight, ``[*indices, in]``: what an embedding looks up."""
        found = []
        for blocks, width in zip(self.blocks, self.columns):
            block = blocks.shape[2]
            found.append(blocks[indices // block, :, indices % block].flatten(-2)[..., :width])
        return torch.cat(found, -1)

    def plain(self) -> torch.Tensor:
        """A copy as ``[out, in]``."""
        return torch.cat([blocks.transpose(1, 2).flatten(2).flatten(0, 1)[:self.shape[0], :width]
                          for blocks, width in zip(self.blocks, self.columns)], 1)

    def fill(self, weight: torch.Tensor) -> None:
        """Overwrite all of it."""
        for blocks, part in zip(self.blocks, weight.split(self.columns, 1)):
            packed = torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), _ROWS)
            blocks.copy_(_blocks(packed))

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = args[0]
        if func is torch.ops.aten.detach.default:
            return cls(first.shape, first.parts, first.blocks, first.arrays is not None)
        if func is torch.ops.aten.embedding.default and isinstance(first, cls):
            return first.rows(args[1])
        args, kwargs = tree_map_only(cls, cls.plain, (args, kwargs or {}))
        found = func(*args, **kwargs)
        if func._schema.is_mutable and isinstance(first, cls):
            first.fill(args[0])
            return first
        return found

    def __setitem__(self, index, value):  # else a slice would be written into, and that is a slice of a copy
        whole = self.plain()
        whole[index] = value
        self.fill(whole)


if torch.backends.mkldnn.is_available():
    _product, _add_product = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary


def _blocks(part: torch.Tensor) -> torch.Tensor | None:
    """oneDNN's memory as ``[out / block, in / pair, block, pair]``, while ``part`` lives; None if it fits no block."""
    outputs, inputs = part.shape
    memory = (ctypes.c_ubyte * torch.ops.mkldnn._nbytes(part)).from_address(torch.ops.mkldnn.data_ptr(part))
    flat, pair = torch.frombuffer(memory, dtype=part.dtype), 4 // part.dtype.itemsize
    for block in (64, 48, 32, 24, 16, 8):
        padded = -(-outputs // block) * block
        width = flat.numel() // padded
        if padded * width == flat.numel() and inputs <= width < inputs + 64 and width % pair == 0:
            return flat.view(padded // block, width // pair, block, pair)
    return None


_lock = threading.Lock()


@lru_cache
def fastest(dtype: torch.dtype) -> Kernels:
    """This machine's :class:`Kernels`: measured once, which takes about 0.1 s, and kept in the user's cache."""
    with _lock:  # logical ranks load at the same time
        name = f"{platform.node()}-{torch.backends.cpu.get_cpu_capability()}-torch{torch.__version__}"
        file = cache_dir() / "kernels" / f"{name}-{str(dtype).removeprefix('torch.')}.json"
        with suppress(OSError, ValueError, TypeError):  # none there, or none of ours: measured again
            return Kernels(**json.loads(file.read_text()))
        found = _measured(dtype)
        with suppress(OSError, TplabError):  # a cache that cannot be written costs the next load its 0.1 s
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, lambda new: new.write_text(json.dumps(found._asdict())))
        return found


def _measured(dtype: torch.dtype) -> Kernels:
    """On one thread, over weights that no second-level cache holds; in processor time, for machines are busy."""
    if not torch.backends.mkldnn.is_available() or (
            dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return Kernels(False, False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of this thread, no other
    try:
        return _compared(dtype)
    finally:
        torch.set_num_threads(threads)


def _compared(dtype: torch.dtype) -> Kernels:
    plain = [empty_weight(768, 3 * LONGEST_SUM, dtype).normal_() for _ in range(8)]
    ways = {"plain": plain, "oneDNN": [PackedWeight.of(weight, False) for weight in plain]}
    if None in ways["oneDNN"]:
        return Kernels(False, False)
    if dtype == torch.float32:
        ways["numpy"] = [PackedWeight.of(weight, True) for weight in plain]
    seconds = {}
    for rows in (1, 16):
        x = torch.ones(rows, 3 * LONGEST_SUM, dtype=dtype)
        for way, weights in ways.items():
            times = []
            for _ in range(5):
                begin = time.thread_time()
                for weight in weights:
                    linear(x, weight)
                times.append(time.thread_time() - begin)
            seconds[way, rows] = min(times)
    numpy_for_one_row = seconds.get(("numpy", 1), float("inf")) < seconds["oneDNN", 1]
    one_row = seconds["numpy" if numpy_for_one_row else "oneDNN", 1]
    return Kernels(one_row + seconds["oneDNN", 16] < seconds["plain", 1] + seconds["plain", 16], numpy_for_one_row)

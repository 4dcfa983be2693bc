"""A weight in oneDNN's own order, which its products read as it lies.

oneDNN adds up one product after the other, so in float32 its error grows with the number of inputs: SmolLM2's logits
came to stand 1.7e-4 from Hugging Face's, where ``F.linear``'s stand 6e-5. Summed in parts of ``LONGEST_SUM`` inputs, as
MKL does behind ``F.linear``, it gave the very bits of ``F.linear`` on SmolLM2, with 1, 2 and 3 ranks.
"""

import ctypes
from collections.abc import Iterator
from functools import cached_property, lru_cache

import torch

from tplab.kernels.lookup import WORD, Lookup
from tplab.kernels.stream import Panel

LONGEST_SUM = 192  # inputs that are added up one after the other, in float32
_ROWS = 512  # oneDNN asks for how many rows it is to pack; told one, it packs for nothing else


class OneDNN:
    """The memory of one packed ``[out, in]`` weight; made by :meth:`of`.

    Attributes:
        parts: oneDNN's tensors, one for each range of inputs that is summed apart.
        blocks: the same memory for each part, ``[out / block, in / pair, block, pair]``; padded with zeros.
        columns: inputs of each part.
    """

    def __init__(self, weight: torch.Tensor, sizes: list[int]):
        self.shape, self.dtype = weight.shape, weight.dtype
        self.parts = [_reordered(part) for part in _split(weight)]
        self.columns = [part.shape[1] for part in self.parts]
        self.blocks = [_blocks(part, size) for part, size in zip(self.parts, sizes)]

    @classmethod
    def of(cls, weight: torch.Tensor) -> "OneDNN | None":
        """``weight`` packed; None where oneDNN does not do that, or does it in an order that is not known here."""
        if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return None
        sizes = [_block_size(*part.shape, weight.dtype) for part in _split(weight)]
        return None if None in sizes else cls(weight, sizes)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [rows, in]`` → ``[rows, out]``."""
        x, *others = x.split(self.columns, 1)
        y = _product(x, self.parts[0], bias, "none", [], "")
        for x, part in zip(others, self.parts[1:]):
            y = _add_product(x, y, part, None, "add")
        return y

    def panels(self) -> Iterator[Panel]:
        """What :mod:`tplab.kernels.stream` multiplies with."""
        first = 0
        for blocks, width in zip(self.blocks, self.columns):
            count, _, size, pair = blocks.shape
            for block in range(count):
                yield Panel(blocks[block].data_ptr(), size, -(-width // pair), block * size, first)
            first += width

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """These rows of the weight, ``[*indices, in]``: what an embedding looks up."""
        return self._lookup.rows(indices, self.dtype)[..., :self.shape[1]]

    @cached_property
    def _lookup(self) -> Lookup:
        starts, row = [], torch.arange(self.shape[0])
        for blocks in self.blocks:
            size = blocks.shape[2]
            starts.append(blocks.data_ptr() + row // size * blocks[0].nbytes + row % size * WORD)
        pair = WORD // self.dtype.itemsize
        return Lookup(torch.stack(starts, 1), torch.full((len(row),), size * WORD),
                      [-(-width // pair) for width in self.columns])

    def plain(self) -> torch.Tensor:
        """A copy as ``[out, in]``."""
        return torch.cat([_unblocked(blocks, self.shape[0], width)
                          for blocks, width in zip(self.blocks, self.columns)], 1)

    def fill(self, weight: torch.Tensor) -> None:
        """Overwrite all of it."""
        for blocks, part in zip(self.blocks, _split(weight)):
            made = _reordered(part)  # lives until its memory is read
            blocks.copy_(_blocks(made, blocks.shape[2]))


if torch.backends.mkldnn.is_available():
    _product, _add_product = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary


def _split(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return weight.split(LONGEST_SUM if weight.dtype == torch.float32 else weight.shape[1], 1)


def _reordered(part: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), _ROWS)


@lru_cache
def _block_size(outputs: int, inputs: int, dtype: torch.dtype) -> int | None:
    """How many outputs stand together in what oneDNN makes of ``[outputs, inputs]``; None if it is no such order.

    Read off a weight whose rows and columns are known by their numbers: 64 for AVX-512 and 32 for AMX fit the same
    memory.
    """
    rows, columns = (torch.arange(count).remainder_(127).to(dtype) for count in (outputs, inputs))
    known = rows[:, None] + columns
    part = _reordered(known)
    for size in (64, 48, 32, 24, 16, 8):
        blocks = _blocks(part, size)
        if blocks is not None and torch.equal(_unblocked(blocks, outputs, inputs), known):
            return size
    return None


def _blocks(part: torch.Tensor, size: int) -> torch.Tensor | None:
    """oneDNN's memory as ``[out / size, in / pair, size, pair]``, while ``part`` lives; None if it does not fit."""
    outputs, inputs = part.shape
    memory = (ctypes.c_ubyte * torch.ops.mkldnn._nbytes(part)).from_address(torch.ops.mkldnn.data_ptr(part))
    flat, pair = torch.frombuffer(memory, dtype=part.dtype), 4 // part.dtype.itemsize
    padded = -(-outputs // size) * size
    width = flat.numel() // padded
    if padded * width != flat.numel() or not inputs <= width < inputs + 64 or width % pair:
        return None
    return flat.view(padded // size, width // pair, size, pair)


def _unblocked(blocks: torch.Tensor, outputs: int, inputs: int) -> torch.Tensor:
    return blocks.transpose(1, 2).flatten(2).flatten(0, 1)[:outputs, :inputs]

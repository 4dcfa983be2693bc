"""A float32 weight in MKL's own order, packed once.

``F.linear`` is MKL's product on most PCs, and packs the whole weight anew in every product of more than a few rows.
Packed before, 4 to 32 rows take 0.55 to 1 times as long, and from 16 rows up the bits are those of ``F.linear`` (on a
Xeon, at the sizes of SmolLM2 on two ranks). The functions are ``cblas_sgemm_pack`` and ``cblas_sgemm_compute`` of
Intel's oneMKL reference, found in the library that torch has loaded. What they pack must stay where it is.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch

from tplab.kernels.graph import refuse
from tplab.kernels.lookup import WORD, Lookup
from tplab.kernels.stream import Panel

_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED, _IS_PACKED, _SECOND = 101, 111, 112, 151, 162  # CBLAS's numbers
_ROWS = 512  # MKL packs for a number of rows; a weight packed for so many serves any number as quickly
_HUGE = 1 << 21  # bytes of a huge page: MKL lets the weight begin with one


class _Functions(NamedTuple):
    get_size: Callable
    pack: Callable
    compute: Callable

    @classmethod
    def found(cls) -> "_Functions | None":
        """MKL's three functions; None where torch was built without MKL."""
        library = ctypes.CDLL(torch._C.__file__)
        names = ("cblas_sgemm_pack_get_size", "cblas_sgemm_pack", "cblas_sgemm_compute")
        if not all(hasattr(library, name) for name in names):
            return None
        get_size, pack, compute = (library[name] for name in names)
        number, address, real = ctypes.c_int, ctypes.c_void_p, ctypes.c_float
        get_size.argtypes, get_size.restype = [number] * 4, ctypes.c_size_t
        pack.argtypes, pack.restype = [*[number] * 6, real, address, number, address], None
        compute.argtypes = [*[number] * 6, address, number, address, number, real, address, number]
        compute.restype = None
        return cls(get_size, pack, compute)


_functions = _Functions.found()


class MKL:
    """The memory of one packed ``[out, in]`` weight; made by :meth:`of`.

    Attributes:
        address: of what MKL has packed.
        values: all numbers in it, and what lies between; :class:`_Places` finds them.
    """

    dtype = torch.float32

    def __init__(self, weight: torch.Tensor):
        self.shape = outputs, inputs = weight.shape
        size = _functions.get_size(_SECOND, _ROWS, outputs, inputs)
        # MKL leaves nearly 2 MB free before the weight and 8 MB behind it; the system gives no memory for those.
        memory = mmap.mmap(-1, size + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = np.frombuffer(memory, np.uint8)
        begin = -base.ctypes.data % _HUGE
        pages = (weight.nbytes + _HUGE // 4) // _HUGE  # the last one too, if three quarters of it are needed
        if pages and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE, begin + _HUGE, pages * _HUGE)
        self.address = base.ctypes.data + begin
        self.values = torch.from_numpy(base[begin + _HUGE:begin + size].view(np.float32))
        self.fill(weight)

    @classmethod
    def of(cls, weight: torch.Tensor) -> "MKL | None":
        """``weight`` packed; None where there is no MKL, or its order is not known here."""
        return cls(weight) if _functions and _places(*weight.shape) else None

    def fill(self, weight: torch.Tensor) -> None:
        """Overwrite all of it."""
        (outputs, inputs), weight = self.shape, weight.contiguous()
        _functions.pack(_ROW_MAJOR, _SECOND, _TRANSPOSED, _ROWS, outputs, inputs, 1.0, weight.data_ptr(), inputs,
                        self.address)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [rows, in]`` → ``[rows, out]``."""
        refuse("MKL's product of a packed weight")
        x, (outputs, inputs) = x.contiguous(), self.shape
        y = x.new_empty(len(x), outputs) if bias is None else bias.repeat(len(x), 1)
        _functions.compute(_ROW_MAJOR, _AS_IT_IS, _IS_PACKED, len(x), outputs, inputs, x.data_ptr(), inputs,
                           self.address, inputs, 0.0 if bias is None else 1.0, y.data_ptr(), outputs)
        return y

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """These rows of the weight, ``[*indices, in]``: what an embedding looks up."""
        return self._lookup.rows(indices, self.dtype)

    @cached_property
    def _lookup(self) -> Lookup:
        places = _places(*self.shape)
        return Lookup(self.values.data_ptr() + WORD * places.starts, WORD * places.steps,
                      places.blocks.bincount().tolist())

    def plain(self) -> torch.Tensor:
        """A copy as ``[out, in]``."""
        return self.rows(torch.arange(self.shape[0]))

    def panels(self) -> Iterator[Panel]:
        """What :mod:`tplab.kernels.stream` multiplies with."""
        places, (outputs, inputs) = _places(*self.shape), self.shape
        firsts = (places.offsets == 0).nonzero().flatten().tolist()
        for block, (first, end) in enumerate(zip(firsts, [*firsts[1:], inputs])):
            output, starts, widths = 0, places.starts[:, block].tolist(), places.steps.tolist()
            while output < outputs:
                width = widths[output]
                yield Panel(self.values.data_ptr() + 4 * starts[output], width, end - first, output, first)
                output += width


class _Places(NamedTuple):
    """Where the numbers of a packed weight are: row r's number in column c is the value at
    ``starts[r, blocks[c]] + steps[r] * offsets[c]``.
    """

    starts: torch.Tensor  # [out, blocks of columns]
    steps: torch.Tensor  # [out]
    blocks: torch.Tensor  # [in]
    offsets: torch.Tensor  # [in]


@lru_cache
def _places(outputs: int, inputs: int) -> _Places | None:
    """Read off packed weights whose numbers are those of their rows, or of their columns.

    None if it is no such order, or if products with it are wrong.
    """
    rows, columns = (torch.arange(1.0, count + 1) for count in (outputs, inputs))
    rows = rows[:, None].expand(outputs, inputs)
    packed = MKL(rows)
    used = packed.values[:(outputs + 64) * (inputs + inputs // 16 + 64)].numpy()  # what lies behind is never touched

    def where(number: int) -> torch.Tensor:
        return torch.from_numpy(np.flatnonzero(used == number))

    first = where(1)  # the first row's numbers, column by column
    if inputs < 2 or len(first) != inputs:
        return None
    begins = first.diff(prepend=first[:1]) != first[1] - first[0]  # a block of columns
    begins[:2] = torch.tensor([True, False])
    blocks = begins.cumsum(0) - 1
    heads = begins.nonzero().flatten()
    packed.fill(columns.expand(outputs, inputs))
    found = [where(column + 1) for column in (*heads.tolist(), 1)]
    if any(len(each) != outputs for each in found):
        return None
    *starts, second = found
    places = _Places(torch.stack(starts, 1), second - starts[0], blocks, torch.arange(inputs) - heads[blocks])
    last = places.starts[:, -1] + places.steps * places.offsets[-1]
    agree = bool((packed.values[last] == inputs).all())
    packed.fill(rows)
    agree &= torch.equal(packed.values[last], rows[:, 0])
    for count in (1, 7):  # MKL was told another number of rows
        y = packed.product(torch.ones(count, inputs), None)
        agree &= torch.allclose(y, inputs * rows[:, 0].expand(count, -1), rtol=1e-3)
    return places if agree else None

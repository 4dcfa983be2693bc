"""``x @ weight.T``: which kernel computes it, for how many rows and in which dtype, and how a weight lies in memory.

Decoding reads every weight once per step, so it is as fast as weights stream from memory; a batch or a prompt is as
fast as a kernel multiplies. Which kernel is quickest differs between processors, so each machine measures it once
(:func:`fastest`). A weight lies in one of two ways, and both serve any number of rows:

* *packed*, large weights in float32 and bfloat16 where that pays, as the library has them that multiplies with them:

  - *oneDNN*: blocks of (mostly) 64 outputs, for each of which the inputs follow each other. Measured on one core of a
    Zen 5 (SmolLM2's shapes on two ranks), ``F.linear`` takes 1.4 to 1.9 times as long from 2 rows up in float32, and
    twice as long at 1 to 8 rows in bfloat16; where the processor has AMX or AVX-512 in bfloat16, oneDNN uses it (a Xeon
    with AMX: ``F.linear`` takes 1.3 to 2 times as long at 1 to 64 rows).
  - *MKL*, float32 only: on the Xeon with AMX ``F.linear`` takes 1 to 1.8 times as long at 4 to 32 rows, and 0.85
    times as long at one row; from 16 rows up, both give the same bits at SmolLM2's sizes.

  On a processor with AVX-512, few rows read either order in loops of the lab's own (``stream.py``): on that Xeon they
  take 0.6 (bfloat16) and 0.9 times as long (float32) as the library whose order it is. On a Zen 4, any number of rows
  does: 512 rows take ``F.linear`` 1.05 to 1.2 times as long in float32, 1.05 to 1.2 in bfloat16. With AMX, more
  than 32 rows do so in bfloat16 where oneDNN is slower (:meth:`tplab.kernels.stream.Stream.suits`).
* *plain*, ``[out, in]``: everything else. Up to 32 rows may meet it in loops of the lab's own, too (``dots.py``), made
  for AVX2: DOTS. In float32, where these
  are not the quickest, the columns are contiguous, so that numpy's BLAS can take a few rows one by one (Zen 5: 20 to
  28 GB/s, ``F.linear`` 12 to 20; a Xeon with AVX-512 in float32 only: no difference). Such a Xeon *widens* a bfloat16
  weight, a part at a time in its cache (2 times as quick at 16 rows, 4 times at 512). Otherwise ``F.linear``, as in
  Hugging Face.
"""

import json
import math
import platform
import statistics
import threading
import time
import timeit
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tplab.checkpoint.names import cache_dir
from tplab.errors import TplabError
from tplab.files import write_file
from tplab.kernels.dots import dots, suits
from tplab.kernels.graph import refuse
from tplab.kernels.mkl import MKL
from tplab.kernels.onednn import LONGEST_SUM, OneDNN
from tplab.kernels.packed import PackedWeight
from tplab.kernels.stream import Stream

WARM_BYTES = 1 << 22  # so much of a plain weight is multiplied with all rows before the next part is read
WIDE_VALUES = 1 << 18  # so much of a bfloat16 weight is widened at a time: 1 MB stays in the second-level cache
PIECE_BYTES = 1 << 26  # of memory for plain weights: large enough for malloc to give it back
PACKABLE = torch.float32, torch.bfloat16
SMALL = 1 << 16  # values: a weight below stays in the processor's cache, where packing gains nothing
_ROWS_TIMED = (1, 2, 4, 8, 16, 32, 128, 512)  # what holds for the last one holds for more
_FEW_ROWS = 32  # more are timed with an eighth of the weights
_BYTES_TIMED = 96 << 20  # a server's last cache keeps so much of 48 MB that packing once seems to gain nothing
_AS_QUICK = 1.05  # so many times as long is no worse: a machine's moments differ by more
_EDITION = 5  # of what is measured: an older one's findings are not read
_lock = threading.Lock()


class _Pages:
    """Memory for plain weights, one behind the other in large pieces; where all of one are packed, it is given back.

    NumPy asks Linux for huge pages for anything larger than 4 MB, and a processor that looks up 2 MB at a time has more
    of its tables left for the Python between two products: SmolLM2 decoded 4 % quicker on two ranks of a Xeon.
    """

    def __init__(self):
        self.piece, self.at = lambda: None, 0  # a weak reference: only weights keep a piece
        self.lock = threading.Lock()  # logical ranks load together

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """``[count]`` numbers that nobody else has; a piece lives as long as anything in it."""
        size = count * dtype.itemsize
        with self.lock:
            piece = self.piece()
            if piece is None or self.at + size > len(piece):
                piece = np.empty(max(size, PIECE_BYTES), np.uint8)
                self.piece, self.at = weakref.ref(piece), 0
            taken = torch.from_numpy(piece[self.at:self.at + size])
            self.at += -(-size // 64) * 64
        return taken.view(dtype)


_pages = _Pages()


def empty_weight(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """An unfilled plain ``[out_features, in_features]`` weight."""
    count = out_features * in_features
    if count < SMALL:
        return _in_order(torch.empty(count, dtype=dtype), out_features, in_features, by_rows=False)
    by_rows = dtype not in PACKABLE or fastest(dtype).dot_rows > 0
    return _in_order(_pages.take(count, dtype), out_features, in_features, by_rows)


def _in_order(flat: torch.Tensor, out_features: int, in_features: int, by_rows: bool) -> torch.Tensor:
    if flat.dtype == torch.float32 and not by_rows:
        return flat.view(in_features, out_features).t()
    return flat.view(out_features, in_features)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, as ``torch.nn.functional.linear``; ``x`` is ``[rows, in]``, ``weight`` ``[out, in]``."""
    shape = x.shape
    if len(shape) != 2 or not shape[0] or x.requires_grad or x.dtype != weight.dtype:
        return F.linear(x, weight, bias)
    if isinstance(weight, PackedWeight):
        return weight.product(x, bias)
    if weight.numel() >= SMALL and x.dtype in PACKABLE:
        kernels = fastest(x.dtype)
        if shape[0] <= kernels.dot_rows and suits(weight):
            return dots(x, weight, bias)
        if x.dtype == torch.bfloat16 and shape[0] >= kernels.widened_rows:
            return _widened(x, weight, bias)
        if shape[0] <= kernels.numpy_rows and weight.stride(0) == 1 and torch.get_num_threads() == 1:
            y = torch.from_numpy(_row_by_row(x.numpy(), weight.detach().numpy().T))
            return y if bias is None else y.add_(bias)
    return F.linear(x, weight, bias)


def is_widened(dtype: torch.dtype) -> bool:
    """Whether products of ``dtype`` are quicker in float32 here, where no weight has to be read for them."""
    return dtype == torch.bfloat16 and fastest(dtype).widened_rows < NEVER


def _row_by_row(x: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """``x [rows, in] @ columns [in, out]``, a product for each row; each weight still warm from the row before."""
    refuse("NumPy's product")
    if len(x) == 1:
        return np.matmul(x, columns)
    width = max(16, WARM_BYTES // columns[:, :1].nbytes // 16 * 16)
    y = np.empty((len(x), columns.shape[1]), dtype=x.dtype)
    for start in range(0, columns.shape[1], width):
        warm = columns[:, start:start + width]
        for row in range(len(x)):
            np.matmul(x[row:row + 1], warm, out=y[row:row + 1, start:start + width])
    return y


def _widened(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear`` in float32, a part of the outputs at a time; each result is rounded to bfloat16 once."""
    wide, y = x.float(), x.new_empty(len(x), weight.shape[0])
    outputs = max(1, WIDE_VALUES // weight.shape[1])
    for start in range(0, weight.shape[0], outputs):
        here = slice(start, start + outputs)
        y[:, here] = F.linear(wide, weight[here].float(), None if bias is None else bias[here].float())
    return y


NEVER = 1 << 62  # rows


class Kernels(NamedTuple):
    """What is quickest here, for one dtype.

    Attributes:
        library: in whose order weights are packed, ``"MKL"`` or ``"oneDNN"``; None: not at all.
        streamed_rows: up to so many rows, :mod:`tplab.kernels.stream` multiplies with a packed weight; ``NEVER``:
            with any number.
        numpy_rows: up to so many rows, numpy's BLAS row by row on a plain float32 weight; 0: not at all.
        widened_rows: from so many rows, a product in float32 with a plain bfloat16 weight.
        dot_rows: up to so many rows, :mod:`tplab.kernels.dots` multiplies with a plain weight; 0: not at all.
    """

    library: str | None
    streamed_rows: int
    numpy_rows: int
    widened_rows: int
    dot_rows: int


def pack(weight: nn.Parameter, kernels: Kernels | None = None) -> None:
    """Pack a filled weight, in place and bit for bit, if that pays; ``kernels`` are those of this machine if None."""
    if weight.numel() >= SMALL and weight.dtype in PACKABLE:
        kernels = kernels or fastest(weight.dtype)
        if (order := _in_order_of(kernels.library, weight.detach())) is not None:
            stream = Stream.of(order.panels(), order.shape, order.dtype)
            packed = nn.Parameter(PackedWeight(order, stream, kernels.streamed_rows), requires_grad=False)
            vars(packed).update(vars(weight))
            torch.utils.swap_tensors(weight, packed)  # whoever shares the weight, as a tied head does, shares it packed


def _in_order_of(library: str | None, weight: torch.Tensor) -> MKL | OneDNN | None:
    return {"MKL": MKL.of, "oneDNN": OneDNN.of, None: lambda weight: None}[library](weight)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads for torch meanwhile; of the calling thread, no other."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@lru_cache
def fastest(dtype: torch.dtype) -> Kernels:
    """This machine's :class:`Kernels`: measured once, which takes some seconds, and kept in the user's cache."""
    with _lock:  # logical ranks load at the same time
        name = f"{platform.node()}-{torch.backends.cpu.get_cpu_capability()}-torch{torch.__version__}"
        file = cache_dir() / "kernels" / f"{name}-{str(dtype).removeprefix('torch.')}-{_EDITION}.json"
        with suppress(OSError, ValueError, TypeError):  # none there, or none of ours: measured again
            return Kernels(**json.loads(file.read_text()))
        found = _measured(dtype)
        with suppress(OSError, TplabError):  # a cache that cannot be written costs the next load its second
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, lambda new: new.write_text(json.dumps(found._asdict())))
        return found


def _measured(dtype: torch.dtype) -> Kernels:
    """On one thread; in processor time, for machines are busy."""
    with torch_threads(1):
        return _chosen(_timed(dtype))


def _timed(dtype: torch.dtype) -> dict[tuple[str, int], float]:
    """``{(way, rows): seconds}`` over ``_BYTES_TIMED`` of weights."""
    size = 1536, 3 * LONGEST_SUM
    plain = [_in_order(_pages.take(math.prod(size), dtype), *size, by_rows=False).normal_()
             for _ in range(_BYTES_TIMED // (math.prod(size) * dtype.itemsize))]
    ways = {"F.linear": F.linear}
    if dtype == torch.float32:
        ways["numpy"] = lambda x, weight, bias: _row_by_row(x.numpy(), weight.numpy().T)
    else:
        ways["widened"] = _widened
    seconds = {(way, rows): _seconds(ways[way], plain, rows) for way in ways for rows in _ROWS_TIMED
               if rows <= {"numpy": 4}.get(way, rows)}
    by_rows = [weight.contiguous() for weight in plain]
    if suits(by_rows[0]):
        seconds |= {("dots", rows): _seconds(dots, by_rows, rows) for rows in _ROWS_TIMED if rows <= _FEW_ROWS}
    del by_rows
    for library in _libraries(dtype):
        orders = [_in_order_of(library, weight) for weight in plain]
        if None not in orders:
            streams = [Stream.of(order.panels(), order.shape, dtype) for order in orders]
            for way, weights in (library, orders), (library + " streamed", streams):
                if None not in weights:
                    seconds |= {(way, rows): _seconds(_own, weights, rows) for rows in _ROWS_TIMED}
            del streams, weights
        del orders  # before the next copies are made
    return seconds


def _libraries(dtype: torch.dtype) -> list[str]:
    """Those that may have an order of their own here."""
    mkldnn = ["oneDNN"] if torch.backends.mkldnn.is_available() else []
    return ["MKL", *mkldnn] if dtype == torch.float32 else mkldnn


def _own(x: torch.Tensor, weight: MKL | OneDNN | Stream, bias: None) -> torch.Tensor:
    return weight.product(x, bias)


def _seconds(product, weights: list, rows: int) -> float:
    """One product of so many rows with each weight: the median of five, for memory has good and bad moments."""
    x = torch.ones(rows, weights[0].shape[1], dtype=weights[0].dtype)
    some = weights if rows <= _FEW_ROWS else weights[:-(-len(weights) // 8)]

    def run() -> None:
        for weight in some:
            product(x, weight, None)

    return len(weights) / len(some) * statistics.median(
        timeit.repeat(run, timer=time.thread_time, number=1, repeat=5))


def _chosen(seconds: dict[tuple[str, int], float]) -> Kernels:
    """What these times speak for. A weight is packed if one row, eight and sixteen together take less time so."""
    def best(rows: int, *ways: str) -> float:
        return min(seconds.get((way, rows), float("inf")) for way in ways)

    def some(*ways: str) -> float:
        return sum(best(rows, *ways) for rows in (1, 8, 16))

    def most(ours: tuple[str, ...], others: tuple[str, ...], as_quick: float = 1.0) -> int:
        return min((0, *_ROWS_TIMED), key=lambda most: sum(
            best(rows, *ours) / as_quick if rows <= most else best(rows, *others) for rows in _ROWS_TIMED))

    library = min("MKL", "oneDNN", key=lambda library: some(library, library + " streamed"))
    pays = some(library, library + " streamed") < some("F.linear", "numpy", "widened", "dots")
    streamed_rows = most((library + " streamed",), (library,), _AS_QUICK) if pays else 0
    dot_rows = most(("dots",), ("F.linear", "numpy", "widened"))
    by_numpy = [rows for rows in _ROWS_TIMED if not dot_rows and best(rows, "numpy") < best(rows, "F.linear")]
    narrow = [rows for rows in _ROWS_TIMED if best(rows, "F.linear") <= best(rows, "widened")]
    return Kernels(library if pays else None, NEVER if streamed_rows == _ROWS_TIMED[-1] else streamed_rows,
                   max(by_numpy, default=0),
                   min((rows for rows in _ROWS_TIMED if rows > max(narrow, default=0)), default=NEVER), dot_rows)

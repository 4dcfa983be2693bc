"""A step's calls, noted once and then repeated without Python, as a CUDA graph repeats a GPU's kernels.

Between its products, one decoding step makes some forty tensors a layer, and calls ten functions; with a small model
Python and PyTorch take as long for it as memory takes for the weights. But the next step makes the same calls, with
the same arguments, if its tensors are where those of this one were::

    with Recording() as recording:
        y = layers(x)             # computed as always, and noted
    graph = recording.graph       # None, if ``recording.refused`` says why
    x.copy_(another)
    graph.replay()                # y holds what layers(another) would give, in the same bits

Noted are calls of what is compiled here (:class:`tplab.kernels.compiled.Compiled`), and collectives. All that PyTorch
does beside them is seen, too: it may make views, and memory, which is then kept for the graph; or be one of the few
operations that are there as compiled functions (``graph_operations.py``). At anything else, and whatever computes
without being seen (:func:`refuse`), the recording is refused: the step goes on as always.
"""

import ctypes
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tplab.kernels import graph_operations
from tplab.kernels.compiled import Compiled, compiled, noting

_PIECE = 1 << 20  # bytes of memory that a graph takes at a time
_LINE = 64  # bytes that no two tensors share


def refuse(what: str) -> None:
    """Said by what computes on its own, without PyTorch and without compiled functions."""
    if (calls := getattr(noting, "calls", None)) is not None:
        calls.refuse(what)


class Arena:
    """Memory of a graph's tensors: what one gives back, the next one gets, in every replay as when it was recorded."""

    def __init__(self):
        self.pieces, self.free = [], []  # free: [begin, end) in bytes, in order of addresses

    def take(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Unfilled; it is given back when nobody holds it or a view of it any more."""
        count = 1 + sum((size - 1) * step for size, step in zip(shape, stride)) if all(shape) else 1
        size = -(-count * dtype.itemsize // _LINE) * _LINE
        begin = self._find(size)
        memory = np.frombuffer((ctypes.c_ubyte * size).from_address(begin), np.uint8)
        weakref.finalize(memory, self._give_back, begin, begin + size)
        return torch.from_numpy(memory).view(dtype).as_strided(shape, stride)

    def _find(self, size: int) -> int:
        for n, (begin, end) in enumerate(self.free):
            if end - begin >= size:
                self.free[n:n + 1] = [(begin + size, end)] * (end - begin > size)
                return begin
        piece = np.empty(max(size, _PIECE) + _LINE, np.uint8)
        self.pieces.append(piece)
        begin = piece.ctypes.data + -piece.ctypes.data % _LINE
        self._give_back(begin, begin + max(size, _PIECE))
        return self._find(size)

    def _give_back(self, begin: int, end: int) -> None:
        spans, merged = sorted([*self.free, (begin, end)]), []
        for begin, end in spans:
            if merged and merged[-1][1] == begin:
                merged[-1] = merged[-1][0], end
            else:
                merged.append((begin, end))
        self.free = merged


class Meeting(Protocol):
    """What must be told before calls are repeated and after: a group of ranks, whose collectives are counted."""

    def begin_replay(self, graph: "Graph") -> None: ...

    def end_replay(self) -> None: ...


class Graph:
    """Noted calls. ``status`` is the address of a word: a call that leaves it other than 0 needs help.

    Attributes:
        arena, kept: what the calls' addresses lie in.
        rescues: ``{number of a call: what to do if it needs help}``.
        files: the source file of each noted collective.
        meetings: who is told before and after a replay.
    """

    def __init__(self):
        self.arena, self.kept = Arena(), []
        self.rescues: dict[int, Callable] = {}
        self.files: list[bytes] = []  # in which the noted collectives were called
        self.meetings: list[Meeting] = []
        self.words = np.zeros(2, np.int64)  # the status, and how far a replay has come
        self.status = self.words.ctypes.data
        self.functions: list[int] = []
        self.arguments: list[np.ndarray] = []
        self._calls = None

    def add(self, function: Compiled, arguments: tuple) -> int:
        """One more call; its number."""
        packed = [struct.unpack("q", struct.pack("fxxxx", value))[0] if kind is ctypes.c_float else value or 0
                  for kind, value in zip(function.kinds, arguments, strict=True)]
        self.functions.append(function.from_array)
        self.arguments.append(np.array(packed, np.int64))
        return len(self.functions) - 1

    def replay(self) -> None:
        """Make all calls again."""
        if self._calls is None:
            self._calls = np.array([(function, arguments.ctypes.data) for function, arguments
                                    in zip(self.functions, self.arguments)], np.int64).reshape(-1, 2)
        first, count = 0, len(self.functions)
        for meeting in self.meetings:
            meeting.begin_replay(self)
        try:
            while first < count:
                self.words[0] = 0
                _driver()(self._calls.ctypes.data, first, count, self.status, self.status + 8)
                first = int(self.words[1]) + 1
                if self.words[0]:
                    self.rescues[first - 1]()
        finally:
            for meeting in self.meetings:
                meeting.end_replay()


class Recording(TorchDispatchMode):
    """What this thread calls is noted inside of the context.

    Attributes:
        graph: repeats it; None if it cannot be.
        refused: what cannot be repeated.
    """

    def __init__(self):
        super().__init__()
        self.noted, self.refused = Graph(), None

    @property
    def graph(self) -> Graph | None:
        return self.noted if self.refused is None else None

    def __enter__(self) -> "Recording":
        noting.calls = self
        return super().__enter__()

    def __exit__(self, *exc) -> None:
        noting.calls = None
        super().__exit__(*exc)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done meanwhile is not noted: somebody will say himself what it was."""
        noting.calls = None
        try:
            with _disable_current_modes():
                yield
        finally:
            noting.calls = self

    def append(self, function: Compiled, arguments: tuple) -> None:
        """A call was made."""
        if self.refused is None:
            self.noted.add(function, arguments)

    def refuse(self, what: str) -> None:
        """Something cannot be repeated; of several, the first is kept."""
        self.refused = self.refused or what

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.refused is None and (own := graph_operations.OPERATIONS.get(func)) is not None:
            found = own(self.noted.arena, *args, **kwargs)
            if found is not NotImplemented:
                return found
        found = func(*args, **kwargs)
        if self.refused is None and (func._schema.is_mutable or not _is_view(found, args)):
            self.refuse(f"{func} was called")
        return found


def _is_view(found, args: tuple) -> bool:
    """Whether an operation has only looked at its arguments' memory in another way."""
    def memories(values) -> set[int | None]:  # a tensor in a library's own order has none that can be seen
        return {value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) and not value.is_mkldnn else None
                for value in values}

    outputs = memories(found if isinstance(found, tuple | list) else [found])
    return None not in outputs and outputs <= memories(args)


@lru_cache
def _driver() -> Callable:
    return compiled(_REPLAY).function


_REPLAY = """
define void @replay(ptr %calls, i64 %first, i64 %count, ptr %status, ptr %reached) {
begin:
  br label %call

call:
  %n = phi i64 [%first, %begin], [%n.next, %next]
  %function.at = getelementptr [2 x ptr], ptr %calls, i64 %n
  %function = load ptr, ptr %function.at
  %given.at = getelementptr ptr, ptr %function.at, i64 1
  %given = load ptr, ptr %given.at
  call void %function(ptr %given)
  %word = load i64, ptr %status
  %goes.on = icmp eq i64 %word, 0
  br i1 %goes.on, label %next, label %end

next:
  %n.next = add i64 %n, 1
  %n.more = icmp ult i64 %n.next, %count
  br i1 %n.more, label %call, label %end

end:
  store i64 %n, ptr %reached
  ret void
}
"""

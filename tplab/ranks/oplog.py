"""The op log: the collectives of a rank, in order, in a ring of fixed-size records.

It is always on, so it must cost little: one `struct.pack_into` when a collective is entered, one byte when it is left.
The ring of a pool's rank is in shared memory: the other ranks compare it, and the parent can read it even when the rank
is stuck or dead.
"""

import os
import struct
import sys
from dataclasses import dataclass

import numpy as np
import torch

OPS = ("?", "all_reduce", "all_gather", "broadcast", "barrier", "reduce_scatter",
       *(f"dist.{name}" for name in ("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "gather",
                                     "scatter", "reduce_scatter", "reduce_scatter_single", "all_to_all",
                                     "all_to_all_single", "barrier")))  # dist: torch.distributed
ALL_REDUCE, ALL_GATHER, BROADCAST, BARRIER, REDUCE_SCATTER = 1, 2, 3, 4, 5
DTYPES = (None, torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
          torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128)
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
MAX_DIMS = 8

# seq, line, state | op, dtype, dims, extra, shape: the part after the bar must be the same on all ranks.
_RECORD = struct.Struct("=qi4xq bbb5xq8q")
RECORD_BYTES = 128
SAME_FROM, SAME_TO = 24, _RECORD.size
STATE_AT = 16
RECORDS = 1024
RING_AT = RECORD_BYTES  # before it, the number of the newest collective
_FILES_AT, _FILE_BYTES = RING_AT + RECORDS * RECORD_BYTES, 512  # the file of each record, in the same order
LOG_BYTES = _FILES_AT + RECORDS * _FILE_BYTES

ENTERED, LEFT, STARTED = 1, 2, 4  # bits


@dataclass(frozen=True)
class OpRecord:
    """One collective of one rank: `left` is False while the rank still waits in it. `detail`: dim, src or dst.

    `started`: the call returned before it was done.
    """

    seq: int
    op: str
    shape: tuple
    dtype: str
    detail: int
    file: str
    line: int
    left: bool
    started: bool = False

    def __str__(self):
        if self.op in ("barrier", "dist.barrier"):
            return self.op
        extra = f" {_DETAILS[self.op]} {self.detail}" if self.op in _DETAILS else ""
        return f"{self.op} {list(self.shape)} {self.dtype}{extra}"


_DETAILS = {"all_gather": "dim", "reduce_scatter": "dim", "broadcast": "src", "dist.broadcast": "src",
            "dist.scatter": "src", "dist.reduce": "dst", "dist.gather": "dst"}


class OpLog:
    """A ring of the last `RECORDS` collectives of one rank, over `LOG_BYTES` bytes of memory."""

    def __init__(self, memory=None):
        self.memory = memoryview(np.empty(LOG_BYTES, np.uint8)) if memory is None else memory
        self.seq = 0
        self.at = 0
        if memory is None:
            self.clear()
        self._files = {}  # name: as bytes; None for machinery
        self._noted = [b""] * RECORDS  # what stands at the place of each record's file
        self._last = self.memory[:8].cast("q")

    def enter(self, op: int, shape: tuple, dtype: int, detail: int, frame) -> None:
        """Add a record: this rank is about to take part in `op`. The search for the call site begins at `frame`, unless
        that is a call site already."""
        started = type(frame) is tuple
        file, line = frame if started else self.call_site(frame)
        self.seq = seq = self.seq + 1
        index = seq % RECORDS
        self.at = at = RING_AT + index * RECORD_BYTES
        self._note_file(index, file)
        dims = len(shape)
        padded = (*shape, *_ZEROS[dims:])
        _RECORD.pack_into(self.memory, at, seq, line, ENTERED | STARTED * started, op, dtype, dims, detail, *padded)
        self._last[0] = seq

    def leave(self) -> None:
        self.memory[self.at + STATE_AT] |= LEFT

    def expect(self, code, op: int, dtype: torch.dtype, shape: tuple, count: int) -> list[int]:
        """A record as int64 words, for compiled code that is about to enter ``count`` collectives of this kind.

        ``code``: the Python code of the function. The compiled code has to fill in the record's number and state.
        """
        file, line = self._file(code.co_filename), code.co_firstlineno
        for seq in range(self.seq + 1, self.seq + count + 1):
            self._note_file(seq % RECORDS, file)
        padded = (*shape, *_ZEROS[len(shape):])
        record = _RECORD.pack(0, line, ENTERED, op, DTYPE_CODES[dtype], len(shape), 0, *padded)
        return list(memoryview(record).cast("q"))

    def jump(self, seq: int) -> None:
        """Go on after record ``seq``: compiled code has written the records up to it."""
        self.seq, self.at = seq, RING_AT + (seq % RECORDS) * RECORD_BYTES

    def records(self, after: int = 0) -> list[OpRecord]:
        """The collectives after number `after` that the ring still holds, oldest first. Other processes may call it."""
        last = self.last_seq()
        records = [self.record(seq) for seq in range(max(after, last - RECORDS) + 1, last + 1)]
        return [record for record in records if record is not None]

    def record(self, seq: int) -> OpRecord | None:
        """Collective number `seq`, if the ring still holds it."""
        at = RING_AT + (seq % RECORDS) * RECORD_BYTES
        file = self._file_name(seq % RECORDS)
        number, line, state, op, dtype, dims, detail, *shape = _RECORD.unpack_from(self.memory, at)
        if number != seq or not seq:
            return None
        dtype = str(DTYPES[dtype]).removeprefix("torch.")
        return OpRecord(seq, OPS[op], tuple(shape[:dims]), dtype, detail % 256, file, line, bool(state & LEFT),
                        bool(state & STARTED))

    def signature(self, seq: int) -> bytes:
        """The part of a record that must be the same on all ranks."""
        at = RING_AT + (seq % RECORDS) * RECORD_BYTES
        return bytes(self.memory[at + SAME_FROM : at + SAME_TO])

    def last_seq(self) -> int:
        """Number of the newest collective; 0 if there was none."""
        return self._last[0]

    def clear(self) -> None:
        # Not the files, most of it: that of a record without a number is not used.
        self.memory[:_FILES_AT] = bytes(_FILES_AT)
        self.seq = 0

    def close(self) -> None:
        self._last.release()
        self.memory.release()

    def call_site(self, frame) -> tuple[bytes, int]:
        """File and line of the code that calls the collective: the first frame from `frame` on that is no machinery."""
        files = self._files
        while frame is not None:
            name = frame.f_code.co_filename
            if name not in files:
                plumbing = is_machinery(name)
                files[name] = None if plumbing else self._file(name)
            if (file := files[name]) is not None:
                return file, frame.f_lineno
            frame = frame.f_back
        return b"\0", 0

    @staticmethod
    def _file(name: str) -> bytes:
        return name.encode(errors="replace")[-_FILE_BYTES + 1 :] + b"\0"

    def _note_file(self, index: int, file: bytes) -> None:
        if self._noted[index] != file:  # seldom: most collectives come from the same file as 1024 records before
            at, begin = RING_AT + index * RECORD_BYTES, _FILES_AT + index * _FILE_BYTES
            self.memory[at : at + 8] = _NO_RECORD  # or a reader would see the old record with the new file
            self.memory[begin : begin + len(file)] = self._noted[index] = file

    def _file_name(self, index: int) -> str:
        at = _FILES_AT + index * _FILE_BYTES
        return bytes(self.memory[at : at + _FILE_BYTES]).split(b"\0", 1)[0].decode(errors="replace")


_NO_RECORD = bytes(8)
_ZEROS = (0,) * MAX_DIMS
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = os.path.dirname(os.__file__)
_MACHINERY = tuple(os.path.join(folder, "") for folder in (
    *(os.path.join(_PACKAGE, room) for room in ("ranks", "pool", "shard")), os.path.dirname(torch.__file__),
    os.path.join(_LIBRARY, "multiprocessing")))
RANKS_BEGINNING = os.path.join(_PACKAGE, "pool", "worker.py")  # what called this started the process
_MACHINERY_FILES = (os.path.join(_LIBRARY, "threading.py"), "<string>", "<frozen runpy>")


def is_machinery(file: str) -> bool:
    """Whether a source file belongs to the code between a collective and its caller."""
    return file.startswith(_MACHINERY) or file in _MACHINERY_FILES


def caller():
    """The frame that called the function which calls this."""
    return sys._getframe(2)

"""What a rank prints: captured and cut in the rank, shown by the parent in rank order.

ipykernel forwards what a child process prints only outside pytest. So a rank's output goes through the parent, or Lab
and nbval would show different text.
"""

import ctypes
import fcntl
import io
import os
import sys

from tplab.pool.shared_file import SharedFile

SHOWN_BYTES = 64 * 1024  # of one rank in one run
libc = ctypes.CDLL(None)


class Output(io.BufferedIOBase):
    """The byte stream under a rank's `sys.stdout` and `sys.stderr`: keeps the first bytes, calls `note` with the total.
    """

    def __init__(self, note):
        self.note = note
        self.total = 0

    def writable(self):
        return True

    def write(self, data):
        room = SHOWN_BYTES - self.total
        self.total += len(data)
        if room > 0:
            os.write(1, data[:room])
        self.note(self.total)
        return len(data)

    def fileno(self):
        return 1

    def restart(self):
        self.total = 0
        self.note(0)


def redirect(memory: SharedFile, note) -> Output:
    """From here on everything that this process prints, C libraries included, goes to `memory`."""
    flush()
    fcntl.fcntl(memory.fd, fcntl.F_SETFL, fcntl.fcntl(memory.fd, fcntl.F_GETFL) | os.O_APPEND)
    os.dup2(memory.fd, 1)
    os.dup2(memory.fd, 2)
    output = Output(note)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(output, encoding="utf-8", errors="backslashreplace", write_through=True) for _ in range(2))
    return output


def flush() -> None:
    """Write what C's stdio still has in its buffers."""
    libc.fflush(None)


class Reader:
    """The parent's side of one rank's output."""

    def __init__(self, memory: SharedFile):
        self.memory = memory
        self.dropped = 0

    def trim(self) -> None:
        """Drop all but the beginning of a very long output, so that C code cannot fill the memory."""
        length = self.memory.length()
        if length > 64 * SHOWN_BYTES:
            self.memory.truncate(SHOWN_BYTES)
            self.dropped += length - SHOWN_BYTES

    def take(self, printed: int) -> tuple[str, int]:
        """The text since the last call, and how many more bytes there were; `printed`: bytes that Python code wrote."""
        length = self.memory.length()
        data = self.memory.get(min(length, SHOWN_BYTES))
        self.memory.truncate()
        missing = max(length + self.dropped, printed) - len(data)
        self.dropped = 0
        return data.decode(errors="replace"), missing


def show(rank: int, text: str, missing: int) -> None:
    """Print a rank's lines; of a progress bar, which overwrites its line, only the last state."""
    for line in text.removesuffix("\n").split("\n") if text else ():
        print(f"[rank {rank}] {line.rstrip(chr(13)).rpartition(chr(13))[2]}")
    if missing > 0:
        print(f"[rank {rank}] … cut here: {missing:,} bytes more were printed")

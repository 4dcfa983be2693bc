"""Unnamed shared files: the memory that a pool and its ranks share.

On Linux they are `memfd`s, which need no room in ``/dev/shm`` or in the temporary folder and leave nothing behind.
Elsewhere they are temporary files without a name.
"""

import mmap
import os
import tempfile
from multiprocessing import reduction


class SharedFile:
    """A file that has no name. Pickled while a rank is being started, it is the same file there."""

    def __init__(self, label: str, size: int = 0):
        self.size, self._descriptors = size, []
        if hasattr(os, "memfd_create"):
            self._open(os.memfd_create, f"tplab-{os.getpid()}-{label}")
        else:
            with tempfile.TemporaryFile() as file:
                self._open(os.dup, file.fileno())
        os.ftruncate(self.fd, size)

    def _open(self, opens, what) -> None:
        # In one call of C code: a Ctrl-C between the call of `opens` and an assignment would leave the file open.
        self._descriptors.extend(map(opens, [what]))

    @property
    def fd(self) -> int:
        """The descriptor; -1 if the file is closed."""
        return self._descriptors[0] if self._descriptors else -1

    def __reduce__(self):
        return _arrive, (reduction.DupFd(self.fd), self.size)

    def duplicate(self) -> "SharedFile":
        """The same file under another descriptor, which can be closed by itself."""
        twin = _without_descriptor(self.size)
        twin._open(os.dup, self.fd)
        return twin

    def map(self) -> mmap.mmap:
        return mmap.mmap(self.fd, self.size)

    def put(self, data: bytes) -> None:
        """Replace the content; memory that a longer one needed is freed."""
        os.ftruncate(self.fd, len(data))
        view, offset = memoryview(data), 0
        while offset < len(view):
            offset += os.pwrite(self.fd, view[offset:], offset)

    def get(self, length: int) -> bytearray:
        data = bytearray(length)
        view, done = memoryview(data), 0
        while done < length and (count := os.preadv(self.fd, [view[done:]], done)):
            done += count
        return data[:done] if done < length else data

    def length(self) -> int:
        return os.fstat(self.fd).st_size

    def truncate(self, size: int = 0) -> None:
        os.ftruncate(self.fd, size)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __del__(self):
        if hasattr(self, "_descriptors"):
            self.close()


def _arrive(duplicate, size):
    shared = _without_descriptor(size)
    shared._descriptors.append(duplicate.detach())
    return shared


def _without_descriptor(size):
    shared = object.__new__(SharedFile)
    shared.size, shared._descriptors = size, []
    return shared

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
        if hasattr(os, "memfd_create"):
            self.fd = os.memfd_create(f"tplab-{os.getpid()}-{label}")
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())
        self.size = size
        os.ftruncate(self.fd, size)

    def __reduce__(self):
        return _arrive, (reduction.DupFd(self.fd), self.size)

    def duplicate(self) -> "SharedFile":
        """The same file under another descriptor, which can be closed by itself."""
        return _adopt(os.dup(self.fd), self.size)

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
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __del__(self):
        if hasattr(self, "fd"):
            self.close()


def _arrive(duplicate, size):
    return _adopt(duplicate.detach(), size)


def _adopt(fd, size):
    shared = object.__new__(SharedFile)
    shared.fd, shared.size = fd, size
    return shared

"""Temporary folders that are removed when the process that made them has ended, also if it was killed.

A folder's name has the number of its process, and the process holds a lock on the folder. The number alone proves
nothing: where containers or machines share a folder for temporary files, it can be a process of another one.
"""

import atexit
import fcntl
import glob
import os
import re
import shutil
import tempfile
from contextlib import suppress

import psutil

_locks = {}  # by folder: the open file that holds the lock


def make_folder() -> str:
    """A new folder of mode 0700, for this process and its ranks. Those of processes that were killed are removed."""
    _remove_leftovers()
    folder = tempfile.mkdtemp(prefix=f"tplab-{os.getpid()}-")
    _locks[folder] = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks
        fcntl.flock(_locks[folder], fcntl.LOCK_SH)
    return folder


def remove_folder(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder in _locks:
        os.close(_locks.pop(folder))


def folders_of(pid: int | str) -> list[str]:
    """The folders that a process has made; ``*``: any process."""
    return glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"tplab-{pid}-*"))


def _remove_leftovers() -> None:
    for folder in folders_of("*"):
        number = re.match(r"tplab-(\d+)-", os.path.basename(folder))
        with suppress(OSError):  # it is another user's, in use, or has just been removed by another process
            if number and not psutil.pid_exists(int(number[1])):
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                finally:
                    os.close(lock)


@atexit.register
def _remove_all() -> None:
    for folder in list(_locks):
        remove_folder(folder)


os.register_at_fork(after_in_child=_locks.clear)  # the locks are the parent's

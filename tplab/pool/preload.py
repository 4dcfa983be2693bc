"""Loaded by the fork server before it forks ranks, and by nobody else.

The modules below take seconds to import. Here that happens once, and each rank, also one that takes the place of a dead
one, starts in some tens of milliseconds with all of them. And after a sudden end of the notebook this process, which
notices it whatever its ranks are doing, removes what is left.
"""

import atexit
import gc
import os
import re
import shutil
import socket
import sys
import time
from contextlib import suppress

import cloudpickle  # noqa: F401
import llvmlite.binding  # noqa: F401
import torch.distributed  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401
import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import tplab.pool.worker  # noqa: F401
from tplab.pool.private_folder import folders_of


def _settle(listener_fd: int) -> None:
    """In the fork server only."""
    # Out of the notebook's process group: a kernel that is stopped the hard way has its whole group killed, and
    # nobody could then remove its folders.
    os.setsid()
    gc.freeze()  # garbage collection in a rank need not walk through what was imported, nor copy its pages
    gc.enable()
    with socket.socket(fileno=os.dup(listener_fd)) as listener:
        atexit.register(_sweep, os.getpid(), os.getppid(), listener.getsockname())


def _sweep(mine: int, parent: int, address: str) -> None:
    """The parent is gone: remove its folders, and end at once, upon which the kernel ends all ranks that are left.

    (Taking down an interpreter with all of the above in it can take seconds on a busy machine.)
    """
    if os.getpid() != mine:
        return  # a rank's end
    end = time.monotonic() + 1.0  # its files are closed, which ends this process, a moment before it is gone
    while os.getppid() == parent:
        if time.monotonic() > end:
            return  # it lives, and this process ends by an error
        time.sleep(0.001)
    with suppress(OSError):  # there may be no temporary folder any more
        for folder in folders_of(parent):
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        os.unlink(address)
        os.rmdir(os.path.dirname(address))  # multiprocessing's own; stays if anything else is in it
    os._exit(0)


# Any other process that imports this module, by accident or to read its documentation, stays as it is.
if _command := re.search(r"multiprocessing\.forkserver import main; main\((\d+),", " ".join(sys.orig_argv)):
    _settle(int(_command[1]))

"""The last module that the fork server imports before it forks ranks; nothing else imports it.

The modules below take seconds to import. The fork server imports them once, and each rank, also one that replaces a
dead one, starts with all of them in some tens of milliseconds. And when the notebook's process has ended, however it
ended, the fork server removes the folders that are left.
"""

import atexit
import gc
import os
import re
import shutil
import signal
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
    from tplab.pool.before_imports import PARENT  # here, for it changes the process that imports it

    # Out of the notebook's process group: killing a kernel kills its whole group, and this process must be there
    # to remove the kernel's folders.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # garbage collection in a rank need not search what was imported, nor copy its pages
    gc.enable()
    with socket.socket(fileno=os.dup(listener_fd)) as listener:
        atexit.register(_sweep, os.getpid(), PARENT, listener.getsockname())


def _sweep(mine: int, parent: int, address: str) -> None:
    """The parent has ended: remove its folders and end at once. The kernel then ends all ranks that are left.

    (An orderly end of an interpreter that has imported all of the above can take seconds on a busy machine.)
    """
    if os.getpid() != mine:
        return  # a rank ends
    end = time.monotonic() + 1.0  # the parent's files are closed, upon which this process ends, before it is gone
    while os.getppid() == parent:
        if time.monotonic() > end:
            return  # the parent lives on; this process ends by an error
        time.sleep(0.001)
    with suppress(OSError):  # there may be no temporary folder any more
        for folder in folders_of(parent):
            shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        os.unlink(address)
        os.rmdir(os.path.dirname(address))  # multiprocessing's own; stays if anything else is in it
    os._exit(0)


# Nothing happens in any other process that imports this module, say to read its documentation.
if _command := re.search(r"multiprocessing\.forkserver import main; main\((\d+),", " ".join(sys.orig_argv)):
    _settle(int(_command[1]))

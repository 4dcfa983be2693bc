"""The last module that the fork server imports before it forks ranks; nothing else imports it."""

import atexit
import gc
import glob
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from contextlib import suppress

import tplab.pool.worker  # noqa: F401


def _end() -> None:
    """The notebook's process has ended, perhaps by SIGKILL: remove its pools' folders, and end at once.

    (The orderly end of an interpreter that has imported all of the above can take seconds on a busy machine.)
    """
    for folder in glob.glob(os.path.join(tempfile.gettempdir(), f"tplab-{PARENT}-*")):
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # an orderly end of the notebook's process has removed it
        os.unlink(_address)
        os.rmdir(os.path.dirname(_address))  # multiprocessing's own; stays if anything else is in it
    os._exit(0)


# Nothing happens in any other process that imports this module, say to read its documentation.
if _command := re.search(r"from multiprocessing\.forkserver import main; main\((\d+),", " ".join(sys.orig_argv)):
    from tplab.pool.before_imports import PARENT  # here, for it changes the process that imports it

    os.setsid()  # a Jupyter kernel that shuts down waits until all children in its process group have ended
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # garbage collection in a rank need not search what was imported, nor copy its pages
    gc.enable()
    with socket.socket(fileno=os.dup(int(_command[1]))) as _listener:
        _address = _listener.getsockname()
    atexit.register(_end)

"""Starting rank processes with torch.multiprocessing: fork server with torch loaded on Linux, spawn elsewhere.

The fork server is Python's own. It belongs to the process that made the first pool, is kept for the next pool or the
next rank (so that these start in milliseconds), and ends with that process.
"""

import os
import sys
import threading
from contextlib import contextmanager
from multiprocessing import current_process, forkserver, spawn

import torch.multiprocessing as mp

from tplab.ranks import worker
from tplab.ranks.errors import RankError

_PRELOAD = ["torch", "cloudpickle", "tplab.ranks.nursery"]
_NAME = "tplab-rank-"
_lock = threading.Lock()


def start(spec: worker.Spec):
    """Start one rank; returns its process object."""
    if sys.platform.startswith("linux"):
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
    else:
        context = mp.get_context("spawn")
    process = context.Process(target=worker.main, args=(spec,), name=f"{_NAME}{spec.rank}", daemon=True)
    try:
        with _lock, _without_main():
            process.start()
    except OSError as error:
        raise RankError(f"rank {spec.rank} could not be started: {error} (temporary folder: {spec.folder})") from error
    return process


def forget() -> None:
    """In a fork of this process: leave the fork server to the parent, and start an own one when one is needed."""
    global _lock
    server = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    preload = server._preload_modules
    server.__init__()
    server.set_forkserver_preload(preload)
    current_process()._config.pop("tempdir", None)  # where the parent's server listens
    _lock = threading.Lock()


@contextmanager
def _without_main():
    """Keep a rank from importing the learner's script.

    multiprocessing runs the parent's main module again in every child, so a script without an
    ``if __name__ == "__main__"`` guard would start pools from inside pools. Functions of ``__main__`` travel by value,
    so a rank has no use for it.
    """
    prepare = spawn.get_preparation_data

    def prepare_rank(name):
        data = prepare(name)
        if name.startswith(_NAME):
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    spawn.get_preparation_data = prepare_rank
    try:
        yield
    finally:
        spawn.get_preparation_data = prepare

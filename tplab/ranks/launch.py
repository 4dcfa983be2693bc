"""Starting rank processes with torch.multiprocessing: fork server with torch loaded on Linux, spawn elsewhere."""

import sys
import threading
from contextlib import contextmanager
from multiprocessing import spawn

import torch.multiprocessing as mp

from tplab.ranks import worker

_PRELOAD = ["torch", "torch.distributed", "cloudpickle", "tplab.ranks.worker"]
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
    with _lock, _without_main():
        process.start()
    return process


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

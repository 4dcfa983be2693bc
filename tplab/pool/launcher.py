"""Starting rank processes with torch.multiprocessing: fork server with torch loaded on Linux, spawn elsewhere.

The fork server is Python's own. All pools of a process share it, and it ends with the process. A rank starts in
milliseconds.
"""

import signal
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import closing, contextmanager
from multiprocessing import resource_tracker, util
from types import ModuleType

import torch.multiprocessing as mp

from tplab.checkpoint.names import cache_dir
from tplab.pool import worker
from tplab.ranks.errors import RankError

# Modules that take seconds to import. The fork server imports them once, and each rank, also one that replaces a dead
# one, starts with all of them in some tens of milliseconds.
SLOW = ["torch", "cloudpickle", "llvmlite.binding", "torch.distributed", "transformers.models.llama.modeling_llama",
        "transformers.models.qwen2.modeling_qwen2"]
PRELOAD = ["tplab.pool.before_imports", *SLOW, "tplab.pool.preload"]
_lock = threading.Lock()


def start(spec: worker.Spec):
    """Start one rank; returns its process object. The files of `spec` are closed here when they have been sent.

    This happens on a thread of its own, where no interrupt can cut it short: half a request would end the fork server.
    """
    started: Future = Future()
    try:
        threading.Thread(target=_start, args=(spec, started), name=f"start of rank {spec.rank}").start()
        return started.result()
    except Exception as error:
        raise RankError(f"rank {spec.rank} could not be started: {error}") from error
    except BaseException:  # an interrupt: the process is ended when it has started
        started.add_done_callback(_end)
        raise


def _start(spec: worker.Spec, started: Future) -> None:
    try:
        started.set_result(_process(spec))
    except BaseException as error:
        started.set_exception(error)


def _end(started: Future) -> None:
    if started.exception() is None:
        started.result().kill()
        started.result().join()


def _process(spec: worker.Spec):
    linux = sys.platform.startswith("linux")
    context = mp.get_context("forkserver" if linux else "spawn")
    process = context.Process(target=worker.main, args=(spec,), name=f"tplab-rank-{spec.rank}", daemon=True)
    with closing(spec), _lock, without_main():
        cache_dir()  # where there is no home folder, the ranks use this process's temporary one
        start_tracker()
        # A new process inherits what this thread blocks: Ctrl-C would end the fork server before it can ignore it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if linux:
            context.set_forkserver_preload(PRELOAD)
        process.start()
    return process


def start_tracker() -> None:
    """Start multiprocessing's resource tracker, which ignores SIGTERM, in a session of its own: a Jupyter kernel that
    shuts down waits for seconds until all children in its process group have ended."""
    def apart(path, args, passfds):
        tracker = subprocess.Popen(args, executable=path, pass_fds=passfds, restore_signals=False,
                                   start_new_session=True)
        tracker.returncode = 0  # it ends when this process does; nobody waits for it
        return tracker.pid

    usual, util.spawnv_passfds = util.spawnv_passfds, apart
    try:
        resource_tracker.ensure_running()
    finally:
        util.spawnv_passfds = usual


@contextmanager
def without_main():
    """Keep a rank from importing the learner's script; functions are sent by value.

    multiprocessing runs the parent's main module again in every child. A script without an
    ``if __name__ == "__main__"`` guard would then start pools inside of pools.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

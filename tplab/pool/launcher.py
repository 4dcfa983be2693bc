"""Starting rank processes with torch.multiprocessing: fork server with torch loaded on Linux, spawn elsewhere.

The fork server is Python's own. All pools of a process share it, and it ends with the process. A rank starts in
milliseconds.
"""

import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from multiprocessing import resource_tracker, util
from types import ModuleType

import torch.multiprocessing as mp

from tplab.checkpoint.names import cache_dir
from tplab.pool import worker
from tplab.ranks.errors import RankError

_PRELOAD = ["tplab.pool.before_imports", "torch", "cloudpickle", "tplab.pool.preload"]
_lock = threading.Lock()


def start(spec: worker.Spec):
    """Start one rank; returns its process object. The files of `spec` are closed here when they have been sent.

    This happens on a thread of its own, where no interrupt can cut it short: half a request would end the fork server.
    A process that is not wanted any more is ended, whether it had started before the interrupt or not.
    """
    outcome, done, unwanted = [], threading.Event(), threading.Event()

    def run():
        try:
            outcome.append(_process(spec))
        except Exception as error:  # raised below, in the thread that asked for this
            outcome.append(error)
        finally:
            spec.close()
            done.set()
        if unwanted.is_set():
            _end(outcome)

    try:
        threading.Thread(target=run, name=f"start of rank {spec.rank}", daemon=True).start()
        done.wait()  # join would take an interrupted thread for an ended one
    except BaseException:
        # Each side sets its own flag before it reads the other's, so at least one of them ends the process.
        unwanted.set()
        if done.is_set():
            _end(outcome)
        raise
    if isinstance(outcome[0], Exception):
        raise RankError(f"rank {spec.rank} could not be started: {outcome[0]}") from outcome[0]
    return outcome[0]


def _end(outcome: list) -> None:
    if not isinstance(outcome[0], Exception):
        outcome[0].kill()
        outcome[0].join()


def _process(spec: worker.Spec):
    linux = sys.platform.startswith("linux")
    context = mp.get_context("forkserver" if linux else "spawn")
    process = context.Process(target=worker.main, args=(spec,), name=f"tplab-rank-{spec.rank}", daemon=True)
    with _lock, _without_main():
        cache_dir()  # where there is no home folder, the ranks use this process's temporary one
        _start_tracker()
        # A new process inherits what this thread blocks: Ctrl-C would end the fork server before it can ignore it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if linux:
            context.set_forkserver_preload(_PRELOAD)
        process.start()
    return process


def _start_tracker() -> None:
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
def _without_main():
    """Keep a rank from importing the learner's script; functions are sent by value.

    multiprocessing runs the parent's main module again in every child. A script without an
    ``if __name__ == "__main__"`` guard would then start pools inside of pools.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main

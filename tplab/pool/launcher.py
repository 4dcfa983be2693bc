"""Starting rank processes with torch.multiprocessing: fork server with torch loaded on Linux, spawn elsewhere.

The fork server is Python's own. All pools of a process share it, and it ends with the process. A rank starts in
milliseconds.
"""

import os
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from multiprocessing import current_process, forkserver, resource_tracker, spawn, util

import torch.multiprocessing as mp

from tplab.pool import worker
from tplab.ranks.errors import RankError

_PRELOAD = ["tplab.pool.before_imports", "torch", "cloudpickle", "tplab.pool.preload"]
_NAME = "tplab-rank-"
_LONGEST_FOLDER = 107 - len("/pymp-12345678/listener-12345678")  # bytes: a socket's name has at most 107
_lock = threading.Lock()


def start(spec: worker.Spec):
    """Start one rank; returns its process object. The files of `spec` are closed here when they have been sent.

    This happens on a thread of its own, where no interrupt can cut it short: half a request would end the fork server.
    """
    task = _Start(spec)
    try:
        task.start()
        task.done.wait()  # join would take an interrupted thread for an ended one
    except BaseException:
        task.abandon()
        raise
    if task.error is not None:
        raise RankError(f"rank {spec.rank} could not be started: {task.error} (temporary folder: {spec.folder})"
                        ) from task.error
    return task.process


class _Start(threading.Thread):
    """One start. A process that is not wanted any more is ended, whether it had started before `abandon` or not."""

    def __init__(self, spec):
        super().__init__(name=f"start of rank {spec.rank}", daemon=True)
        self.spec, self.process, self.error, self.unwanted = spec, None, None, False
        self.done = threading.Event()

    def run(self):
        try:
            self.process = self._process()
        except Exception as error:  # raised by `start`, in the thread that asked for this
            self.error = error
        finally:
            self.spec.close()
            self.done.set()
        if self.unwanted:
            self._end()

    def abandon(self):
        # Each side sets its own flag before it reads the other's, so at least one of them ends the process.
        self.unwanted = True
        if self.done.is_set():
            self._end()

    def _end(self):
        if self.process is not None:
            self.process.kill()
            self.process.join()

    def _process(self):
        linux = sys.platform.startswith("linux")
        context = mp.get_context("forkserver" if linux else "spawn")
        name = f"{_NAME}{self.spec.rank}"
        process = context.Process(target=worker.main, args=(self.spec,), name=name, daemon=True)
        with _lock, _without_main():
            _find_server()
            _start_tracker()
            if linux:
                _make_socket_folder()
                context.set_forkserver_preload(_PRELOAD)
            process.start()
        return process


def forget() -> None:
    """In a fork of this process: leave the fork server to the parent; the next start makes another one."""
    global _lock
    if (alive := forkserver._forkserver._forkserver_alive_fd) is not None:
        os.close(alive)
    forkserver._forkserver.__init__()
    current_process()._config.pop("tempdir", None)  # where the parent's server listens
    _lock = threading.Lock()


def _find_server() -> None:
    """Have the next start make another fork server if this one's socket was removed from the temporary folder.

    The old one must stay, or the ranks that it has started would end with it.
    """
    address = forkserver._forkserver._forkserver_address
    if address is not None and not os.path.exists(address):
        with suppress(FileExistsError):
            os.mkdir(os.path.dirname(address), 0o700)  # multiprocessing listens there again, and removes it at exit
        forkserver._forkserver.__init__()


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


def _make_socket_folder() -> None:
    """multiprocessing's folder for its socket, under /tmp where TMPDIR is too long for a socket's name."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > _LONGEST_FOLDER:
        tempfile.tempdir = "/tmp"
        try:
            util.get_temp_dir()  # made once, and removed at the end
        finally:
            tempfile.tempdir = usual


@contextmanager
def _without_main():
    """Keep a rank from importing the learner's script; functions are sent by value.

    multiprocessing runs the parent's main module again in every child. A script without an
    ``if __name__ == "__main__"`` guard would then start pools inside of pools.
    """
    vars(sys.modules["__main__"]).setdefault("__spec__", None)  # multiprocessing reads it; IPython's %reset deletes it
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

"""Kernels that start at once, for batches and tests, which give each notebook a kernel of its own.

A notebook's process imports torch and transformers, and so does the fork server of its ranks: more than half of the
seconds of a short notebook. Here both are forked from one process that has imported them. Variables, threads, working
folder and environment are each kernel's own, as always.

Linux only; elsewhere kernels start as usual.
"""

import atexit
import gc
import multiprocessing as mp
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint
from multiprocessing import forkserver, resource_tracker, util

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from tplab.pool.launcher import PRELOAD, SLOW, start_tracker, without_main

# The first one prepares the process, as it does that of a fork server of ranks. Of the lab's own modules, which may
# read the environment, none else.
IMPORTED = ["tplab.pool.before_imports", *SLOW, "pandas", "ipywidgets", "ipykernel.kernelapp", "ipykernel.zmqshell",
            __name__]
_path = list(sys.path)  # in the process that imports them: a new interpreter's own
_server, _lock = forkserver.ForkServer(), threading.Lock()  # not the one that this process's own ranks come from


def use_warm_kernels() -> None:
    """From now on, Jupyter starts this process's kernels so."""
    if sys.platform.startswith("linux"):
        _server.set_forkserver_preload(IMPORTED)
        factory = KernelProvisionerFactory.instance()
        factory.provisioners["warm"] = EntryPoint("warm", f"{__name__}:WarmProvisioner", factory.GROUP_NAME)
        factory.default_provisioner_name = "warm"


def started_again(function, *args, **kwargs):
    """``function(*args, **kwargs)``, up to three times while its kernel dies at once: Jupyter chooses a kernel's ports
    before the kernel binds them, and on a busy machine another program can have taken them by then."""
    for _ in range(2):
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if "Kernel died before replying" not in str(error):
                raise
    return function(*args, **kwargs)


class WarmProvisioner(LocalProvisioner):
    """Jupyter's provisioner of local kernels; the process of a Python kernel is forked."""

    async def launch_kernel(self, cmd, **kwargs):
        if cmd[1:3] != ["-m", "ipykernel_launcher"]:
            return await super().launch_kernel(cmd, **kwargs)
        self.process = _Kernel(cmd[2:], kwargs["env"], kwargs.get("cwd") or os.getcwd())
        self.pid = self.pgid = self.process.pid
        return self.connection_info


class _Kernel:
    """As much of `subprocess.Popen` as a provisioner uses."""

    stdin = stdout = stderr = None

    def __init__(self, argv: list[str], env: dict[str, str], cwd: str):
        self.process = mp.get_context("forkserver").Process(target=_serve, args=(argv, env, cwd), daemon=True)
        with _lock, _own_server(), without_main():
            self.process.start()
        self.pid, self.kill, self.terminate = self.process.pid, self.process.kill, self.process.terminate

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            os.kill(self.pid, number)


@contextmanager
def _own_server():
    usual, forkserver.connect_to_new_process = forkserver.connect_to_new_process, _server.connect_to_new_process
    # Ctrl-C would end a server that has just begun, before it can ignore it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        forkserver.connect_to_new_process = usual


def _serve(argv: list[str], env: dict[str, str], cwd: str) -> None:
    """The kernel's process."""
    os.setsid()
    mp.current_process().daemon = False  # a daemon may have no children, and this one has ranks
    mp.set_start_method(None, force=True)  # the usual one, not this process's own
    # The process that this one was forked from, and its resource tracker, live as long as any other has these ends of
    # their pipes open.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    os.close(resource_tracker._resource_tracker._fd)
    resource_tracker._resource_tracker._fd = None
    start_tracker()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = _path
    _start_fork_server_of_ranks()
    threads = env.get("OMP_NUM_THREADS", "").partition(",")[0]
    if threads.isdecimal() and int(threads):  # the library read it when it was imported
        sys.modules["torch"].set_num_threads(int(threads))
    gc.freeze()
    gc.enable()
    sys.argv = [*argv, f"--IPKernelApp.parent_handle={os.getppid()}"]  # it ends when its parent does
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()
    atexit._run_exitfuncs()  # multiprocessing's processes end without


def _start_fork_server_of_ranks() -> None:
    """As `multiprocessing` does, but forked: this process has no other threads yet."""
    def fork(path, args, passfds):
        return os.fork() or _serve_forks([os.fsdecode(word) for word in args], {0, 1, 2, *passfds})

    usual, util.spawnv_passfds = util.spawnv_passfds, fork
    try:
        forkserver.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = usual


def _serve_forks(args: list[str], kept: set[int]) -> None:
    """The fork server's process, whose code is the last of a command line's ``args``."""
    try:
        for fd in {int(fd) for fd in os.listdir("/proc/self/fd")} - kept:
            with suppress(OSError):  # that of the listing itself
                os.close(fd)
        atexit._clear()
        for name in {"tplab.pool.before_imports", "tplab.pool.preload"} & sys.modules.keys():
            del sys.modules[name]  # they prepare the process that imports them: this one
        sys.orig_argv = args
        with suppress(SystemExit):
            exec(args[-1], {})
        atexit._run_exitfuncs()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)  # the functions above end it before, if nothing is wrong

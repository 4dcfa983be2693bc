"""The process of one rank: it executes commands, answers, and ends with its parent."""

import faulthandler
import fcntl
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver, parent_process

import torch
import torch.distributed as dist

from tplab.patch import applied
from tplab.pool import capture, control_block, transfer
from tplab.pool.control_block import ControlBlock, fence
from tplab.pool.shared_file import SharedFile
from tplab.pool.shared_memory import SharedMemoryGroup
from tplab.ranks import context, raw_calls
from tplab.ranks.errors import Abandoned, Frame, RankError, describe, learner_stack


@dataclass
class Spec:
    """What a rank gets when it is started, sent by `multiprocessing`."""

    rank: int
    size: int
    strict: bool
    threads: int  # for torch's products
    folder: str  # the pool's private one
    birth: int  # see `control_block.BIRTH`
    memory: SharedFile  # the control block
    inbox: SharedFile  # the parent's payload, the same for all ranks
    outbox: SharedFile  # this rank's answer
    output: SharedFile  # what this rank prints
    stacks: SharedFile  # where faulthandler writes
    wake: connection.Connection

    def close(self) -> None:
        for file in (self.memory, self.inbox, self.outbox, self.output, self.stacks, self.wake):
            file.close()


_KEPT = 1 << 27  # bytes of freed memory
_LONG = 0.1  # seconds: a command that took longer may have loaded a model


def main(spec: Spec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    _die_with_parent()
    control = ControlBlock(spec.memory, spec.size)
    output = capture.redirect(spec.output, lambda count: control.set_word(spec.rank, control_block.PRINTED, count))
    fcntl.fcntl(spec.stacks.fd, fcntl.F_SETFL, fcntl.fcntl(spec.stacks.fd, fcntl.F_GETFL) | os.O_APPEND)
    faulthandler.enable(spec.stacks.fd, all_threads=False)
    faulthandler.register(signal.SIGUSR2, spec.stacks.fd, all_threads=False)
    torch.set_num_threads(spec.threads)
    _keep_freed_memory()
    # A rank starts no processes. But with this setting the semaphores of its libraries (tqdm has one) have no name, and
    # Python does not warn of them after a rank was killed.
    multiprocessing.set_start_method("fork", force=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    rank = _Rank(spec, control, output)
    with raw_calls.logged(rank.group):
        rank.serve()


def _keep_freed_memory() -> None:
    """Keep up to 128 MB of freed memory for the next layer's activations.

    By default glibc gives large pieces back to the system, and each page costs a fault when it is used again: up to 9 %
    of the time of a prompt of 512 tokens (SmolLM2, 2 ranks).
    """
    if hasattr(capture.libc, "mallopt"):  # glibc's
        trim_threshold, mmap_threshold = -1, -3
        capture.libc.mallopt(mmap_threshold, 1 << 25)
        capture.libc.mallopt(trim_threshold, _KEPT)


def _return_freed_memory() -> None:
    """Give the rest back to the system: by itself glibc looks only at the heap's end, and each of two ranks kept
    600 MB of a SmolLM2 in float64 that was no longer used. Where nothing is free this takes 0.2 ms at most."""
    if hasattr(capture.libc, "malloc_trim"):
        capture.libc.malloc_trim(_KEPT)


def _die_with_parent() -> None:
    """See that the rank ends with the notebook, however that ended and whatever the rank is doing.

    A thread waits for the parent's end, which works while the rank is in gloo or in Python. On Linux a rank in C++ code
    that never releases the interpreter ends too: the parent's end ends the fork server, and the kernel its children.
    """
    if sys.platform.startswith("linux"):
        capture.libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        # The fork server lives as long as a process has this end of its pipe open; a rank does not need it.
        server = forkserver._forkserver
        if server._forkserver_alive_fd is not None:
            os.close(server._forkserver_alive_fd)
            server._forkserver_alive_fd = None
    threading.Thread(target=_watch_parent, name="tplab-parent-watch", daemon=True).start()


def _watch_parent() -> None:
    connection.wait([parent_process().sentinel])
    os._exit(1)


class _Rank:
    def __init__(self, spec: Spec, control: ControlBlock, output: capture.Output):
        self.spec, self.control, self.output = spec, control, output
        self.group = SharedMemoryGroup(spec.rank, control, spec.strict)
        self.group.thread = threading.get_ident()
        context.set_process_group(self.group)
        self.interruptible = False
        signal.signal(signal.SIGUSR1, self._interrupt)

    def _interrupt(self, signum, frame):
        if self.interruptible:
            self.interruptible = False
            raise Abandoned

    def serve(self) -> None:
        done = 0
        while True:
            command = self.control.command()
            if self.control.word(self.spec.rank, control_block.BIRTH) != self.spec.birth:
                return  # an interrupt cut this start short, and another process is this rank now
            if command.number == done:
                if not os.read(self.spec.wake.fileno(), 4096):
                    return
                continue
            done = command.number
            if command.kind == control_block.DROP:
                _leave_gloo()
            self.control.set_word(self.spec.rank, control_block.STARTED, done)
            if command.kind == control_block.DROP:
                continue
            begin = time.monotonic()
            try:
                outcome, answer = self._execute(command)
            except Abandoned:  # raised just as the function ended
                outcome, answer = _failed(Abandoned())
            self._answer(done, outcome, answer)
            if time.monotonic() - begin > _LONG:
                _return_freed_memory()

    def _execute(self, command):
        try:
            if command.kind == control_block.JOIN:
                return self._run(command.epoch, self._join, (command.epoch,))
            fn, args, kwargs, patches = transfer.loads(self.spec.inbox.get(command.length))
        except Exception as error:
            error.add_note("The call could not be read on the rank.")
            return _failed(error)
        if command.kind == control_block.SETUP:
            return self._run(command.epoch, _set_up, args)
        return self._run(command.epoch, fn, args, kwargs, patches)

    def _run(self, epoch, fn, args, kwargs=None, patches=()):
        self.output.restart()
        self.group.begin_command()
        try:
            self.interruptible = True
            if self.control.words[control_block.ABANDONED] >= epoch:
                raise Abandoned
            with applied(*patches):
                result = fn(*args, **(kwargs or {}))
            self.group.end()
            self.interruptible = False
        except BaseException as error:
            self.interruptible = False
            return _failed(error)
        try:
            return control_block.OK, transfer.dumps(result)
        except Exception as error:
            path, value, why = transfer.find_unsendable(result, "result") or ("result", result, error)
            text = f"{path} ({type(value).__name__}) of rank {self.spec.rank} cannot be sent back: {why}"
            return _failed(RankError(text))

    def _join(self, epoch: int) -> None:
        """Join a new epoch: counters at zero, and a new gloo group for code that uses `torch.distributed`."""
        _leave_gloo()
        self.group.begin_epoch(epoch)
        rank, size = self.spec.rank, self.spec.size
        store = dist.FileStore(os.path.join(self.spec.folder, f"gloo-{epoch}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=30))

    def _answer(self, number: int, outcome: int, answer: bytes) -> None:
        capture.flush()
        self.spec.outbox.put(answer)
        control, rank = self.control, self.spec.rank
        control.set_word(rank, control_block.OUTCOME, outcome)
        control.set_word(rank, control_block.ANSWER_LENGTH, len(answer))
        control.set_word(rank, control_block.ANSWERED_AT, time.monotonic_ns())
        fence()
        control.set_word(rank, control_block.ANSWERED, number)
        os.write(self.spec.wake.fileno(), b"a")


def _failed(error):
    return control_block.FAILED, transfer.dumps(Report.of(error))


def _leave_gloo() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _set_up(path, folder):
    """Take over the notebook's module path and working folder."""
    sys.path[:] = path
    os.chdir(folder)


@dataclass
class Report:
    """An exception of a rank, in a form that can always be sent."""

    kind: str  # raised or stopped
    text: str
    frames: list[Frame]
    exception: bytes | None  # pickled by itself: its class may be unknown in the parent

    @classmethod
    def of(cls, error: BaseException) -> "Report":
        frames = learner_stack(error)
        if isinstance(error, Abandoned):
            return cls("stopped", "stopped", frames, None)
        try:
            pickled = transfer.dumps(error)
        except Exception:
            pickled = None  # the text is enough
        return cls("raised", describe(error), frames, pickled)

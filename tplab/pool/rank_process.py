"""The parent's handle on one rank: its process, its files, the signals it understands."""

import os
import re
import signal
import time
from multiprocessing import Pipe
from multiprocessing.process import _children

from tplab.pool import launcher
from tplab.pool.capture import Reader
from tplab.pool.control_block import STARTED
from tplab.pool.shared_file import SharedFile
from tplab.pool.worker import Spec
from tplab.ranks.errors import Frame

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Member:
    """One rank as seen from the parent."""

    def __init__(self, pool, rank: int):
        self.board = pool._board
        self.rank = rank
        self.process = None
        self.pipe = None
        self.outbox, self.output, self.stacks = (
            SharedFile(f"{label}-{rank}", pool._folder) for label in ("outbox", "output", "stacks")
        )
        self.reader = Reader(self.output)

    def start(self, pool) -> None:
        """Start the process, in place of a dead one."""
        self.release_process()
        for memory in (self.outbox, self.output, self.stacks):
            memory.truncate()
        self.pipe, theirs = Pipe()
        self.process = launcher.start(
            Spec(
                rank=self.rank, size=pool.size, strict=pool.strict, folder=pool._folder, parent_pid=os.getpid(),
                birth=pool._epoch, memory=pool._memory.duplicate(), inbox=pool._inbox.duplicate(),
                outbox=self.outbox.duplicate(), output=self.output.duplicate(), stacks=self.stacks.duplicate(),
                wake=theirs,
            )  # fmt: skip
        )

    def wake(self) -> None:
        try:
            os.write(self.pipe.fileno(), b"w")
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has just died, which the sentinel tells better

    def calm(self) -> bool:
        """Take in the wake-up bytes that the rank has sent; False at the end of the pipe."""
        try:
            return bool(os.read(self.pipe.fileno(), 4096))
        except ConnectionResetError:  # it died with a wake-up of ours unread
            return False

    def dead(self) -> bool:
        return self.process is None or not self.process.is_alive()

    def is_up(self) -> bool:
        """Whether the process has come as far as taking commands; before that a signal would end it."""
        return self.board.word(self.rank, STARTED) > 0 and not self.dead()

    def signal(self, number: int) -> None:
        if self.is_up():
            os.kill(self.process.pid, number)

    def death(self) -> str:
        """How a dead process ended: ``SIGKILL`` or ``exit code 3``."""
        self.process.join(5)
        code = self.process.exitcode
        if code is not None and code < 0:
            try:
                return signal.Signals(-code).name
            except ValueError:
                return f"signal {-code}"
        return f"exit code {code}"

    def stack(self, crash: bool = False) -> list[Frame]:
        """The lines that faulthandler has written, innermost last; with `crash` only those of a fatal error."""
        text = self.stacks.get(self.stacks.length()).decode(errors="replace")
        if crash:
            text = text.partition("Fatal Python error")[2]
        return [Frame(file, int(line), name) for file, line, name in reversed(_FRAME.findall(text))]

    def release_process(self) -> None:
        if self.process is not None:
            end_all([self])
            self.process.close()
            self.process = None
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def disown(self) -> None:
        """In a fork of the parent: close this end of the pipe, and do not end the process when this one exits."""
        if self.process is not None:
            _children.discard(self.process)
        if self.pipe is not None:
            self.pipe.close()

    def release(self) -> None:
        self.release_process()
        for memory in (self.outbox, self.output, self.stacks):
            memory.close()


def end_all(members) -> None:
    """Kill these processes, all at once, and wait until they are gone."""
    processes = [member.process for member in members if member.process is not None]
    for process in processes:
        process.kill()
    for process in processes:
        process.join(5)


def snapshot(members) -> dict[int, list[Frame]]:
    """Where these ranks are at this moment, innermost line last; an empty list for one that does not say.

    faulthandler answers from a signal handler in C, so also when a rank is stuck in C++ with the GIL held.
    """
    asked = [member for member in members if member.is_up()]
    for member in asked:
        member.stacks.truncate()
        member.signal(signal.SIGUSR2)
    end = time.monotonic() + 0.15
    lengths = None
    while time.monotonic() < end:
        seen = [member.stacks.length() for member in asked]
        if seen == lengths and all(seen):
            break
        lengths = seen
        time.sleep(0.003)
    found = {member.rank: member.stack() if member in asked else [] for member in members}
    for member in asked:
        member.stacks.truncate()
    return found


def in_gloo(frames) -> bool:
    """Whether a stack ends inside `torch.distributed`."""
    return bool(frames) and _DISTRIBUTED in frames[-1].file


def gloo_call(frames) -> str:
    """The function of `torch.distributed` that the stack went in by."""
    inside = [frame.function for frame in frames if _DISTRIBUTED in frame.file]
    return next((name for name in inside if name != "wrapper"), inside[0])


_DISTRIBUTED = os.path.join("torch", "distributed") + os.sep

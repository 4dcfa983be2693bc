"""The parent's handle on one rank: its process, its files, the signals it understands."""

import os
import re
import signal
import time
from multiprocessing import Pipe

from tplab.ranks import launch
from tplab.ranks.capture import Reader
from tplab.ranks.errors import Frame, learner_frames
from tplab.ranks.memory import SharedFile
from tplab.ranks.worker import Spec

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Member:
    """One rank as seen from the parent."""

    def __init__(self, pool, rank: int):
        self.pool = pool
        self.rank = rank
        self.process = None
        self.pipe = None
        self.outbox, self.output, self.stacks = (
            SharedFile(f"{label}-{rank}", pool._folder) for label in ("outbox", "output", "stacks")
        )
        self.reader = Reader(self.output)

    def start(self) -> None:
        """Start the process, in place of a dead one."""
        self.release_process()
        for memory in (self.outbox, self.output, self.stacks):
            memory.truncate()
        self.pipe, theirs = Pipe()
        pool = self.pool
        self.process = launch.start(
            Spec(
                rank=self.rank, size=pool.size, strict=pool.strict, folder=pool._folder, parent_pid=os.getpid(),
                memory=pool._memory, inbox=pool._inbox, outbox=self.outbox, output=self.output, stacks=self.stacks,
                wake=theirs,
            )  # fmt: skip
        )
        theirs.close()

    def wake(self) -> None:
        try:
            os.write(self.pipe.fileno(), b"w")
        except BrokenPipeError:
            pass  # it has just died, which the sentinel tells better

    def calm(self) -> bool:
        """Take in the wake-up bytes that the rank has sent; False at the end of the pipe."""
        return bool(os.read(self.pipe.fileno(), 4096))

    def dead(self) -> bool:
        return self.process is None or not self.process.is_alive()

    def signal(self, number: int) -> None:
        if not self.dead():
            os.kill(self.process.pid, number)

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.join(5)

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

    def where(self) -> list[Frame]:
        """The learner's lines that the rank is in at this moment, innermost last; empty if it does not say.

        faulthandler answers from a signal handler in C, so also when the rank is stuck in C++ with the GIL held.
        """
        self.stacks.truncate()
        self.signal(signal.SIGUSR2)
        end = time.monotonic() + 0.1
        length = -1
        while time.monotonic() < end and (length <= 0 or length != self.stacks.length()):
            length = self.stacks.length()
            time.sleep(0.002)
        return self.last_stack()

    def all_frames(self) -> list[Frame]:
        text = self.stacks.get(self.stacks.length()).decode(errors="replace")
        return [Frame(file, int(line), name) for file, line, name in reversed(_FRAME.findall(text))]

    def last_stack(self) -> list[Frame]:
        """What faulthandler wrote last, by request or because the process crashed."""
        frames = self.all_frames()
        return learner_frames(frames) if frames else []

    def release_process(self) -> None:
        if self.process is not None:
            self.end()
            self.process.close()
            self.process = None
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def release(self) -> None:
        self.release_process()
        for memory in (self.outbox, self.output, self.stacks):
            memory.close()

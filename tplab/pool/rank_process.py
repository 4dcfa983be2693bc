"""The parent's side of one rank: its process, its files and its signals."""

import os
import re
import signal
import time
from multiprocessing import Pipe

from tplab.pool import launcher
from tplab.pool.capture import Reader
from tplab.pool.control_block import STARTED
from tplab.pool.shared_file import SharedFile
from tplab.pool.waiting import available_cores
from tplab.pool.worker import Spec
from tplab.ranks.errors import Frame

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


def threads_per_rank(size: int) -> int:
    """The number of compute threads of each of ``size`` ranks: all cores but one, divided by ``size``.

    One core is left for this process and others. The threads of a product wait for each other, so one that gets no core
    delays all. (Two threads on two cores, one of them busy, against one thread: 0.5 to 0.6 of its speed in SmolLM2's
    decoding, 0.6 to 0.8 with 16 sequences, 0.8 to 0.9 in a prompt of 512.) ``OMP_NUM_THREADS`` sets the number for each
    rank, as under torchrun and in vLLM.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(asked) if asked.isdecimal() and int(asked) else max(1, (available_cores() - 1) // size)


class RankProcess:
    """One rank, for the parent."""

    def __init__(self, pool, rank: int):
        self.control, self.rank = pool._control, rank
        self.child = self.pipe = None
        self.files = [SharedFile(f"{label}-{rank}") for label in ("outbox", "output", "stacks")]
        self.outbox, self.output, self.stacks = self.files
        self.reader = Reader(self.output)

    def start(self, pool) -> None:
        """Start the process, in place of a dead one."""
        self.release_process()
        for file in self.files:
            file.truncate()
        self.pipe, theirs = Pipe()
        memory, inbox, outbox, output, stacks = (file.duplicate() for file in (pool._memory, pool._inbox, *self.files))
        self.child = launcher.start(Spec(
            rank=self.rank, size=pool.size, strict=pool.strict, threads=threads_per_rank(pool.size),
            folder=pool._folder, birth=pool._epoch, memory=memory, inbox=inbox, outbox=outbox, output=output,
            stacks=stacks, wake=theirs))

    def wake(self) -> None:
        try:
            os.write(self.pipe.fileno(), b"w")
        except (BrokenPipeError, ConnectionResetError):
            pass  # it has just died, which the sentinel reports

    def drain(self) -> bool:
        """Read the wake-up bytes that the rank has sent; False at the end of the pipe."""
        try:
            return bool(os.read(self.pipe.fileno(), 4096))
        except ConnectionResetError:  # it died with a wake-up of ours unread
            return False

    def dead(self) -> bool:
        return self.child is None or not self.child.is_alive()

    def is_up(self) -> bool:
        """Whether the process takes commands already; before that a signal would end it."""
        return self.control.word(self.rank, STARTED) > 0 and not self.dead()

    def signal(self, number: int) -> None:
        if self.is_up():
            os.kill(self.child.pid, number)

    def death(self) -> str:
        """How a dead process ended: ``SIGKILL`` or ``exit code 3``."""
        self.child.join(5)
        code = self.child.exitcode
        if code is None or code >= 0:
            return f"exit code {code}"
        return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"

    def stack(self, crash: bool = False) -> list[Frame]:
        """The stack that faulthandler has written, innermost line last; with `crash` only that of a fatal error."""
        text = self.stacks.get(self.stacks.length()).decode(errors="replace")
        if crash:
            text = text.partition("Fatal Python error")[2]
        return [Frame(file, int(line), name) for file, line, name in reversed(_FRAME.findall(text))]

    def release_process(self) -> None:
        if self.child is not None:
            end_all([self])
        if self.pipe is not None:
            self.pipe.close()
        self.child = self.pipe = None  # no `close` of the process: an interrupt in it would leave an unusable object

    def release(self) -> None:
        self.release_process()
        for file in self.files:
            file.close()


def end_all(processes) -> None:
    """Kill these processes, all at once, and wait until they are gone."""
    children = [process.child for process in processes if process.child is not None]
    for child in children:
        child.kill()
    for child in children:
        child.join(5)


def snapshot(processes) -> dict[int, list[Frame]]:
    """The stacks of these ranks at this moment, innermost line last; an empty list for one that does not answer.

    faulthandler writes from a signal handler in C, so also when a rank is stuck in C++ and holds the GIL.
    """
    asked = [process for process in processes if process.is_up()]
    for process in asked:
        process.stacks.truncate()
        process.signal(signal.SIGUSR2)
    end, lengths = time.monotonic() + 0.15, None
    while time.monotonic() < end:
        before, lengths = lengths, [process.stacks.length() for process in asked]
        if lengths == before and all(lengths):
            break
        time.sleep(0.003)
    stacks = {process.rank: process.stack() if process in asked else [] for process in processes}
    for process in asked:
        process.stacks.truncate()
    return stacks

"""After a pause, the compute threads of the ranks start on one core each.

Linux wakes a thread on its waker's core if the other cores seem busy. In a virtual machine idle cores seem busy while
the host has lent them to others; it takes tens of milliseconds to get them back. Until then, threads that wait for each
other share one core: a prompt of 64 tokens of SmolLM2 took 64 ms on one rank of two threads after a pause of 0.2 s, and
30 ms without a pause (bfloat16; one thread alone 42 ms).
"""

import os
import threading
from contextlib import suppress
from threading import Timer

from tplab.pool.capture import libc

COMPUTES = "compute"  # the names of a rank's compute threads begin with this
HELD = 0.1  # seconds until the kernel chooses again: beside a busy process its choice is the better one


def pin_threads(rank: int) -> None:
    """Pin each compute thread of ``rank`` to a core of its own for :data:`HELD` seconds.

    Threads that are pinned already are left alone. On systems without these calls (macOS) nothing happens.
    """
    if not hasattr(os, "sched_setaffinity") or not hasattr(libc, "gettid"):
        return
    threads = _threads()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1 or any(os.sched_getaffinity(thread) != set(cores) for thread in threads):
        return
    for number, thread in enumerate(threads, rank * len(threads)):
        os.sched_setaffinity(thread, [cores[number % len(cores)]])
    release = Timer(HELD, _release, (threads, cores))
    release.daemon = True
    release.start()


def _release(threads: list[int], cores: list[int]) -> None:
    """Unpin these threads, and then those that they have started meanwhile, which inherited their core."""
    for number in (*threads, *map(int, os.listdir("/proc/self/task"))):
        with suppress(ProcessLookupError):  # it has ended
            if len(os.sched_getaffinity(number)) == 1:
                os.sched_setaffinity(number, cores)


def _threads() -> list[int]:
    """The system's numbers of this thread and of the compute threads."""
    own = threading.get_ident()
    return [thread.native_id for thread in sorted(threading.enumerate(), key=lambda one: one.ident != own)
            if thread.ident == own or thread.name.startswith(COMPUTES)]

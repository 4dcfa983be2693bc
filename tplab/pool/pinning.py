"""After a rest, the threads that compute begin on a core each.

Who is woken is put beside its waker where the kernel takes the other cores for busy, as Linux does in a virtual machine
whose resting cores the host has lent to others. It takes tens of milliseconds until the host has given them back, and
so long threads that wait for each other take turns on one core: a prompt of 64 tokens of SmolLM2 took 64 ms on one rank
of two threads after a rest of 0.2 s, and 30 ms without one (bfloat16; one thread alone 42 ms).
"""

import os
import threading
from contextlib import suppress
from threading import Timer

from tplab.pool.capture import libc

COMPUTES = "compute"  # the names of threads that compute for a rank begin so
HELD = 0.1  # seconds until the kernel chooses again: beside a busy process it chooses better


def pin_threads(rank: int) -> None:
    """Hold each thread that computes for ``rank`` on a core of its own for :data:`HELD` seconds.

    Nothing happens to threads that were given their cores, or where the system has no such calls (macOS).
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
    """They first, then the threads that were born to them meanwhile, which begin where they are held."""
    for number in (*threads, *map(int, os.listdir("/proc/self/task"))):
        with suppress(ProcessLookupError):  # it has ended
            if len(os.sched_getaffinity(number)) == 1:
                os.sched_setaffinity(number, cores)


def _threads() -> list[int]:
    """The system's numbers of this thread and of those that compute with it."""
    own = threading.get_ident()
    return [thread.native_id for thread in sorted(threading.enumerate(), key=lambda one: one.ident != own)
            if thread.ident == own or thread.name.startswith(COMPUTES)]

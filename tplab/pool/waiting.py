"""How a rank waits for another one: it spins for a while, then sleeps until a word of shared memory changes.

The kernel needs up to 70 microseconds to wake a rank, so ranks on cores of their own spin for half a millisecond. Under
contention the spin budget is short, for a rank that spins may hold the core that the other one needs. SmolLM2 on two
ranks decoded in bfloat16 at 44 tokens/s beside a busy process with the long budget, and at 81 with the short one;
without that process the short one costs a fifth.

The sleep is Linux's futex, by system call. On other systems a rank sleeps for a fixed time between two reads.
"""

import ctypes
import os
import platform
import sys
import threading
import time
from typing import NamedTuple

_NAP = 50e-6
_WAIT, _WAKE, _ALL = 0, 1, 1 << 30
_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_syscall = ctypes.CDLL(None).syscall if _NUMBER else None


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class SpinBudget(NamedTuple):
    """How often a rank reads the other one's word before it sleeps.

    Attributes:
        compiled: in compiled code, with a pause instruction after each read: 20,000 take 0.3 to 1 ms, longer than one
            rank or thread waits for another one that has more heads.
        python: in Python.
    """

    compiled: int
    python: int


LONG_SPIN, SHORT_SPIN = SpinBudget(20_000, 3000), SpinBudget(30, 10)
_WINDOW = 1e8  # nanoseconds of running and waiting for a core over which contention is measured
_BEGINS, _STAYS = 0.2, 0.1  # shares of waiting; 0.01 to 0.08 on a quiet machine, 0.2 to 0.5 beside a busy process


class Contention:
    """Whether the calling thread has waited for a core for much of the time, as Linux counts it.

    On other systems there is never contention.
    """

    def __init__(self):
        try:
            self.file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self.file = None
        self.is_high, self.before = False, self._read()

    def _read(self) -> tuple[int, int]:
        """Nanoseconds on a core, and nanoseconds of waiting for one."""
        if self.file is None:
            return 0, 0
        ran, waited, _ = map(int, os.pread(self.file, 100, 0).split())
        return ran, waited

    def measure(self) -> bool:
        """Whether contention was high in the last window."""
        ran, waited = self._read()
        wanted, lost = ran + waited - sum(self.before), waited - self.before[1]
        if wanted >= _WINDOW:
            self.is_high, self.before = lost > (_STAYS if self.is_high else _BEGINS) * wanted, (ran, waited)
        return self.is_high


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep while the 64-bit word at ``address`` is ``value``, at most ``seconds`` (below one).

    It may return early, so read the word again. :func:`wake` in another process ends it, and so does a signal.
    """
    if _syscall is None:
        return time.sleep(_NAP)
    # The kernel compares the lower half of the word, which comes first on both of these processors. If the word has
    # changed in the meantime, the call returns at once.
    limit = _Time(0, int(seconds * 1e9))
    _syscall(ctypes.c_long(_NUMBER), ctypes.c_void_p(address), ctypes.c_int(_WAIT),
             ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.byref(limit), ctypes.c_void_p(), ctypes.c_int(0))


def wake(address: int) -> None:
    """End the sleep of all processes that wait for the word at ``address`` to change."""
    if _syscall is not None:
        _syscall(ctypes.c_long(_NUMBER), ctypes.c_void_p(address), ctypes.c_int(_WAKE), ctypes.c_int(_ALL),
                 ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(0))

"""How a rank waits for another one: it spins for a while, then sleeps until a word of shared memory changes.

To wake a sleeping rank takes the kernel up to 70 microseconds, so ranks on cores of their own spin for half a
millisecond. Where other processes want these cores too, spinning keeps a core from the rank that could go on, and the
spin budget is short. SmolLM2 on two ranks decoded in bfloat16 at 44 tokens/s beside a busy process with the long
budget, and at 81 with the short one; without that process the short one costs a fifth.

The sleep is Linux's futex, called as it is. Where there is none, a rank sleeps for a moment between two looks.
"""

import ctypes
import os
import platform
import sys
import threading
import time
from typing import NamedTuple

_NAP = 50e-6
_WAIT, _WAKE, _EVERYBODY = 0, 1, 1 << 30
_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_syscall = ctypes.CDLL(None).syscall if _NUMBER else None


class SpinBudget(NamedTuple):
    """How often a rank looks whether another one is there, before it sleeps.

    Attributes:
        compiled: in compiled code, with a pause of the processor's after each look: 2,000 take up to 0.1 ms.
        python: in Python.
    """

    compiled: int
    python: int


LONG_SPIN, SHORT_SPIN = SpinBudget(2000, 3000), SpinBudget(30, 10)
_WINDOW = 1e8  # nanoseconds in which a rank wanted a core: once in some hundred steps, the system takes it for 10 ms
_BEGINS, _STAYS = 0.2, 0.1  # of them without one: 0.01 to 0.08 where it is quiet, 0.2 to 0.5 beside a busy process


class Contention:
    """Whether the calling thread was ready to run and had no core for much of the time, as Linux counts it.

    Where Linux does not count it, there is never contention.
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
        """Whether it was high in the last whole tenth of a second in which a core was wanted."""
        ran, waited = self._read()
        wanted, lost = ran + waited - sum(self.before), waited - self.before[1]
        if wanted >= _WINDOW:
            self.is_high, self.before = lost > (_STAYS if self.is_high else _BEGINS) * wanted, (ran, waited)
        return self.is_high


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Sleep while the 64-bit word at ``address`` is ``value``, at most ``seconds`` (below one).

    May return early: look again. Another process ends it by :func:`wake`, a signal by its handler.
    """
    if _syscall is None:
        return time.sleep(_NAP)
    # The kernel compares the lower half, which stands first on both of these processors; it does so under its own lock,
    # so a word that has just changed ends the sleep before it begins.
    limit = _Time(0, int(seconds * 1e9))
    _syscall(ctypes.c_long(_NUMBER), ctypes.c_void_p(address), ctypes.c_int(_WAIT),
             ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.byref(limit), ctypes.c_void_p(), ctypes.c_int(0))


def wake(address: int) -> None:
    """End the sleep of all processes that wait for the word at ``address`` to change."""
    if _syscall is not None:
        _syscall(ctypes.c_long(_NUMBER), ctypes.c_void_p(address), ctypes.c_int(_WAKE), ctypes.c_int(_EVERYBODY),
                 ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(0))

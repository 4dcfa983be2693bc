"""How a rank waits for another one: it looks again and again, then sleeps until a word of shared memory changes.

Waking a rank takes the kernel up to 70 microseconds, so ranks that compute the same on cores of their own look for half
a millisecond. But where others want these cores too, the scheduler gives a core's time to who looks and not to the rank
that could go on; after a sleep it is the waiter's turn sooner. SmolLM2 on two ranks decoded in bfloat16 at 44 tokens/s
beside a busy process with many looks, and at 81 with few; without that process few looks cost a fifth.

To sleep is Linux's futex, called as it is. Where there is none, a rank naps between two looks.
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


class Looks(NamedTuple):
    """How often to look whether another rank is there, before a sleep.

    Attributes:
        first: without Python, with a pause of the processor's after each: 2,000 take up to 0.1 ms.
        then: with it.
    """

    first: int
    then: int


MANY, FEW = Looks(2000, 3000), Looks(30, 10)
_WINDOW = 1e8  # nanoseconds in which a rank wanted a core: once in some hundred steps, the system takes it for 10 ms
_BEGINS, _STAYS = 0.2, 0.1  # of them without one: 0.01 to 0.08 where it is quiet, 0.2 to 0.5 beside a busy process


class Lack:
    """Whether the calling thread was ready to run and had no core for much of the time, as Linux counts it.

    Where it does not, or not for us, there is never a lack.
    """

    def __init__(self):
        try:
            self.file = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self.file = None
        self.felt, self.before = False, self._read()

    def _read(self) -> tuple[int, int]:
        """Nanoseconds on a core, and nanoseconds of waiting for one."""
        if self.file is None:
            return 0, 0
        ran, waited, _ = map(int, os.pread(self.file, 100, 0).split())
        return ran, waited

    def is_felt(self) -> bool:
        """Whether there was one in the last whole tenth of a second in which a core was wanted."""
        ran, lacked = self._read()
        wanted, lack = ran + lacked - sum(self.before), lacked - self.before[1]
        if wanted >= _WINDOW:
            self.felt, self.before = lack > (_STAYS if self.felt else _BEGINS) * wanted, (ran, lacked)
        return self.felt


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

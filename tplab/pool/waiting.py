"""Sleeping in the kernel until a word of shared memory changes: Linux's futex, called as it is.

A rank that looks again and again costs a core, and the scheduler gives that core's time to it and not to the process
that could go on; after a sleep it is the waiter's turn sooner. Where there is no futex, a rank naps between two looks.
"""

import ctypes
import platform
import sys
import time

_NAP = 50e-6
_WAIT, _WAKE, _EVERYBODY = 0, 1, 1 << 30
_NUMBER = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_syscall = ctypes.CDLL(None).syscall if _NUMBER else None


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

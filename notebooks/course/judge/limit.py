"""An end for code that runs beside the ranks: the loop around an engine, a scheduler's function."""

import signal
import threading
from collections.abc import Callable

from course.judge.words import NotYet

LIMIT = 120.0  # seconds of this process's own computing: a busy machine and waiting for ranks do not count


def limited(function: Callable, *args):
    """``function(*args)``; `NotYet` when it computes longer than `LIMIT`. Only the main thread can be interrupted so:
    on ranks, also logical ones, each run has a limit of its own."""
    if threading.current_thread() is not threading.main_thread() or signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
        return function(*args)
    is_late = []

    def end(number, frame):
        is_late.append(frame)
        raise KeyboardInterrupt  # as a person would: pools are ready for it, and no `except Exception` takes it

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT, 1.0)  # again each second: a bare except may take one
    try:
        try:
            return function(*args)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)
    except KeyboardInterrupt:
        if not is_late:
            raise
        raise NotYet(f"not finished after {LIMIT:.0f} s of computing, in the engine\nWhat ends it?") from None

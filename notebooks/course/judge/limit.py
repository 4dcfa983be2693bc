"""An end for an answer: how long one call of a learner's code may take."""

import linecache
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

from course.judge.attempt import LIMIT
from course.judge.words import NotYet, is_learners
from tplab.pool import RankPool
from tplab.ranks.logical import raise_in

_LOOK = 0.05  # seconds; looks are counted, so that a machine that slows the code slows its clock as well
_works = {RankPool.run.__code__}  # calls that have a limit of their own, or end by themselves
_looks: dict[int, tuple[FrameType | None, int]] = {}  # by thread: the call that it is in, and how often it was seen


def limited(function: Callable, *args):
    """``function(*args)``; `NotYet` when one call of a learner's code in it, which is one frame, takes longer than
    `LIMIT`. :func:`course.judge.attempt.on_ranks` has its own."""
    watch, before = _Watch(sys._getframe()), signal.getsignal(signal.SIGINT)
    is_ignored = before == signal.SIG_IGN and threading.current_thread() is threading.main_thread()
    if is_ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    watch.start()
    try:
        try:
            return function(*args)
        finally:
            with watch.lock:  # behind this line nothing is sent any more
                watch.over.set()
            if is_ignored:
                signal.signal(signal.SIGINT, before)
    except BaseException:
        if watch.found is None:
            raise
        raise NotYet(watch.found) from None


def works(function: Callable) -> Callable:
    """Decorates a function of the lab's that calls what a notebook gives, and may take longer."""
    _works.add(function.__code__)
    return function


def progress() -> None:
    """Called by the lab's work that a learner's function waits for: its time begins again."""
    _looks.pop(threading.get_ident(), None)


class _Watch(threading.Thread):
    """Looks at what the thread that made it is doing above the frame ``base``."""

    def __init__(self, base: FrameType):
        super().__init__(daemon=True, name="limit")
        self.base, self.caller = base, threading.get_ident()
        self.over, self.lock, self.found = threading.Event(), threading.Lock(), None

    def run(self) -> None:
        # Most work is over by then. CPython 3.11 was seen to crash, once, on the frames of a thread that runs.
        wait = LIMIT / 4
        while not self.over.wait(wait):
            wait = _LOOK
            with self.lock:
                lines = self._learners(sys._current_frames()[self.caller])
                call, count = _looks.get(self.caller, (None, 0))
                count = count + 1 if lines and lines[0] is call else 0
                _looks[self.caller] = (lines[0] if lines else None), count
                if count * _LOOK >= LIMIT and self.found is None:
                    line = linecache.getline(lines[-1].f_code.co_filename, lines[-1].f_lineno).strip()
                    self.found = (f"not finished after {LIMIT} s: it is still at your line {lines[-1].f_lineno}"
                                  f"{f': {line}' * bool(line)}\nWhat ends it?")
                if self.found is not None and not self.over.is_set():
                    self._interrupt()  # again at the next look: a bare except of the learner's may take this one
        _looks.pop(self.caller, None)

    def _learners(self, frame: FrameType | None) -> list[FrameType]:
        """The learner's frames, the outermost first; none where ranks are at work."""
        found = []
        while frame is not None and frame is not self.base:
            if frame.f_code in _works:
                return []
            found += [frame] * is_learners(frame.f_code.co_filename)
            frame = frame.f_back
        return found[::-1]

    def _interrupt(self) -> None:
        if self.caller == threading.main_thread().ident:  # a signal ends a sleep too
            signal.pthread_kill(self.caller, signal.SIGINT)
        else:
            raise_in(self.caller, KeyboardInterrupt)

"""Logical ranks: the same SPMD function on threads of one process, for tests of more settings than processes allow."""

import ctypes
import sys
import threading
import time

import torch

from tplab.checks import quoted, whole_number
from tplab.ranks import context
from tplab.ranks.errors import (
    Abandoned,
    Cause,
    CollectiveMismatch,
    Frame,
    RankError,
    describe,
    learner_frames,
    learner_stack,
    seconds,
    waiting,
)
from tplab.ranks.group import Group


def logical_ranks(n: int, fn, *args, timeout: float = 60.0, **kwargs) -> list:
    """Call ``fn(*args, **kwargs)`` on `n` threads that are ranks to each other; the results in rank order.

    Each thread has its own `rank`, `state` and op log, and sums are taken in rank order. If a rank raises, or returns
    while others wait for it, or after `timeout` seconds, the whole call ends with one `RankError`. A thread that still
    runs then, or after an interrupt, ends at its next line, or when its sleep is over.
    """
    limit = seconds(timeout)
    size = whole_number(n, 1)
    if size is None:
        raise RankError(f"logical_ranks needs a whole number of ranks from 1 up, not {quoted(n)}")
    if context.inside_rank():
        raise RankError(f"logical_ranks was called inside rank {context.rank()}; a rank starts no ranks of its own")
    rendezvous = _Rendezvous(size)
    rendezvous.groups = groups = [_LogicalGroup(r, rendezvous) for r in range(size)]
    results = [None] * size
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run(group):
        context.set_thread_group(group)
        group.thread = threading.get_ident()
        try:
            if rendezvous.abandoned:  # on a busy machine a thread can begin after the call has ended
                raise Abandoned
            rendezvous.turn.begin()
            # torch has these modes per thread; the ranks get the caller's.
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                results[group.rank] = fn(*args, **kwargs)
            group.end()
        except BaseException as error:
            rendezvous.end(group.rank, error)
        else:
            rendezvous.end(group.rank)

    threads = [threading.Thread(target=run, args=(g,), name=f"logical rank {g.rank}", daemon=True) for g in groups]
    try:
        for thread in threads:
            thread.start()
        rendezvous.wait(limit)
        unfinished = {r: threads[r].ident for r in rendezvous.running()}
        if unfinished or rendezvous.stuck or rendezvous.errors:
            raise rendezvous.error(unfinished, timeout)
    finally:
        rendezvous.abandon()
        if rendezvous.running():
            threading.Thread(target=_end, args=(rendezvous, threads), daemon=True, name="ends logical ranks").start()
    return results


def _end(rendezvous: "_Rendezvous", threads: list[threading.Thread]) -> None:
    """Raise `Abandoned` in the ranks that run until all have ended: one may catch it, or be in a long sleep.

    On a thread of its own, so that the caller need not wait.
    """
    pause = 0.001
    while running := [threads[r] for r in rendezvous.running() if threads[r].ident is not None]:
        for thread in running:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))
        time.sleep(pause := min(1.1 * pause, 1.0))


_PATIENCE = 0.005  # seconds that a rank waits for its turn


class _Turn:
    """Lets one rank compute at a time, until it waits for another.

    Two threads with many short operations pass the interpreter's lock to and fro, which takes longer than one after
    the other. No rank waits long for its turn: so one that computes long, sleeps or never ends keeps no other from it.
    """

    def __init__(self):
        self.lock, self.mine = threading.Lock(), threading.local()

    def begin(self) -> None:
        self.mine.held = self.lock.acquire(timeout=_PATIENCE)

    def end(self) -> None:
        if getattr(self.mine, "held", False):
            self.mine.held = False
            self.lock.release()


class _Rendezvous:
    """Where the threads exchange data: the pieces of the current step, and which ranks have ended."""

    def __init__(self, size: int):
        self.size = size
        self.change, self.turn, self.all_ended = threading.Condition(), _Turn(), threading.Event()
        self.steps = [0] * size
        self.pieces = [[None] * size, [None] * size]  # by parity of the step, as in shared memory
        self.ended = set()
        self.errors = {}  # by rank, in the order in which they were raised
        self.stuck = self.over = self.abandoned = False  # stuck: a rank waits for one that has returned
        self.groups = []

    def exchange(self, rank: int, piece) -> list:
        with self.change:
            step = self.steps[rank] + 1
            self.pieces[step & 1][rank] = piece
            self.steps[rank] = step
            self._look()
            waits = not self.over and min(self.steps) < step
            if waits:
                # One of those whose step is complete learns it only now, when it can have the turn: woken before,
                # and all together, they would wait for each other. The one that has waited longest is such a one.
                self.turn.end()
                self.change.notify()
            while not self.over and min(self.steps) < step:
                self.change.wait(_PATIENCE)
            if self.over and min(self.steps) < step:
                raise Abandoned
            pieces = self.pieces[step & 1]
        if waits:
            self.turn.begin()
        return pieces

    def end(self, rank: int, error: BaseException | None = None) -> None:
        """The rank's function has returned or raised."""
        self.turn.end()
        with self.change:
            self.ended.add(rank)
            if error is not None:
                self.errors[rank], self.over = error, True
                self.change.notify_all()
            self._look()
            self.change.notify()
            if len(self.ended) == self.size:
                self.all_ended.set()

    def running(self) -> list[int]:
        """The ranks whose function has not ended."""
        return [r for r in range(self.size) if r not in self.ended]

    def wait(self, limit: float) -> None:
        """Until all functions have ended, or so many seconds."""
        self.all_ended.wait(min(limit, threading.TIMEOUT_MAX))

    def abandon(self) -> None:
        with self.change:
            self.over = self.abandoned = True
            self.change.notify_all()

    def _look(self) -> None:
        """A rank waits for ever if another one has returned after fewer steps."""
        if self.ended and not self.over and max(self.steps) > min(self.steps[r] for r in self.ended):
            self.stuck = self.over = True
            self.change.notify_all()

    def error(self, unfinished: dict[int, int], timeout: float) -> RankError:
        """``unfinished``: ``{rank: its thread}`` of those that were running when the time was up."""
        logs = [group.log.records() for group in self.groups]
        mismatch = next((e for e in self.errors.values() if isinstance(e, CollectiveMismatch)), None)
        if mismatch is not None:
            return CollectiveMismatch(mismatch.summary, mismatch.causes.values(), logs)
        raised = {r: error for r, error in self.errors.items() if not isinstance(error, Abandoned)}
        causes = [Cause(r, "raised", f"raised {describe(e)}", learner_stack(e), e) for r, e in raised.items()]
        stopped = [r for r in range(self.size) if isinstance(self.errors.get(r), Abandoned)]
        causes += [waiting(r, logs[r][-1], consequence=not self.stuck) for r in stopped]
        waits = [r for r in unfinished if logs[r] and not logs[r][-1].left]
        causes += [_running(r, thread) for r, thread in unfinished.items() if r not in waits]
        causes += [waiting(r, logs[r][-1]) for r in waits]
        causes += [Cause(r, "returned", "returned") for r in range(self.size) if r not in {*self.errors, *unfinished}]
        if raised:
            error = RankError(f"rank {causes[0].rank} {causes[0].text}", causes, logs)
            error.__cause__ = causes[0].exception
            return error
        summary = "; ".join(f"rank {c.rank} {c.text}" for c in sorted(causes, key=lambda c: c.kind != "returned"))
        return RankError(f"not finished after {timeout:g} s: " * bool(unfinished) + summary, causes, logs)


def _running(rank: int, thread: int) -> Cause:
    stack, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        stack.insert(0, Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    lines = learner_frames(stack)
    return Cause(rank, "running", f"is still running at {lines[-1]}" if lines else "is still running", lines)


class _LogicalGroup(Group):
    """One thread of a `_Rendezvous`."""

    def __init__(self, rank: int, rendezvous: _Rendezvous):
        super().__init__(rank, rendezvous.size)
        self.rendezvous = rendezvous
        self.checked = 0

    def swap(self, piece, counts=None):
        pieces = self.rendezvous.exchange(self.rank, piece.clone())
        if self.checked != self.log.seq:
            self.checked = self.log.seq
            if len({group.log.signature(self.log.seq) for group in self.rendezvous.groups}) > 1:
                raise CollectiveMismatch.of(group.log.record(self.log.seq) for group in self.rendezvous.groups)
        return list(pieces)

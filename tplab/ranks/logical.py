"""Logical ranks: the same SPMD function on threads of one process, for sweeps too wide for processes."""

import threading
import traceback

import torch

from tplab.checks import shown, whole_number
from tplab.ranks import context
from tplab.ranks.errors import Abandoned, Cause, CollectiveMismatch, Frame, RankError, describe, learner_frames, place
from tplab.ranks.group import Group


def logical_ranks(n: int, fn, *args, **kwargs) -> list:
    """Call ``fn(*args, **kwargs)`` on `n` threads that are ranks to each other; the results in rank order.

    The collectives, `rank`, `world_size` and `state` are each thread's own, sums are taken in rank order, and a rank
    that raises, or returns while others wait for it, ends the whole call with one `RankError`.
    """
    size = whole_number(n, 1)
    if size is None:
        raise RankError(f"logical_ranks needs a whole number of ranks from 1 up, not {shown(n)}")
    if context.inside_rank():
        raise RankError(f"logical_ranks was called inside rank {context.rank()}; a rank starts no ranks of its own")
    meeting = _Meeting(size)
    groups = [_LogicalGroup(r, meeting) for r in range(size)]
    meeting.groups = groups
    results = [None] * size
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def work(group):
        context.set_thread_group(group)
        group.thread = threading.get_ident()
        try:
            # These modes belong to a thread; the caller's hold for its ranks too.
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                results[group.rank] = fn(*args, **kwargs)
        except BaseException as error:
            meeting.failed(group.rank, error)
        else:
            meeting.returned(group.rank)

    threads = [threading.Thread(target=work, args=(g,), name=f"logical rank {g.rank}", daemon=True) for g in groups]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        meeting.abandon()
        raise
    if meeting.stuck or meeting.errors:
        raise meeting.error()
    return results


class _Meeting:
    """Where the threads meet: everybody's piece of the current step, and the news of who has gone."""

    def __init__(self, size: int):
        self.size = size
        self.change = threading.Condition()
        self.steps = [0] * size
        self.pieces = [[None] * size, [None] * size]  # by parity of the step, as in shared memory
        self.gone = set()
        self.errors = {}
        self.order = []
        self.stuck = None
        self.over = False
        self.groups = []

    def meet(self, rank: int, piece) -> list:
        with self.change:
            step = self.steps[rank] + 1
            self.pieces[step & 1][rank] = piece
            self.steps[rank] = step
            self._check()
            self.change.notify_all()
            self.change.wait_for(lambda: self.over or min(self.steps) >= step)
            if self.over and min(self.steps) < step:
                raise Abandoned
            return self.pieces[step & 1]

    def returned(self, rank: int) -> None:
        with self.change:
            self.gone.add(rank)
            self._check()
            self.change.notify_all()

    def failed(self, rank: int, error: BaseException) -> None:
        with self.change:
            self.errors[rank] = error
            self.order.append(rank)
            self.gone.add(rank)
            self.over = True
            self.change.notify_all()

    def abandon(self) -> None:
        with self.change:
            self.over = True
            self.change.notify_all()

    def _check(self) -> None:
        """A rank waits for ever if another one has returned after fewer steps."""
        if self.gone and not self.over and max(self.steps) > min(self.steps[r] for r in self.gone):
            self.stuck = sorted(self.gone)
            self.over = True

    def error(self) -> RankError:
        logs = [group.log.records() for group in self.groups]
        mismatch = next((e for e in self.errors.values() if isinstance(e, CollectiveMismatch)), None)
        if mismatch is not None:
            return CollectiveMismatch(mismatch.summary, mismatch.causes.values(), logs)
        raised = [r for r in self.order if not isinstance(self.errors[r], Abandoned)]
        causes = [self._raised(r) for r in raised]
        stopped = [r for r in range(self.size) if isinstance(self.errors.get(r), Abandoned)]
        causes += [self._stopped(r, logs[r], not self.stuck) for r in stopped]
        causes += [Cause(r, "returned", "returned") for r in range(self.size) if r not in self.errors]
        if raised:
            error = RankError(f"rank {raised[0]} {causes[0].text}", causes, logs)
            error.__cause__ = self.errors[raised[0]]
            return error
        gone = [f"rank {r} returned" for r in self.stuck]
        held = [f"rank {c.rank} {c.text}" for c in causes if c.kind == "waiting"]
        return RankError("; ".join(gone + held), causes, logs)

    def _raised(self, r):
        error = self.errors[r]
        stack = traceback.extract_tb(error.__traceback__)
        frames = learner_frames([Frame(f.filename, f.lineno or 0, f.name) for f in stack])
        return Cause(r, "raised", f"raised {describe(error)}", frames, error)

    def _stopped(self, r, log, consequence):
        record = log[-1]
        text = f"waits in {record.op} at {place(record.file, record.line)}"
        frame = Frame(record.file, record.line, "")
        return Cause(r, "waiting", text, [frame], consequence=consequence)


class _LogicalGroup(Group):
    """One thread of a `_Meeting`."""

    def __init__(self, rank: int, meeting: _Meeting):
        super().__init__(rank, meeting.size)
        self.meeting = meeting
        self.checked = 0

    def swap(self, piece, counts=None):
        pieces = self.meeting.meet(self.rank, piece.clone())
        if self.checked != self.log.seq:
            self.checked = self.log.seq
            if len({group.log.signature(self.log.seq) for group in self.meeting.groups}) > 1:
                records = [group.log.record(self.log.seq) for group in self.meeting.groups]
                raise CollectiveMismatch.of(records)
        return list(pieces)

"""Watching one command: who has answered, who has died, who can never answer, and what to tell the learner."""

import os
import select
import signal
import time

from tplab.ranks import board as words
from tplab.ranks import transfer
from tplab.ranks.board import DROP, Command
from tplab.ranks.errors import Cause, CollectiveMismatch, Frame, RankError, learner_frames, place

_TICK = 0.05
_PATIENCE = 0.25  # after a first failure, for ranks that fail or finish by themselves
_STOP = 0.4  # for a rank to leave what it is doing before it is ended
_GLOO_SAMPLE, _GLOO_STUCK = 0.5, 2.5

RUNNING, RETURNED, FAILED, DEAD = "running", "returned", "failed", "dead"


class Watch:
    """One command in progress on all ranks of a pool."""

    def __init__(self, pool, before, timeout: float, fn):
        self.pool = pool
        self.board = pool._board
        self.members = pool._members
        self.number = pool._number
        self.before = before  # op log positions at the start
        self.timeout = timeout
        self.fn = fn
        self.status = [RUNNING] * pool.size
        self.reports = [None] * pool.size
        self.ended = set()  # ranks that had to be killed
        self.gloo = {}  # rank -> (where, since)
        self.poll = select.poll()
        for member in self.members:
            self.poll.register(member.pipe.fileno(), select.POLLIN)
            self.poll.register(member.process.sentinel, select.POLLIN)

    def results(self) -> list[bytes]:
        """The answers of all ranks, still pickled; raises `RankError` when that cannot be had."""
        begin = time.monotonic()
        deadline, patience, sample = begin + self.timeout, None, begin + _GLOO_SAMPLE
        while True:
            self._look()
            if RUNNING not in self.status:
                break
            now = time.monotonic()
            if FAILED in self.status or DEAD in self.status:
                patience = patience or now + _PATIENCE
                if now >= patience or all(self._waiting(r) for r in self._running()):
                    break
            elif RETURNED in self.status:
                if self._never_met():
                    raise self._skipped()
                if now >= sample:
                    sample = now + _GLOO_SAMPLE
                    if self._stuck_in_gloo(now):
                        raise self._skipped()
            if now >= deadline:
                raise self._too_late()
            self._pause(min(_TICK, deadline - now))
        if set(self.status) == {RETURNED}:
            return [m.outbox.get(self.board.word(m.rank, words.ANSWER_LENGTH)) for m in self.members]
        raise self._failure()

    def stop(self) -> None:
        """Bring every rank to rest: by the board, by a signal, by closing gloo's connections, at last by SIGKILL."""
        board, pool = self.board, self.pool
        board.words[words.ABANDONED] = pool._epoch
        begin = time.monotonic()
        signalled = dropped = False
        while True:
            self._look()
            now = time.monotonic() - begin
            if RUNNING not in self.status:
                return
            if now >= _STOP:
                break
            if not signalled:
                signalled = True
                for r in self._running():
                    self.members[r].signal(signal.SIGUSR1)
            if not dropped and now >= 0.05:
                dropped = True
                pool._number += 1
                board.post(Command(pool._number, DROP, pool._epoch, 0))
                for member in self.members:
                    member.wake()
            self._pause(0.01)
        for r in self._running():
            self.members[r].end()
            self.ended.add(r)
            self.status[r] = DEAD

    # Looking.

    def _look(self):
        for r, member in enumerate(self.members):
            if self.status[r] == RUNNING:
                gone = member.process.exitcode is not None
                if self.board.word(r, words.ANSWERED) == self.number:
                    words.fence()
                    self._answered(r, member)
                elif gone:
                    self.status[r] = DEAD

    def _answered(self, r, member):
        if self.board.word(r, words.OUTCOME) == words.OK:
            self.status[r] = RETURNED
            return
        self.status[r] = FAILED
        self.reports[r] = transfer.loads(member.outbox.get(self.board.word(r, words.ANSWER_LENGTH)))

    def _pause(self, seconds):
        for fd, event in self.poll.poll(max(0, seconds) * 1000):
            member = next((m for m in self.members if m.pipe.fileno() == fd), None)
            if member is None or event & ~select.POLLIN or not member.calm():
                self.poll.unregister(fd)  # an ended process stays readable for ever
        for member in self.members:
            member.reader.relieve()

    def _running(self):
        return [r for r, status in enumerate(self.status) if status == RUNNING]

    def _waiting(self, r):
        """The collective that rank `r` is in, if any."""
        log = self.board.logs[r]
        seq = log.last_seq()
        record = log.record(seq) if seq > self.before[r] else None
        return record if record is not None and not record.left else None

    def _never_met(self):
        """Whether a rank waits in a collective that another one has returned without."""
        returned = [self.board.logs[r].last_seq() for r, s in enumerate(self.status) if s == RETURNED]
        return any((record := self._waiting(r)) and record.seq > min(returned) for r in self._running())

    def _stuck_in_gloo(self, now):
        """The same for code that calls `torch.distributed` itself: the stack of the rank has to tell."""
        for r in self._running():
            self.members[r].where()
            frames = self.members[r].all_frames()
            inside = bool(frames) and f"torch{os.sep}distributed" in frames[-1].file
            if not inside:
                self.gloo.pop(r, None)
                continue
            since = self.gloo.setdefault(r, now)
            if now - since >= _GLOO_STUCK:
                return True
        return False

    # Telling.

    def _where(self, r):
        """Text and lines for a rank that is still running."""
        record = self._waiting(r)
        if record is not None:
            frame = Frame(record.file, record.line, record.op)
            return Cause(r, "waiting", f"waits in {record.op} at {place(record.file, record.line)}", [frame])
        self.members[r].where()
        frames = self.members[r].all_frames()
        lines = learner_frames(frames)
        if not lines:
            return Cause(r, "running", "is still running, in code that does not say where")
        at = place(lines[-1].file, lines[-1].line)
        if f"torch{os.sep}distributed" in frames[-1].file:
            name = next(f.function for f in frames if f"torch{os.sep}distributed" in f.file and f.function != "wrapper")
            return Cause(r, "waiting", f"waits in torch.distributed.{name} at {at}", lines)
        return Cause(r, "running", f"is still running at {at}", lines)

    def _skipped(self):
        causes = [self._where(r) for r in self._running()]
        causes += [Cause(r, "returned", "returned") for r, s in enumerate(self.status) if s == RETURNED]
        gone = [f"rank {c.rank} returned" for c in causes if c.kind == "returned"]
        held = [f"rank {c.rank} {c.text}" for c in causes if c.kind != "returned"]
        return self._error("; ".join(gone + held), causes)

    def _too_late(self):
        causes = [self._where(r) for r in self._running()]
        causes += [Cause(r, "returned", "returned") for r, s in enumerate(self.status) if s == RETURNED]
        causes.sort(key=lambda c: (c.kind != "running", c.rank))
        held = [f"rank {c.rank} {c.text}" for c in sorted(causes, key=lambda c: c.rank)]
        return self._error(f"no end after {self.timeout:g} s: " + "; ".join(held), causes)

    def _failure(self):
        running = {r: self._where(r) for r in self._running()}
        causes = [running.get(r) or self._cause(r) for r in range(self.pool.size)]
        for r, cause in running.items():
            cause.consequence = True
        own = [c for c in causes if c.kind in ("raised", "died", "mismatch") and not c.consequence]
        first = min(own or causes, key=lambda c: (c.consequence, c.at))
        mismatch = next((c.exception for c in causes if isinstance(c.exception, CollectiveMismatch)), None)
        if first.kind == "mismatch" and mismatch is not None:
            return self._error(mismatch.summary, mismatch.causes.values(), CollectiveMismatch)
        causes.sort(key=lambda c: (c is not first, c.rank))
        return self._error(f"rank {first.rank} {first.text}", causes)

    def _cause(self, r):
        status, report, member = self.status[r], self.reports[r], self.members[r]
        if status == RETURNED:
            return Cause(r, "returned", "returned")
        if status == DEAD:
            return self._death(r, member)
        at = self.board.word(r, words.ANSWERED_AT)
        if report.kind == "stopped":
            record = self._waiting(r)
            line = report.frames[-1] if report.frames else None
            text = f"stopped in {record.op}" if record else "stopped"
            text += f" at {place(line.file, line.line)}" if line else ""
            return Cause(r, "stopped", text, report.frames, at=at, consequence=True)
        lost = any(words in report.text for words in _LOST)
        return Cause(
            r, report.kind, f"raised {report.text}", report.frames, _exception(report.exception), at, consequence=lost
        )

    def _death(self, r, member):
        frames = member.last_stack()
        text = f"died ({member.death()})"
        record = self.board.logs[r].record(self.board.logs[r].last_seq())
        if frames:
            text += f" at {place(frames[-1].file, frames[-1].line)}"
        elif record is not None and record.seq > self.before[r]:
            text += f" {'after' if record.left else 'in'} {record.op} at {place(record.file, record.line)}"
            frames = [Frame(record.file, record.line, record.op)]
        elif hasattr(self.fn, "__code__"):
            code = self.fn.__code__
            text += f" in {code.co_name}"
            frames = [Frame(code.co_filename, code.co_firstlineno, code.co_name)]
        return Cause(r, "died", text, frames, at=time.monotonic_ns())

    def _error(self, summary, causes, kind=RankError):
        logs = [log.records(before) for log, before in zip(self.board.logs, self.before)]
        causes = list(causes)
        dead = [c.rank for c in causes if c.kind == "died"]
        self.stop()
        notes = []
        if self.ended:
            notes.append(f"{_ranks(self.ended)} did not stop and had to be ended.")
        if gone := sorted(self.ended | set(dead)):
            notes.append(f"The next run starts {_ranks(gone)} afresh, with an empty state; other ranks keep theirs.")
        return kind(summary, causes, logs, notes)


_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def _ranks(numbers) -> str:
    numbers = sorted(numbers)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


def _exception(pickled):
    if pickled is None:
        return None
    try:
        return transfer.loads(pickled)
    except Exception:
        return None  # its class is known on the rank only; its text has been told

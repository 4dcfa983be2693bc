"""Watching one command: which ranks have answered, have died or can never answer; and stopping all ranks."""

import select
import signal
import time

from tplab.pool import failures, transfer
from tplab.pool.control_block import ABANDONED, ANSWER_LENGTH, ANSWERED, DROP, OK, OUTCOME, STARTED, fence
from tplab.pool.rank_process import end_all
from tplab.ranks.oplog import OpRecord

_TICK = 0.05
_GRACE = 1.0  # seconds after a first failure in which other ranks may fail or finish by themselves
_STOP = 1.0  # seconds for a rank to stop by itself before it is ended
_DROP_GLOO = 0.05  # seconds after which gloo's connections are closed, for ranks that hang in it

# A rank is idle if an interrupt came before it had begun.
RUNNING, RETURNED, FAILED, DEAD, IDLE = "running", "returned", "failed", "dead", "idle"


class Watch:
    """One command in progress on all ranks of a pool.

    `before`: positions of the op logs at its start.
    `number`: the command's, which may still be about to be posted.
    """

    def __init__(self, pool, before, timeout: float, number: int):
        self.pool, self.control, self.processes = pool, pool._control, pool._processes
        self.before, self.timeout, self.number = before, timeout, number
        self.status = [RUNNING] * pool.size
        self.reports = [None] * pool.size
        self.died_at = [0] * pool.size  # time.monotonic_ns
        self.ended = set()  # ranks that had to be killed
        self._gone = set()  # ranks whose process has ended
        self._pipes = {process.pipe.fileno(): process for process in self.processes}
        self._sentinels = {process.child.sentinel: process for process in self.processes}
        self._poll = select.poll()
        for fd in (*self._pipes, *self._sentinels):
            self._poll.register(fd, select.POLLIN)

    def results(self) -> list[bytearray]:
        """The answers of all ranks, still pickled. Raises `RankError` if not all ranks answer."""
        deadline, give_up_at = time.monotonic() + self.timeout, None
        while True:
            self._update_status()
            if RUNNING not in self.status:
                break
            now, in_vain = time.monotonic(), [self._waits_in_vain(r) for r in self.running()]
            if FAILED in self.status or DEAD in self.status or any(in_vain):
                # Certain; but a rank on its way gets the time to fail itself, or to show where it will wait.
                give_up_at = give_up_at or now + _GRACE
                if now >= give_up_at or all(in_vain):
                    break
            if now >= deadline:
                raise failures.too_late(self)
            self._pause(min(_TICK, deadline - now))
        if set(self.status) == {RETURNED}:
            return [self._answer(r) for r in range(self.pool.size)]
        if FAILED in self.status or DEAD in self.status:
            raise failures.failure(self)
        raise failures.skipped(self)

    def stop(self) -> None:
        """Stop every rank: by the control block, by a signal, by closing gloo's connections, at last by SIGKILL."""
        self.control.words[ABANDONED] = self.pool._epoch
        self._update_status()
        for r in self.running():
            self.processes[r].signal(signal.SIGUSR1)
        begin, dropped = time.monotonic(), False
        while RUNNING in self.status and (now := time.monotonic() - begin) < _STOP:
            if now >= _DROP_GLOO and not dropped:
                dropped = True
                self.pool._post(DROP)
            self._pause(0.01)
            self._update_status()
            for r in self.running():
                if self.control.word(r, STARTED) > self.number:
                    self.status[r] = IDLE
        self.ended.update(self.running())
        end_all([self.processes[r] for r in self.running()])
        self.status = [DEAD if status == RUNNING else status for status in self.status]

    def running(self) -> list[int]:
        return [r for r, status in enumerate(self.status) if status == RUNNING]

    def waits_in(self, r: int) -> OpRecord | None:
        """The collective in which rank `r` is at this moment."""
        record = self.last_op(r)
        return record if record is not None and not record.left else None

    def _waits_in_vain(self, r: int) -> bool:
        """Whether rank `r` waits in a collective that another rank has ended without.

        In one that all of those have reached it need not wait: it goes on as soon as it gets a core.
        """
        reached = [self.control.logs[o].last_seq() for o, status in enumerate(self.status) if status != RUNNING]
        record = self.waits_in(r)
        return record is not None and bool(reached) and record.seq > min(reached)

    def last_op(self, r: int) -> OpRecord | None:
        """The newest collective of rank `r` in this command."""
        log = self.control.logs[r]
        seq = log.last_seq()
        return log.record(seq) if seq > self.before[r] else None

    def _answer(self, r):
        return self.processes[r].outbox.get(self.control.word(r, ANSWER_LENGTH))

    def _update_status(self):
        for r in self.running():
            # Before death: an answer counts even if the rank died right after it.
            if self.control.word(r, ANSWERED) == self.number:
                fence()
                self.status[r] = RETURNED if self.control.word(r, OUTCOME) == OK else FAILED
                if self.status[r] == FAILED:
                    self.reports[r] = transfer.loads(self._answer(r))
            elif r in self._gone:
                self.status[r] = DEAD
                self.died_at[r] = time.monotonic_ns()

    def _pause(self, seconds):
        for fd, _event in self._poll.poll(max(0.0, seconds) * 1000):
            if fd in self._sentinels:
                self._gone.add(self._sentinels[fd].rank)
            elif self._pipes[fd].drain():
                continue
            self._poll.unregister(fd)  # what has ended would be readable for ever
        for process in self.processes:
            process.reader.trim()

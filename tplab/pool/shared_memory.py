"""The group of a pool's processes, which exchange data through shared memory.

An all-reduce of 4 KB between two ranks takes some tens of microseconds; gloo, with threads and sockets, takes several
hundred. Each rank has two slots and alternates between them. A rank that has published step n + 1 has finished reading
step n, so the slot of step n can be written again at step n + 2 without another signal.
"""

import torch

from tplab.pool.control_block import (
    ABANDONED,
    BLOCK_WORDS,
    CONTENDED,
    NUMBER,
    SLEEPING,
    SLOT_BYTES,
    STEP,
    ControlBlock,
    fence,
)
from tplab.pool.waiting import LONG_SPIN, SHORT_SPIN, Contention, sleep_while, wake
from tplab.ranks.errors import Abandoned, CollectiveMismatch
from tplab.ranks.group import Group

_LONGEST_SLEEP = 0.01  # seconds; then the rank looks whether the parent has ended the run


class SharedMemoryGroup(Group):
    """One rank process of a pool."""

    def __init__(self, rank: int, control: ControlBlock, strict: bool):
        super().__init__(rank, control.size, control.logs[rank])
        self.control = control
        self.words = control.words
        self.strict = strict
        self.others = [r for r in range(self.size) if r != rank]
        self.step_at = [BLOCK_WORDS * (r + 1) + STEP for r in range(self.size)]
        self.sleeping_at = [BLOCK_WORDS * (r + 1) + SLEEPING for r in range(self.size)]
        self.contended_at = [BLOCK_WORDS * (r + 1) + CONTENDED for r in range(self.size)]
        self.epoch = self.step = self.checked = 0
        with torch.inference_mode(False):
            self.memory = torch.frombuffer(control.map, dtype=torch.uint8)
        self.views = {}
        self.contention, self.spin = Contention(), LONG_SPIN

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.step = self.checked = 0
        self.words[self.step_at[self.rank]] = 0
        self.log.clear()

    def begin_command(self) -> None:
        """Choose the spin budget: a short one if any rank has met contention, for one that waits always has a core."""
        self.started = []  # what a run that failed had left
        self.words[self.contended_at[self.rank]] = self.contention.measure()
        self.spin = SHORT_SPIN if any(self.words[at] for at in self.contended_at) else LONG_SPIN

    @property
    def command(self) -> int:
        """The number of the pool's command that is being executed."""
        return self.words[NUMBER]

    def chunk(self, dtype):
        return SLOT_BYTES // dtype.itemsize

    def swap(self, piece, counts=None):
        step = self.step = self.step + 1
        slots = self._slots(step & 1, piece.dtype, piece.numel() if counts is None else tuple(counts))
        slots[self.rank].copy_(piece)
        self._meet(step)
        return slots

    def all_agree(self, answer: bool) -> bool:
        """Whether all ranks' answers are true. This exchange is not in the op log."""
        return all(bool(true) for true in self.swap(torch.tensor([answer])))

    def end_step(self, step: int, seq: int, stopped: bool) -> None:
        """Take over from compiled code, which has published steps up to ``step`` and entered collectives up to number
        ``seq``. If it ``stopped`` early, raise the reason."""
        self.step = step
        self.log.jump(seq)
        if stopped:
            if self.words[ABANDONED] >= self.epoch:
                raise Abandoned
            self._compare()
        self.checked = seq

    def _meet(self, step):
        fence()
        self._publish(step)
        self._wait_for(step)
        fence()
        if self.checked != self.log.seq:
            self._compare()

    def _publish(self, step):
        self.words[self.step_at[self.rank]] = step
        fence()  # a rank that has not set its word by now will see this step before it sleeps
        for other in self.others:
            if self.words[self.sleeping_at[other]]:
                wake(self._address(self.step_at[self.rank]))
                break

    def _wait_for(self, step):
        words, spins = self.words, 0
        for other in self.others:
            at = self.step_at[other]
            while words[at] < step:
                if words[ABANDONED] >= self.epoch:
                    raise Abandoned
                spins += 1
                if spins > self.spin.python:
                    self._sleep(at, step)

    def _sleep(self, at, step):
        sleeping = self.sleeping_at[self.rank]
        self.words[sleeping] = 1
        try:
            fence()
            if (seen := self.words[at]) < step:
                sleep_while(self._address(at), seen, _LONGEST_SLEEP)
        finally:
            self.words[sleeping] = 0

    def _address(self, word):
        return self.memory.data_ptr() + 8 * word

    def _compare(self):
        """All ranks are in their collective number `seq`: compare it, and those before it that did not wait."""
        for seq in range(self.checked + 1, self.log.seq + 1):
            self.checked = seq  # not again, if the learner's code catches the error and goes on
            if len({log.signature(seq) for log in self.control.logs}) > 1:
                raise CollectiveMismatch.of(self._records(seq))
            if self.strict and len({(record.file, record.line) for record in self._records(seq)}) > 1:
                raise CollectiveMismatch.of(self._records(seq), "strict: the ranks meet from different lines")

    def _records(self, seq):
        return [log.record(seq) for log in self.control.logs]

    def _slots(self, parity, dtype, counts):
        key = (parity, dtype, counts)
        if (slots := self.views.get(key)) is None:
            if len(self.views) > 512:
                self.views.clear()
            each = [counts] * self.size if isinstance(counts, int) else counts
            begins = [self.control.slot_offset(r, parity) for r in range(self.size)]
            with torch.inference_mode(False):
                slots = [self.memory[at : at + n * dtype.itemsize].view(dtype) for at, n in zip(begins, each)]
            self.views[key] = slots
        return slots

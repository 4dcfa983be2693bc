"""The group of a pool's processes: pieces travel through shared memory.

An all-reduce of 4 KB between two ranks takes gloo several hundred microseconds (threads and sockets) and this some
tens. Each rank has two slots and uses them in turn: a rank that has published step n + 1 has finished reading step n,
so slot n may be written again at step n + 2 without any further signal. Between two products an all-reduce is one call
(:mod:`tplab.pool.adding`), unless somebody is late, sleeps, or does something else.
"""

import ctypes

import numpy as np
import torch

from tplab.kernels.compiled import noting, threads_for
from tplab.kernels.graph import Graph, Recording, refuse
from tplab.pool.adding import DONE, LANES, adding, noted_reduce
from tplab.pool.control_block import (
    ABANDONED,
    ASLEEP,
    BLOCK_WORDS,
    CROWDED,
    NUMBER,
    SLOT_BYTES,
    STEP,
    ControlBlock,
    fence,
)
from tplab.pool.waiting import FEW, MANY, Lack, sleep_while, wake
from tplab.ranks.errors import Abandoned, CollectiveMismatch
from tplab.ranks.group import Group, add_in_order
from tplab.ranks.oplog import SAME_FROM, SAME_TO

_LOOK_UP = 0.01  # seconds of sleep, for the parent may have given the run up


class SharedMemoryGroup(Group):
    """One rank process of a pool."""

    def __init__(self, rank: int, control: ControlBlock, strict: bool):
        super().__init__(rank, control.size, control.logs[rank])
        self.control = control
        self.words = control.words
        self.strict = strict
        self.others = [r for r in range(self.size) if r != rank]
        self.step_at = [BLOCK_WORDS * (r + 1) + STEP for r in range(self.size)]
        self.asleep_at = [BLOCK_WORDS * (r + 1) + ASLEEP for r in range(self.size)]
        self.crowded_at = [BLOCK_WORDS * (r + 1) + CROWDED for r in range(self.size)]
        self.epoch = self.step = self.checked = 0
        with torch.inference_mode(False):
            self.memory = torch.frombuffer(control.map, dtype=torch.uint8)
        self.views = {}
        base = self.memory.data_ptr()
        self.peers = np.array([[base + control.slot_offset(r, 0), base + 8 * self.step_at[r],
                                base + 8 * self.asleep_at[r], base + control.log_offset(r)] for r in range(self.size)])
        self.peers_at = self.peers.ctypes.data
        self.to_second_slot = control.slot_offset(0, 1) - control.slot_offset(0, 0)
        self.said = ctypes.c_int64()
        self.said_at = ctypes.addressof(self.said)
        self.counted = np.zeros(3, np.int64)  # as graphs count on: step, number of the last collective; and first looks
        self.lack, self.looks = Lack(), MANY

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.step = self.checked = 0
        self.words[self.step_at[self.rank]] = 0
        self.log.clear()

    def begin_command(self) -> None:
        """Find out whether others want the cores. All ranks are asked: one that waits for another has a core."""
        self.words[self.crowded_at[self.rank]] = self.lack.is_felt()
        self.looks = FEW if any(self.words[at] for at in self.crowded_at) else MANY

    @property
    def command(self) -> int:
        """The number of the pool's command that is being obeyed; each has the next one."""
        return self.words[NUMBER]

    def chunk(self, dtype):
        return SLOT_BYTES // dtype.itemsize

    def all_reduce(self, t, frame):
        recording = getattr(noting, "calls", None)
        if recording is None:
            return super().all_reduce(t, frame)
        with recording.aside():
            super().all_reduce(t, frame)
        self._note(t, recording)
        return t

    def swap(self, piece, counts=None):
        refuse("a collective other than all_reduce")
        step = self.step = self.step + 1
        slots = self._slots(step & 1, piece.dtype, piece.numel() if counts is None else tuple(counts))
        slots[self.rank].copy_(piece)
        self._meet(step)
        return slots

    def sum_up(self, piece):
        if not self._is_one_call(piece):
            return super().sum_up(piece)
        step = self.step = self.step + 1
        adding(piece.dtype)(piece.data_ptr(), piece.numel(), self.peers_at, self.size, self.rank,
                            (step & 1) * self.to_second_slot, self.log.at, step, self.looks.first, self.said_at)
        if self.said.value == DONE:
            self.checked = self.log.seq
        else:
            self._sum_up_by_calls(piece)

    def _is_one_call(self, piece):
        count = piece.numel()
        return (adding(piece.dtype) is not None and not self.strict and count and count % LANES == 0
                and threads_for(piece) == 1)

    def _sum_up_by_calls(self, piece):
        """The step has been published."""
        self._meet(self.step)
        add_in_order(self._slots(self.step & 1, piece.dtype, piece.numel()), piece)

    def _note(self, t, recording: Recording):
        """Of an all-reduce that was done, note what repeats it."""
        if self.strict or not t.is_contiguous() or t.numel() > self.chunk(t.dtype) \
                or not (self._is_one_call(t) if self.size > 1 else noted_reduce(t.dtype)):
            return recording.refuse("an all_reduce in several calls")
        record, file = self.log.newest()
        template = np.frombuffer(record, np.uint8)
        graph = recording.noted
        number = graph.add(noted_reduce(t.dtype), (
            t.data_ptr(), t.numel(), self.peers_at, self.size, self.rank, self.to_second_slot,
            self.counted.ctypes.data, template.ctypes.data, int(self.peers[self.rank, 3]), graph.status))
        piece = torch.frombuffer((ctypes.c_ubyte * t.nbytes).from_address(t.data_ptr()), dtype=t.dtype)
        graph.rescues[number] = lambda: self._finish(piece)
        graph.kept.append(template)
        graph.files.append(file)
        if self not in graph.meetings:
            graph.meetings.append(self)

    def begin_replay(self, graph: Graph):
        self._check_thread("all_reduce")
        self.log.expect(graph.files)
        self.counted[:] = self.step, self.log.seq, self.looks.first

    def end_replay(self):
        self.step, seq, _ = self.counted.tolist()
        self.log.jump(seq)
        self.checked = seq

    def _finish(self, piece):
        """An all-reduce of a replay needs help: somebody sleeps, is late, or does something else."""
        self.step, seq, _ = self.counted.tolist()
        self.log.jump(seq)
        self._sum_up_by_calls(piece)
        self.log.leave()

    def _meet(self, step):
        fence()
        self._publish(step)
        self._wait_for(step)
        fence()
        if self.checked != self.log.seq:
            self._compare()
            self.checked = self.log.seq

    def _publish(self, step):
        self.words[self.step_at[self.rank]] = step
        fence()  # whoever has not said by now that it sleeps will see the step before it does
        for other in self.others:
            if self.words[self.asleep_at[other]]:
                wake(self._address(self.step_at[self.rank]))
                break

    def _wait_for(self, step):
        words, looks = self.words, 0
        for other in self.others:
            at = self.step_at[other]
            while words[at] < step:
                if words[ABANDONED] >= self.epoch:
                    raise Abandoned
                looks += 1
                if looks > self.looks.then:
                    self._sleep(at, step)

    def _sleep(self, at, step):
        asleep = self.asleep_at[self.rank]
        self.words[asleep] = 1
        try:
            fence()
            if (seen := self.words[at]) < step:
                sleep_while(self._address(at), seen, _LOOK_UP)
        finally:
            self.words[asleep] = 0

    def _address(self, word):
        return self.memory.data_ptr() + 8 * word

    def _compare(self):
        """All ranks are in their collective number `seq` now: is it the same one?"""
        at = self.log.at
        mine = self.log.memory[at + SAME_FROM : at + SAME_TO]
        for other in self.others:
            if self.control.logs[other].memory[at + SAME_FROM : at + SAME_TO] != mine:
                raise CollectiveMismatch.of(self._records())
        if self.strict and len({(record.file, record.line) for record in self._records()}) > 1:
            raise CollectiveMismatch.of(self._records(), "strict: the ranks meet from different lines")

    def _records(self):
        return [log.record(self.log.seq) for log in self.control.logs]

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

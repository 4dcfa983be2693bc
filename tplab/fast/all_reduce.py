"""The all-reduce of a pool's ranks in compiled code, by the protocol of :mod:`tplab.pool.shared_memory`.

Each rank has two slots of shared memory, used in turn: a rank that has published step n + 1 has read step n. It writes
the op log as Python does, so that mismatched collectives are found and both sides can be shown.
"""

from typing import NamedTuple

import numpy as np

from tplab.fast.compiled import inner
from tplab.fast.rowwise import add, copy
from tplab.fast.simd import load_acquire, nap, pause, store_release
from tplab.pool.control_block import ABANDONED, SLOT_BYTES
from tplab.ranks.oplog import ENTERED, LEFT, RECORD_BYTES, RECORDS, RING_AT

_NAP = 50  # microseconds; ranks wait this long only if cores are short or work is uneven
_SLOT = SLOT_BYTES // 4
LINE, STATE, SAME, SHAPE = 1, 2, 3, 5  # int64 words of a record; from SAME on, ranks must agree
RECORD_WORDS = 13
DONE, MISMATCH = 0, 2


class Ranks(NamedTuple):
    """What the ranks of a pool share, and the threads of this rank.

    Attributes:
        words, numbers: all of the shared memory, as int64 and as float32.
        steps: for each rank, which word says how many steps it has published.
        slots: for each rank its two slots, as indices of ``numbers``.
        logs: for each rank, at which word its op log begins.
        record: what stands in the log for each all-reduce.
        state: the last step; the last collective's number; the epoch; how often to look before a nap; what failed.
        arrivals: for each thread, 8 words of which the first counts the barriers that it came to.
    """

    rank: int
    size: int
    words: np.ndarray
    numbers: np.ndarray
    steps: np.ndarray
    slots: np.ndarray
    logs: np.ndarray
    record: np.ndarray
    state: np.ndarray
    arrivals: np.ndarray


@inner
def _wait(words, at, value, ranks):
    """Wait until ``words[at]`` is ``value`` or more. False: the run was ended, or another thread found a mismatch."""
    looks = ranks.state[3]
    while load_acquire(words, at) < value:
        if load_acquire(ranks.words, ABANDONED) >= ranks.state[2] or load_acquire(ranks.state, 4) != DONE:
            return False
        if looks > 0:
            looks -= 1
            pause()
        else:
            nap(_NAP)
    return True


@inner
def barrier(thread, ranks):
    """Wait for all threads of this rank. False as in ``_wait``."""
    threads = len(ranks.arrivals) // 8
    if threads > 1:
        count = ranks.arrivals[8 * thread] + 1
        store_release(ranks.arrivals, 8 * thread, count)
        for other in range(threads):
            if not _wait(ranks.arrivals, 8 * other, count, ranks):
                return False
    return True


@inner
def _enter(seq, rows, ranks):
    """Write this all-reduce into the rank's op log. A record's number is 0 while the rest of it is written."""
    log = ranks.logs[ranks.rank]
    at = log + (RING_AT + seq % RECORDS * RECORD_BYTES) // 8
    store_release(ranks.words, at, 0)
    for i in range(LINE, RECORD_WORDS):
        store_release(ranks.words, at + i, ranks.record[i])
    store_release(ranks.words, at + STATE, ENTERED)
    store_release(ranks.words, at + SHAPE, rows)
    store_release(ranks.words, at, seq)
    store_release(ranks.words, log, seq)
    return at


@inner
def _all_do_the_same(at, ranks):
    """Whether the other ranks have entered the collective whose record is at ``at`` in this rank's log."""
    offset = at - ranks.logs[ranks.rank]
    for other in range(ranks.size):
        for i in range(SAME, RECORD_WORDS):
            if ranks.words[ranks.logs[other] + offset + i] != ranks.words[at + i]:
                return False
    return True


@inner
def all_reduce(partial, partial_row, rows, hidden, step, seq, thread, ranks):
    """Add the sum of all ranks' ``partial[row]``, in rank order, to ``hidden[row]``. All threads of a rank call it.

    ``partial`` is flat, its rows ``partial_row`` numbers apart; ``hidden`` is ``[rows, size]``. Returns the number of
    the last step, or -1: the run was ended, or another rank is in another collective (``state`` says which).
    """
    size, threads = hidden.shape[1], len(ranks.arrivals) // 8
    if ranks.size == 1:
        if thread == 0:
            ranks.words[_enter(seq, rows, ranks) + STATE] = LEFT
        for row in range(thread, rows, threads):
            add(partial[row * partial_row:row * partial_row + size], hidden[row])
        return step
    at, numbers = 0, ranks.numbers
    fit = _SLOT // size // threads * threads  # rows in a slot; a row belongs to one thread in all parts of a step
    for top in range(0, rows, fit):
        step += 1
        bottom, mine = min(rows, top + fit), ranks.slots[ranks.rank, step % 2]
        for row in range(top + thread, bottom, threads):
            to = mine + (row - top) * size
            copy(partial[row * partial_row:row * partial_row + size], numbers[to:to + size])
        if not barrier(thread, ranks):
            return -1
        if thread == 0:
            if top == 0:
                at = _enter(seq, rows, ranks)
            store_release(ranks.words, ranks.steps[ranks.rank], step)
        for other in range(ranks.size):
            if not _wait(ranks.words, ranks.steps[other], step, ranks):
                return -1
        if thread == 0 and top == 0 and not _all_do_the_same(at, ranks):
            store_release(ranks.state, 4, MISMATCH)
            return -1
        for row in range(top + thread, bottom, threads):
            total = partial[row * partial_row:row * partial_row + size]
            for other in range(ranks.size):
                at_other = ranks.slots[other, step % 2] + (row - top) * size
                if other == 0:
                    copy(numbers[at_other:at_other + size], total)
                else:
                    add(numbers[at_other:at_other + size], total)
            add(total, hidden[row])
    if thread == 0:
        ranks.words[at + STATE] = LEFT
    return step

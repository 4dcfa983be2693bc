"""Ranks that do not do the same, or that never end: what a learner reads; and that the pool works afterwards."""

import itertools
import os
import time

import pytest
import torch
from helpers.failing import fails, kept

from tplab.pool import RankPool
from tplab.ranks import CollectiveMismatch, RankError, all_gather, all_reduce, barrier, broadcast, op_log, rank

pytestmark = pytest.mark.usefixtures("usable_afterwards")


# Ranks that do not do the same.


def test_skipped_collective(pool):
    def fn():
        all_reduce(torch.ones(2))
        if rank() == 0:
            all_reduce(torch.ones(4))

    pool.run(barrier)  # not of this run, so not in its logs
    error = fails(
        pool, fn, r"^rank 1 returned; rank 0 waits in all_reduce at .*line \d+", r"all_reduce\(torch.ones\(4\)\)",
        r"≠ #2 +all_reduce \[4\] float32 @ .*line \d+ \(waits\) +returned",
    )  # fmt: skip
    assert [[record.seq for record in log] for log in error.logs] == [[1, 2], [1]]
    assert kept(pool) == [True, True]


@pytest.mark.parametrize(
    "one, other, told",
    [
        (lambda: all_reduce(torch.ones(4)), lambda: barrier(), ["all_reduce [4] float32", "barrier"]),
        (lambda: all_reduce(torch.ones(4)), lambda: all_reduce(torch.ones(5)), ["[4]", "[5]"]),
        (lambda: all_reduce(torch.ones(4)), lambda: all_reduce(torch.ones(4).double()), ["float32", "float64"]),
        (lambda: all_reduce(torch.ones(4)), lambda: all_reduce(torch.ones(2, 2)), ["[4]", "[2, 2]"]),
        (lambda: broadcast(torch.ones(4), 0), lambda: broadcast(torch.ones(4), 1), ["src 0", "src 1"]),
        (lambda: all_gather(torch.ones(4)), lambda: all_gather(torch.ones(3)), ["all_gather [4]", "all_gather [3]"]),
        (lambda: all_gather(torch.ones(2, 2), 0), lambda: all_gather(torch.ones(2, 2), 1), ["dim 0", "dim 1"]),
        (lambda: all_reduce(torch.ones(300_000)), lambda: all_reduce(torch.ones(3)), ["[300000]", "[3]"]),
    ],
    ids=["operation", "shape", "dtype", "dims", "src", "gathered", "dim", "large"],
)
def test_different_collectives(pool, one, other, told):
    def fn():
        barrier()
        t = torch.zeros(1)
        return (one if rank() == 0 else other)(), t

    error = fails(pool, fn, r"^the ranks meet in different collectives: rank 0 calls .* at .*line \d+; rank 1 calls")
    assert isinstance(error, CollectiveMismatch)
    assert all(part in error.summary for part in told)
    assert kept(pool) == [True, True]


@pytest.mark.parametrize("end", ["raises", "dies", "skips"])
def test_after_a_failure_all_ranks_count_from_one(pool, end):
    """Survivors and fresh ranks number their collectives alike, and those of a number seen before are compared too."""

    def fn(met):
        for _ in range(met):
            barrier()
        if rank() == 1:
            1 / 0 if end == "raises" else os._exit(3) if end == "dies" else None
        else:
            all_reduce(torch.ones(1))

    def differ():
        barrier() if rank() else all_reduce(torch.ones(1))

    def numbers():
        for _ in range(3):
            barrier()
        return [record.seq for record in op_log()]

    fails(pool, fn, met=3)
    assert pool.run(numbers) == [[1, 2, 3]] * 2
    fails(pool, fn, met=3)
    fails(pool, fn, met=1)
    assert isinstance(fails(pool, differ), CollectiveMismatch)


def test_a_mismatch_leaves_the_tensor_alone(pool):
    def fn():
        t = torch.ones(3 + rank())
        try:
            all_reduce(t)
        except RankError:
            return t.tolist()

    assert pool.run(fn) == [[1.0] * 3, [1.0] * 4]


def test_a_rank_that_fails_later_than_the_first_is_heard(pool):
    def fn():
        all_reduce(torch.ones(1))
        time.sleep(0.4 * rank())
        raise ValueError("the same on both")

    assert {cause.kind for cause in fails(pool, fn, "raised ValueError").causes.values()} == {"raised"}


def test_strict_wants_the_same_line(pool):
    def fn():
        if rank() == 0:
            all_reduce(torch.ones(1))
        else:
            all_reduce(torch.zeros(1))

    pool.run(fn)
    with RankPool(2, strict=True) as strict:
        fails(strict, fn, r"^strict: the ranks meet from different lines: rank 0 .*; rank 1 ")


# No end.


def test_endless_python_loop(pool):
    def fn():
        while True:
            pass

    fails(pool, fn, r"^not finished after [\d.]+ s: rank 0 is still running at .*line \d+; rank 1 is",
          "while True|pass", timeout=0.5)  # one of its two lines
    assert kept(pool) == [True, True]


def test_endless_call_that_holds_the_interpreter(pool):
    def fn():
        if rank() == 1:
            sum(itertools.repeat(1))  # in C for ever, without letting go of the GIL or looking for signals
        barrier()

    fails(
        pool, fn, r"rank 1 is still running at", r"sum\(itertools", "rank 1 did not stop and had to be ended",
        timeout=0.5,
    )  # fmt: skip
    assert kept(pool) == [True, False]


def test_an_unstoppable_function(pool):
    def fn():
        while True:
            try:
                time.sleep(10)
            except BaseException:
                pass

    fails(pool, fn, "ranks 0, 1 did not stop and had to be ended",
          r"The next run starts ranks 0, 1 afresh, with an empty state\.", timeout=0.5)

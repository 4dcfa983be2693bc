"""What a learner reads, and within how many seconds, when ranks fail; and that the pool works afterwards."""

import itertools
import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tplab.pool import RankPool
from tplab.pool.control_block import ANSWERED, NUMBER
from tplab.pool.watch import Watch
from tplab.ranks import CollectiveMismatch, RankError, all_gather, all_reduce, barrier, broadcast, op_log, rank, state
from tplab.ranks.context import current

SOON = 20  # seconds: nobody waits for the pool's 60. On a quiet machine it is one, which `test_how_soon` measures


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def usable_afterwards(pool):
    pool.run(lambda: state.update(kept=rank()))
    yield
    begin = time.monotonic()
    assert pool.run(lambda: float(all_reduce(torch.ones(())))) == [2.0, 2.0]
    pool.run(lambda: dist.all_reduce(torch.ones(())))
    assert time.monotonic() - begin < SOON, "the pool took too long to be usable again"


def fails(pool, fn, *patterns, **options):
    """Run `fn`; it must raise a RankError before the pool's timeout whose text has all patterns."""
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(fn, **options)
    took = time.monotonic() - begin
    text = str(caught.value)
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"
    assert took < SOON, f"took {took:.2f} s:\n{text}"
    return caught.value


def kept(pool):
    """Which ranks still have what they were told before the failure."""
    return pool.run(lambda: "kept" in state)


@pytest.mark.parametrize("how", ["raises", "dies", "skips", "differs", "loops"])
def test_how_soon(pool, how):
    """Told within a second, and usable again within another: the best of some tries, for the machine is busy."""

    def fn():
        if rank() == 0 and how != "loops":
            barrier()
        elif how == "raises":
            raise ValueError
        elif how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "differs":
            all_reduce(torch.ones(1))
        while how == "loops":
            pass

    def once():
        begin = time.monotonic()
        fails(pool, fn, timeout=0.1 if how == "loops" else None)
        failed = time.monotonic()
        assert pool.run(rank) == [0, 1]
        return failed - begin, time.monotonic() - failed

    assert any(max(once()) < 1 for _ in range(8))


# A rank raises.


def test_raise_before_a_collective(pool):
    def fn():
        if rank() == 1:
            raise ValueError("too early")
        all_reduce(torch.ones(4))

    error = fails(
        pool, fn, r"^rank 1 raised ValueError: too early", r'raise ValueError\("too early"\)',
        r"rank 0 waits in all_reduce at .*line \d+ \(a consequence\)",
    )  # fmt: skip
    assert isinstance(error.first.exception, ValueError) and error.first.rank == 1
    assert error.causes[0].consequence and not error.causes[1].consequence
    assert kept(pool) == [True, True]


def test_raise_inside_a_collective(pool):
    def fn():
        all_reduce(torch.ones(4) if rank() == 0 else "not a tensor")

    fails(pool, fn, r"^rank 1 raised RankError: all_reduce takes a tensor, not str", r"all_reduce\(torch.ones\(4\)")


def test_raise_after_a_collective(pool):
    def fn():
        all_reduce(torch.ones(4))
        return 1 // rank()

    error = fails(pool, fn, r"^rank 0 raised ZeroDivisionError", r"return 1 // rank\(\)", r"rank 1 returned")
    assert error.causes[1].kind == "returned"


def test_all_ranks_raise_and_all_are_shown(pool):
    def fn():
        raise KeyError(f"of rank {rank()}")

    error = fails(pool, fn, "KeyError: 'of rank 0'", "KeyError: 'of rank 1'")
    assert not any(cause.consequence for cause in error.causes.values())


def test_a_rank_that_computes_while_another_raises_is_stopped(pool):
    def fn():
        if rank() == 1:
            raise ValueError("over")
        while True:
            time.sleep(0.01)

    fails(pool, fn, r"^rank 1 raised ValueError", r"rank 0 is still running at .* \(a consequence\)")
    assert kept(pool) == [True, True]


def test_swallowed_exceptions_do_not_hide_the_cause(pool):
    def fn():
        try:
            if rank() == 1:
                raise ValueError("first")
            all_reduce(torch.ones(1))
        except Exception:
            if rank() == 1:
                raise

    fails(pool, fn, r"^rank 1 raised ValueError: first")


def test_exceptions_that_resist_being_told(pool):
    class Stubborn(Exception):
        def __str__(self):
            raise RuntimeError

        def __reduce__(self):
            raise RuntimeError

    def fn():
        raise Stubborn

    fails(pool, fn, r"rank 0 raised Stubborn: \(its message cannot be had: RuntimeError\)")

    def long():
        raise ValueError("x" * 10_000_000)

    assert len(str(fails(pool, long, "10,000,012 characters"))) < 20_000


def test_leaving_by_sys_exit_is_an_error_with_its_line(pool):
    def fn():
        raise SystemExit(3)

    fails(pool, fn, r"rank 0 raised SystemExit: 3", r"raise SystemExit\(3\)")


# A rank dies.


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM"])
@pytest.mark.parametrize("when", ["before", "in", "after"])
def test_killed_by_a_signal(pool, name, when):
    number = getattr(signal, name)

    def fn():
        if when == "before" and rank() == 1:
            os.kill(os.getpid(), number)
        if when == "in" and rank() == 1:
            threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        if when == "in" and rank() == 0:
            time.sleep(5)
        all_reduce(torch.ones(8))
        if when == "after" and rank() == 1:
            os.kill(os.getpid(), number)
        barrier()

    error = fails(pool, fn, rf"^rank 1 died \({name}\)",
                  "The next run starts rank 1 afresh, with an empty state; the others")
    if name in ("SIGSEGV", "SIGABRT") and when != "in":
        assert "os.kill(os.getpid(), number)" in str(error)  # faulthandler knows the line
    elif when != "before":
        assert re.search(rf"rank 1 died \({name}\) (in|after|at .*line).*\n.*\n.*all_reduce\(torch.ones\(8\)\)",
                         str(error))
    assert kept(pool) == [True, False]


def test_exit_without_goodbye(pool):
    def fn():
        if rank() == 0:
            os._exit(3)
        all_reduce(torch.ones(2))

    fails(pool, fn, r"^rank 0 died \(exit code 3\) in fn", r"rank 1 waits in all_reduce at .* \(a consequence\)")


def test_killed_from_outside_at_any_moment(pool):
    def fn(seconds):
        end = time.monotonic() + seconds
        while all_reduce(torch.tensor(float(time.monotonic() < end))) == 2:
            pass

    for delay in (0.0, 0.001, 0.003, 0.01, 0.03):
        first, second = pool.pids
        timer = threading.Timer(delay, os.kill, (first, signal.SIGKILL))
        timer.start()
        begin = time.monotonic()
        try:
            pool.run(fn, 1.5)
        except RankError as error:
            assert re.match(r"rank 0 died \(SIGKILL\)", str(error)) and time.monotonic() - begin < SOON
            pool.run(rank)
        else:  # it was over before the run had begun, which then began with a new rank
            assert time.monotonic() - begin > 1.5
        assert first not in pool.pids and second in pool.pids


def test_a_rank_that_answers_and_then_dies_has_answered(pool, monkeypatch):
    """Its death is the next run's matter, which starts it afresh."""

    def fn():
        control = current().control
        number = control.words[NUMBER]

        def end():
            while control.word(rank(), ANSWERED) != number:
                time.sleep(0.001)
            os._exit(3)

        if rank() == 1:
            threading.Thread(target=end).start()
        return rank()

    def pause(watch, seconds):  # the parent is slow: it hears of the answer and of the death at once
        watch.processes[1].child.join(10)
        watch_pause(watch, seconds)

    watch_pause = Watch._pause
    with monkeypatch.context() as patch:
        patch.setattr(Watch, "_pause", pause)
        assert pool.run(fn) == [0, 1]
    assert kept(pool) == [True, False]


def test_all_ranks_killed_between_runs(pool):
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    while any(pool.pids):
        time.sleep(0.01)
    assert pool.run(rank) == [0, 1]


def test_killed_in_gloo(pool):
    def fn():
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))

    fails(pool, fn, r"^rank 1 died \(SIGKILL\)", r"rank 0 (raised|waits).*\(a consequence\)")


# Ranks that do not do the same.


def test_skipped_collective(pool):
    def fn():
        all_reduce(torch.ones(2))
        if rank() == 0:
            all_reduce(torch.ones(4))

    error = fails(
        pool, fn, r"^rank 1 returned; rank 0 waits in all_reduce at .*line \d+", r"all_reduce\(torch.ones\(4\)\)",
        r"≠ #\d+ +all_reduce \[4\] float32 @ .*line \d+ \(waits\) +returned",
    )  # fmt: skip
    assert [len(log) for log in error.logs] == [2, 1]
    assert kept(pool) == [True, True]


def test_skipped_while_a_third_rank_is_still_on_its_way():
    def fn():
        time.sleep(0.1 * (rank() == 2))
        if rank() != 1:
            barrier()

    with RankPool(3) as three:
        fails(three, fn, r"^rank 1 returned; rank 0 waits in barrier at .*; rank 2 waits in barrier at ")


def test_skipped_in_gloo(pool):
    def fn():
        if rank() == 0:
            dist.all_reduce(torch.ones(4))

    fails(pool, fn, r"^rank 1 returned; rank 0 waits in torch.distributed.all_reduce at .*line \d+")
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

    def fn():
        for _ in range(3):
            barrier()
        if rank() == 1:
            1 / 0 if end == "raises" else os._exit(3) if end == "dies" else None
        else:
            all_reduce(torch.ones(1))

    def differ():
        for _ in range(2):
            barrier()
        barrier() if rank() else all_reduce(torch.ones(1))

    def numbers():
        for _ in range(3):
            barrier()
        return [record.seq for record in op_log()]

    fails(pool, fn)
    assert pool.run(numbers) == [[1, 2, 3]] * 2
    fails(pool, fn)
    assert isinstance(fails(pool, differ), CollectiveMismatch)


def test_another_order(pool):
    def fn():
        for op in (all_reduce, all_gather) if rank() == 0 else (all_gather, all_reduce):
            op(torch.ones(4))

    fails(pool, fn, "rank 0 calls all_reduce .* rank 1 calls all_gather", r"≠ #\d")


def test_a_mismatch_leaves_the_tensor_alone(pool):
    def fn():
        t = torch.ones(3 + rank())
        try:
            all_reduce(t)
        except RankError:
            return t.tolist()

    assert pool.run(fn) == [[1.0] * 3, [1.0] * 4]


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

    fails(pool, fn, r"^not finished after 0.5 s: rank 0 is still running at .*line \d+; rank 1 is", "while True",
          timeout=0.5)
    assert kept(pool) == [True, True]


def test_endless_loop_of_one_rank_while_the_other_waits(pool):
    def fn():
        while rank() == 1:
            time.sleep(1)
        all_reduce(torch.ones(1))

    error = fails(pool, fn, r"rank 0 waits in all_reduce at", r"rank 1 is still running at", timeout=0.5)
    assert error.first.rank == 1


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


def test_all_stuck_in_gloo(pool):
    def fn():
        dist.barrier() if rank() else dist.all_reduce(torch.ones(4))

    fails(pool, fn, "rank 0 waits in torch.distributed.all_reduce", "rank 1 waits in torch.distributed.barrier",
          timeout=0.5)


def test_a_stopped_process(pool):
    def fn():
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        barrier()

    fails(pool, fn, "rank 1 is still running, in code that does not say where", timeout=0.5)


def test_an_unstoppable_function(pool):
    def fn():
        while True:
            try:
                time.sleep(10)
            except BaseException:
                pass

    fails(pool, fn, "ranks 0, 1 did not stop and had to be ended", timeout=0.5)

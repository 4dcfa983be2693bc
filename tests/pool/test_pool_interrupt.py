"""The learner interrupts: one clean KeyboardInterrupt within a second, and a pool that works within another."""

import itertools
import os
import random
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.failing import SOON

from tplab.pool import RankPool, launcher
from tplab.ranks import RankError, all_reduce, rank, state

took = []  # seconds from an interrupt to its end, or from there to the end of the next run


def interrupted(pool, fn, *args, after=0.3):
    pool.run(lambda: state.update(kept=rank()))
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        timer.start()  # in here, for it may strike before `start` has returned
        pool.run(fn, *args)
        time.sleep(10)  # the run was over before the interrupt came
    if args == ():  # else it comes before the ranks are given anything
        assert caught.value._render_traceback_() == ["KeyboardInterrupt: the ranks were stopped; the pool can be used"]
    first = time.monotonic() - begin - after
    timer.join()
    begin = time.monotonic()
    assert pool.run(lambda: float(all_reduce(torch.ones(())))) == [2.0, 2.0]
    took.append(max(first, time.monotonic() - begin))
    assert took[-1] < SOON
    return pool.run(lambda: "kept" in state)


def test_how_soon(pool):
    """The best of some tries, for the machine is busy."""

    def fn():
        if rank() == 0:
            while True:
                pass
        all_reduce(torch.ones(2))

    assert any(interrupted(pool, fn, after=0.05) and took[-1] < 1 for _ in range(8))


def test_while_python_computes(pool):
    def fn():
        while True:
            pass

    assert interrupted(pool, fn) == [True, True]


def test_while_one_rank_waits_in_a_collective(pool):
    def fn():
        if rank() == 0:
            time.sleep(30)
        all_reduce(torch.ones(2))

    assert interrupted(pool, fn) == [True, True]


def test_while_one_rank_waits_in_gloo(pool):
    def fn():
        if rank() == 0:
            time.sleep(30)
        dist.recv(torch.ones(2), 0)

    assert interrupted(pool, fn) == [True, True]


def test_while_all_are_stuck_in_gloo(pool):
    def fn():
        (dist.barrier(async_op=True) if rank() else dist.all_reduce(torch.ones(4), async_op=True)).wait()

    assert interrupted(pool, fn) == [False, False]


def test_while_a_call_in_c_holds_the_interpreter(pool):
    def fn():
        if rank() == 1:
            sum(itertools.repeat(1))

    assert interrupted(pool, fn) == [True, False]


def test_while_dispatching(pool):
    big = torch.zeros(40_000_000)  # packing 160 MB takes longer than any of these delays: 132 ms on a Zen 5
    for after in (0.001, 0.01, 0.03, 0.06):
        assert interrupted(pool, lambda t: t.sum().item(), big, after=after) == [True, True]


def test_at_any_moment_of_short_runs(pool):
    """Interrupts at random moments of a stream of runs: dispatching, waiting, reading, printing, starting again."""
    random.seed(5)

    def fn(i):
        all_reduce(torch.ones(8))
        return i

    for _ in range(12):
        timer = threading.Timer(random.uniform(0, 0.02), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            for i in range(10_000):
                assert pool.run(fn, i) == [i, i]
        except KeyboardInterrupt:
            pass
        finally:
            timer.cancel()
    assert pool.run(fn, 1) == [1, 1]


def test_while_a_dead_rank_is_replaced(pool):
    """Between the end of what belonged to it and its successor's start."""

    class Pipe:
        def __init__(self, pipe):
            self.pipe = pipe

        def __getattr__(self, name):
            return getattr(self.pipe, name)

        def close(self):
            self.pipe.close()
            process.pipe = self.pipe
            raise KeyboardInterrupt

    process = pool._processes[1]
    process.pipe = Pipe(process.pipe)
    os.kill(pool.pids[1], signal.SIGKILL)
    process.child.join()
    with pytest.raises(KeyboardInterrupt):
        pool.run(rank)
    assert pool.run(rank) == [0, 1]


def test_a_second_interrupt_while_the_first_is_handled(pool):
    def fn():
        while True:
            try:
                time.sleep(10)
            except BaseException:
                pass

    timers = [threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)) for after in (0.3, 0.35, 0.5)]
    for timer in timers:
        timer.start()
    while True:  # until all have struck: on a busy machine they are late
        try:
            if not any(timer.is_alive() for timer in timers):
                break
            pool.run(fn, timeout=5)
        except (KeyboardInterrupt, RankError):  # or the last one struck just before the run
            pass
    begin = time.monotonic()
    assert pool.run(rank) == [0, 1]
    assert time.monotonic() - begin < SOON


def test_what_was_printed_is_shown(pool, capsys):
    def fn():
        print("so far")
        while True:
            pass

    interrupted(pool, fn)
    assert capsys.readouterr().out.splitlines() == ["[rank 0] so far", "[rank 1] so far"]


def test_an_interrupt_while_a_rank_starts_makes_it_unwanted(monkeypatch):
    class Interrupted(launcher._Start):
        def start(self):
            tasks.append(self)
            raise KeyboardInterrupt

    tasks = []
    monkeypatch.setattr(launcher, "_Start", Interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        RankPool(2)
    assert tasks[0].unwanted
    assert caught.value._render_traceback_() == ["KeyboardInterrupt: the ranks that were being started were ended"]


def test_an_interrupt_just_after_a_rank_has_started_ends_it(monkeypatch):
    """The thread that started it has looked for an interrupt already, and found none."""
    def interrupted(task):
        launcher._Start.run(task)
        raise KeyboardInterrupt

    calls = []
    process = SimpleNamespace(kill=lambda: calls.append("killed"), join=lambda: calls.append("gone"))
    monkeypatch.setattr(launcher._Start, "_process", lambda task: process)
    monkeypatch.setattr(launcher._Start, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launcher.start(SimpleNamespace(rank=0, close=lambda: None))
    assert calls == ["killed", "gone"]

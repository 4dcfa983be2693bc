"""The learner interrupts: one clean KeyboardInterrupt within a second, and a pool that works within another."""

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from helpers.failing import SOON, light_path

from tplab import RankPool
from tplab.ranks import RankError, all_reduce, rank, state

took = []  # seconds from an interrupt to its end, or from there to the end of the next run


def interrupted(pool, fn, after=0.3, told=True):
    pool.run(lambda: state.update(kept=rank()))
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        timer.start()  # in here, for it may strike before `start` has returned
        pool.run(fn)
        time.sleep(10)  # the run was over before the interrupt came
    if told:  # else it may come before the ranks are given anything
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

    assert any(interrupted(pool, fn, after=0.05, told=False) and took[-1] < 1 for _ in range(8))


def test_while_all_are_stuck_in_gloo(pool):
    def fn():
        (dist.barrier(async_op=True) if rank() else dist.all_reduce(torch.ones(4), async_op=True)).wait()

    assert interrupted(pool, fn) == [False, False]


def test_while_a_call_in_c_holds_the_interpreter(pool):
    def fn():
        if rank() == 1:
            sum(itertools.repeat(1))

    assert interrupted(pool, fn) == [True, False]


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


def test_while_the_thread_that_starts_a_rank_begins(monkeypatch):
    """On a busy machine this takes long, and the rank is started all the same: it must not run on."""
    begin = threading.Thread.start

    def interrupted_start(thread):
        begin(thread)
        if thread.name.startswith("start of rank"):
            raise KeyboardInterrupt

    with RankPool(2) as pool:
        pool.run(rank)
        at_first = len(psutil.Process().children(recursive=True))
        with pytest.raises(RankError):
            pool.run(lambda: os.kill(os.getpid(), signal.SIGKILL) if rank() else None)
        with monkeypatch.context() as patching, pytest.raises(KeyboardInterrupt):
            patching.setattr(threading.Thread, "start", interrupted_start)
            pool.run(rank)
        for thread in threading.enumerate():
            if thread.name.startswith("start of rank"):
                thread.join()
        assert len(psutil.Process().children(recursive=True)) == at_first - 2, "neither of the two ranks"
        assert pool.run(rank) == [0, 1]


def test_what_was_printed_is_shown(pool, capsys):
    def fn():
        print("so far")
        while True:
            pass

    interrupted(pool, fn)
    assert capsys.readouterr().out.splitlines() == ["[rank 0] so far", "[rank 1] so far"]


LONG_START = """
import signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from tplab.pool import RankPool
print("begin", flush=True)
try:
    RankPool(2).run(time.sleep, 60)
except KeyboardInterrupt as error:
    print(*error._render_traceback_(), flush=True)
"""


def servers(process):
    return [child for child in psutil.Process(process.pid).children() if "forkserver" in " ".join(child.cmdline())]


@pytest.mark.skipif(sys.platform != "linux", reason="there is no fork server elsewhere")
@pytest.mark.parametrize("moment", ["the server starts", "the server imports", "the first rank starts"])
def test_ctrl_c_while_ranks_start_gives_one_line(tmp_path, moment):
    """As a terminal sends it: to the whole process group, the fork server among them."""
    process = subprocess.Popen([sys.executable, "-c", LONG_START], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, start_new_session=True, env={
                                   **os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": light_path(tmp_path)})
    assert process.stdout.readline() == "begin\n"
    while not (started := servers(process)):
        time.sleep(0.001)
    while moment == "the server imports" and "libtorch" not in Path(f"/proc/{started[0].pid}/maps").read_text():
        time.sleep(0.001)
    while moment == "the first rank starts" and not started[0].children():
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGINT)
    lines = process.communicate(timeout=300)[0].splitlines()
    assert len(lines) == 1 and lines[0].startswith("KeyboardInterrupt: the ranks ") and process.returncode == 0, lines
    assert [path.name for path in tmp_path.iterdir() if path.name != "light"] == []

"""How long a rank looks for another one before it sleeps: a short while where others want the cores."""

import time
from contextlib import ExitStack

import pytest
import torch

from tplab import RankPool
from tplab.bench.steps import busy_process
from tplab.pool import waiting
from tplab.pool.cores import available_cores
from tplab.pool.waiting import LONG_SPIN, SHORT_SPIN, Contention, SpinBudget
from tplab.ranks import all_reduce, rank
from tplab.ranks.context import current


def test_a_lack_is_felt_over_a_tenth_of_a_second_and_longer_than_it_began(monkeypatch):
    now = [0, 0]
    monkeypatch.setattr(Contention, "_read", lambda self: tuple(now))
    contention = Contention()

    def after(ran, lacked):  # milliseconds
        now[0], now[1] = now[0] + int(ran * 1e6), now[1] + int(lacked * 1e6)
        return contention.measure()

    assert not after(92, 8), "a driver that wakes between steps"
    assert not after(10, 30), "one bad moment: the window is not over"
    assert not after(160, 10)
    assert after(75, 30), "beside a busy process"
    assert after(20, 0), "the window is not over"
    assert after(72, 12), "few looks make the lack smaller"
    assert not after(95, 7)
    assert not after(85, 17), "as much does not begin it"


def test_without_the_kernels_count_there_is_no_lack(monkeypatch):
    def refused(*_):
        raise FileNotFoundError

    monkeypatch.setattr(waiting.os, "open", refused)
    contention = Contention()
    assert not contention.measure() and contention.before == (0, 0)


def looks():
    return current().spin


def test_one_rank_without_a_core_makes_all_look_less():
    def feel(felt):
        here = felt and rank() == 1
        current().contention.measure = lambda: here

    with RankPool(3) as pool:
        for felt, expected in ((True, SHORT_SPIN), (False, LONG_SPIN)):
            pool.run(feel, felt)
            pool.run(looks)  # says it, when others may have asked already
            assert pool.run(looks) == [expected] * 3


def test_a_rank_sleeps_when_its_spin_budget_is_spent(pool):
    """And is woken by the late one."""
    def meet(spin):
        group, x, slept = current(), torch.ones(16), []
        group.spin, sleep = spin, group._sleep
        group._sleep = lambda *where: slept.append(where) or sleep(*where)
        try:
            if rank():
                time.sleep(0.05)
            all_reduce(x)
        finally:
            del group._sleep
        return x[0].item(), bool(slept)

    assert pool.run(meet, SHORT_SPIN) == [(2.0, True), (2.0, False)]
    assert pool.run(meet, SpinBudget(1 << 40, 1 << 40)) == [(2.0, False)] * 2


@pytest.mark.skipif(not Contention().before[0], reason="this system does not count it")
def test_beside_busy_processes_ranks_look_less_until_these_are_gone():
    def compute():
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        return current().spin

    def until(pool, expected):
        limit = time.monotonic() + 60
        while pool.run(compute) != [expected] * pool.size:
            assert time.monotonic() < limit, f"never {expected}"

    with RankPool(2) as pool:
        with ExitStack() as busy:
            for _ in range(2 * available_cores()):
                busy.enter_context(busy_process())
            until(pool, SHORT_SPIN)
        until(pool, LONG_SPIN)

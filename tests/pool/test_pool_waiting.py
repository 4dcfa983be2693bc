"""How long a rank spins for another one before it sleeps: for a short time under contention."""

import time
from contextlib import ExitStack

import pytest

from course.cost.steps import busy_process
from tplab import RankPool
from tplab.pool.cores import available_cores
from tplab.pool.waiting import LONG_SPIN, SHORT_SPIN, Contention
from tplab.ranks import rank
from tplab.ranks.context import current


def test_contention_is_measured_over_a_tenth_of_a_second_and_ends_below_the_share_at_which_it_began(monkeypatch):
    now = [0, 0]
    monkeypatch.setattr(Contention, "_read", lambda self: tuple(now))
    contention = Contention()

    def after(ran, waited):  # milliseconds
        now[0], now[1] = now[0] + int(ran * 1e6), now[1] + int(waited * 1e6)
        return contention.measure()

    assert not after(92, 8), "a driver that wakes between steps"
    assert not after(10, 30), "one bad moment: the window is not over"
    assert not after(160, 10)
    assert after(75, 30), "beside a busy process"
    assert after(20, 0), "the window is not over"
    assert after(72, 12), "short spins leave less contention"
    assert not after(95, 7)
    assert not after(85, 17), "the same share does not begin it"


def budget():
    return current().spin


def test_contention_of_one_rank_shortens_the_spin_budget_of_all():
    def pretend(contention):
        here = contention and rank() == 1
        current().contention.measure = lambda: here

    with RankPool(3) as pool:
        for contention, expected in ((True, SHORT_SPIN), (False, LONG_SPIN)):
            pool.run(pretend, contention)
            pool.run(budget)  # rank 1 may say so after the others have asked
            assert pool.run(budget) == [expected] * 3


@pytest.mark.skipif(not Contention().before[0], reason="this system does not count it")
def test_beside_busy_processes_the_spin_budget_is_short():
    def compute():
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass
        return current().spin

    with RankPool(2) as pool, ExitStack() as busy:
        for _ in range(2 * available_cores()):
            busy.enter_context(busy_process())
        limit = time.monotonic() + 60
        while pool.run(compute) != [SHORT_SPIN] * 2:
            assert time.monotonic() < limit

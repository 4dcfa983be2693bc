"""How long a rank spins for another one before it sleeps: for a short time under contention."""

import time
from contextlib import ExitStack

import pytest

from course.cost.steps import busy_process
from tplab import RankPool
from tplab.pool.waiting import SHORT_SPIN, Contention, available_cores
from tplab.ranks.context import current


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


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 5} if pid == 0 else set(), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert available_cores() == 3
    monkeypatch.delattr("os.sched_getaffinity")
    assert available_cores() == 1
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert available_cores() == 6

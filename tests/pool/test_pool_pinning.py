"""After a pause, compute threads are pinned to a core each for a short time."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tplab.pool import RankPool, available_cores, pinning, worker

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no process chooses its cores here")
EVERYWHERE = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def of_threads():
    """The cores that each thread of this process may use."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            found.append(os.sched_getaffinity(int(task.name)))
    return found


def pinned():
    """The cores to which threads are pinned."""
    return {core for cores in of_threads() if len(cores) == 1 for core in cores}


def unpinned(pool):
    """The cores of each thread once none is pinned any more."""
    def wait():
        while pinned():
            time.sleep(0.001)
        return of_threads()

    return [cores for rank in pool.run(wait) for cores in rank]


def set_times(pause, held=pinning.HELD):
    """On a rank: the length of a pause, and how long threads are pinned after it."""
    worker._PAUSE, pinning.HELD = pause, held


def compute_beside(count):
    """On a rank: so many more threads that compute for it."""
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, name=pinning.COMPUTES, daemon=True).start()


@pytest.mark.skipif(len(EVERYWHERE) < 2, reason="with one core there is nothing to choose")
@pytest.mark.parametrize("ranks, threads", [(2, 1), (1, 2), (3, 1)])
def test_after_a_pause_each_compute_thread_is_pinned_to_a_core_of_its_own_for_a_while(ranks, threads):
    with RankPool(ranks) as pool:
        pool.run(compute_beside, threads - 1)
        pool.run(set_times, 0.001, 1e9)
        time.sleep(0.2)  # a pause
        order = sorted(EVERYWHERE)
        assert pool.run(pinned) == [{order[(rank * threads + n) % len(order)] for n in range(threads)}
                                  for rank in range(ranks)]
    with RankPool(ranks) as pool:
        pool.run(compute_beside, threads - 1)
        pool.run(set_times, 0.001, 0.001)
        time.sleep(0.2)
        pool.run(pinned)
        pool.run(set_times, 1e9)
        assert set(map(frozenset, unpinned(pool))) == {frozenset(EVERYWHERE)}


def test_threads_are_pinned_after_a_pause_and_not_between_two_commands():
    assert worker._PAUSE < pinning.HELD < 1.0
    with RankPool(2) as pool:
        pool.run(set_times, 1e9)
        assert pool.run(pinned) == [set(), set()]


@pytest.mark.skipif(len(EVERYWHERE) < 2, reason="with one core nothing is pinned")
def test_a_thread_that_is_started_meanwhile_is_unpinned_too():
    def start():
        def started():
            seen.append(len(os.sched_getaffinity(0)))
            while os.sched_getaffinity(0) != EVERYWHERE:
                time.sleep(0.001)
            seen.append(len(os.sched_getaffinity(0)))

        seen = []
        child = threading.Thread(target=started)
        child.start()
        child.join()
        return seen

    with RankPool(1) as pool:
        pool.run(set_times, 0.001, 0.3)
        time.sleep(0.2)
        assert pool.run(start) == [[1, len(EVERYWHERE)]]


def test_threads_that_other_code_has_pinned_are_left_alone():
    def bound(core):
        compute_beside(1)
        os.sched_setaffinity(0, [core])  # as a learner does, or GOMP_CPU_AFFINITY with each
        pinning.pin_threads(1)
        return os.sched_getaffinity(0), of_threads()

    core = max(EVERYWHERE)
    with RankPool(1) as pool:
        own, all_of_them = pool.run(bound, core)[0]
        assert own == {core}
        assert len(EVERYWHERE) == 1 or sum(len(cores) == 1 for cores in all_of_them) == 1, "the other was not touched"


def test_a_thread_that_has_ended_need_not_be_unpinned():
    threads = [1 << 22, 0]  # the first is beyond any that the system gives
    before = os.sched_getaffinity(0)
    pinning._release(threads, sorted(before))
    assert os.sched_getaffinity(0) == before


def test_on_systems_without_these_calls_nothing_happens(monkeypatch):
    monkeypatch.setattr(pinning, "_threads", lambda: pytest.fail("no need to look for threads"))
    monkeypatch.setattr(pinning, "libc", object())
    pinning.pin_threads(0)
    monkeypatch.undo()
    monkeypatch.setattr(pinning, "_threads", lambda: pytest.fail("no need to look for threads"))
    monkeypatch.delattr(os, "sched_setaffinity")
    pinning.pin_threads(0)


def test_there_are_as_many_cores_as_this_process_may_use():
    assert available_cores() == len(EVERYWHERE)

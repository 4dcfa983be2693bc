"""After a rest ranks and their threads are held on a core each, and let go."""

import os
import threading
import time
from pathlib import Path

import pytest

from tplab.pool import RankPool, available_cores, pinning, worker

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no process chooses its cores here")
EVERYWHERE = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def of_threads():
    """The cores that each thread of this process may use."""
    return [os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()]


def held():
    """Where threads are held."""
    return {core for cores in of_threads() if len(cores) == 1 for core in cores}


def let_go(pool):
    """Wait for it."""
    def wait():
        while held():
            time.sleep(0.001)
        return of_threads()

    return [cores for rank in pool.run(wait) for cores in rank]


def after_each_rest(rest, held=pinning.HELD):
    """On a rank: how long a rest is."""
    worker._PAUSE, pinning.HELD = rest, held


def compute_beside(count):
    """On a rank: so many more threads that compute for it."""
    for _ in range(count):
        threading.Thread(target=threading.Event().wait, name=pinning.COMPUTES, daemon=True).start()


@pytest.mark.skipif(len(EVERYWHERE) < 2, reason="one core: nobody can be beside it")
@pytest.mark.parametrize("ranks, threads", [(2, 1), (1, 2), (3, 1)])
def test_after_a_rest_everybody_begins_on_a_core_of_its_own_and_goes_on_where_it_likes(ranks, threads):
    with RankPool(ranks) as pool:
        pool.run(compute_beside, threads - 1)
        pool.run(after_each_rest, 0.001, 1e9)
        time.sleep(0.05)  # a rest
        order = sorted(EVERYWHERE)
        assert pool.run(held) == [{order[(rank * threads + n) % len(order)] for n in range(threads)}
                                  for rank in range(ranks)]
    with RankPool(ranks) as pool:
        pool.run(compute_beside, threads - 1)
        pool.run(after_each_rest, 0.001, 0.001)
        time.sleep(0.05)
        pool.run(held)
        pool.run(after_each_rest, 1e9)
        assert set(map(frozenset, let_go(pool))) == {frozenset(EVERYWHERE)}


def test_a_pause_is_a_rest_and_commands_one_after_the_other_are_none():
    assert worker._PAUSE < pinning.HELD < 1.0
    with RankPool(2) as pool:
        pool.run(after_each_rest, 1e9)
        assert pool.run(held) == [set(), set()]


@pytest.mark.skipif(len(EVERYWHERE) < 2, reason="one core: nobody is held there")
def test_a_thread_that_is_born_meanwhile_is_let_go_too():
    def bear():
        def born():
            seen.append(len(os.sched_getaffinity(0)))
            while os.sched_getaffinity(0) != EVERYWHERE:
                time.sleep(0.001)
            seen.append(len(os.sched_getaffinity(0)))

        seen = []
        child = threading.Thread(target=born)
        child.start()
        child.join()
        return seen

    with RankPool(1) as pool:
        pool.run(after_each_rest, 0.001, 0.3)
        time.sleep(0.05)
        assert pool.run(bear) == [[1, len(EVERYWHERE)]]


def test_threads_that_were_given_their_cores_keep_them():
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


def test_who_has_gone_need_not_be_let_go():
    threads = [1 << 22, 0]  # the first is beyond any that the system gives
    before = os.sched_getaffinity(0)
    pinning._release(threads, sorted(before))
    assert os.sched_getaffinity(0) == before


def test_where_no_process_chooses_its_cores_nothing_happens(monkeypatch):
    monkeypatch.setattr(pinning, "_threads", lambda: pytest.fail("nobody needs to be asked"))
    monkeypatch.setattr(pinning, "libc", object())
    pinning.pin_threads(0)
    monkeypatch.undo()
    monkeypatch.setattr(pinning, "_threads", lambda: pytest.fail("nobody needs to be asked"))
    monkeypatch.delattr(os, "sched_setaffinity")
    pinning.pin_threads(0)


def test_there_are_as_many_cores_as_this_process_may_use():
    assert available_cores() == len(EVERYWHERE)

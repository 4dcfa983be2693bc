"""RankPool: results, output, errors and the cost of a round trip, on real processes."""

import ctypes
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

from tplab.pool import RankPool, shared_pool
from tplab.ranks import RankError, all_reduce, rank, state


def test_results_come_in_rank_order(pool):
    assert pool.run(lambda: rank()) == [0, 1]


def test_sum_is_over_all_ranks(pool):
    def total():
        return all_reduce(torch.full((3,), float(rank() + 1))).tolist()

    assert pool.run(total) == [[3.0] * 3] * 2


def test_state_lives_between_runs(pool):
    pool.run(lambda: state.update(seen=rank()))
    assert pool.run(lambda: state["seen"]) == [0, 1]


def test_output_is_shown_by_the_parent_in_rank_order(pool, capsys):
    pool.run(lambda: print("hello\nfrom", rank()))
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] hello", "[rank 0] from 0", "[rank 1] hello", "[rank 1] from 1",
    ]  # fmt: skip


def test_an_exception_names_rank_and_line_and_leaves_the_pool_usable(pool):
    def fail():
        if rank() == 1:
            raise ValueError("not this one")
        all_reduce(torch.ones(4))

    with pytest.raises(RankError, match="rank 1 raised ValueError: not this one") as caught:
        pool.run(fail)
    assert 'raise ValueError("not this one")' in str(caught.value)
    assert caught.value.causes[0].consequence
    assert pool.run(lambda: rank()) == [0, 1]


def test_round_trip_with_a_small_all_reduce_is_short(pool):
    def step():
        return float(all_reduce(torch.ones(1024))[0])

    times = []
    for _ in range(100):
        begin = time.perf_counter()
        pool.run(step)
        times.append(time.perf_counter() - begin)
    assert sorted(times)[50] < 0.1, "over sockets it would be worse; on a quiet machine it is a millisecond"


def test_a_pool_has_its_own_timeout():
    with RankPool(1, timeout=0.2) as own, pytest.raises(RankError, match="^not finished after 0.2 s"):
        own.run(lambda: time.sleep(30))


@pytest.mark.parametrize("size", [True, 0, 65, 2.0, "2", None, [], 10**5000], ids=lambda size: type(size).__name__)
def test_a_size_that_no_pool_has(size):
    for make in (RankPool, shared_pool):
        with pytest.raises(RankError, match="a pool has 1 to 64 ranks, not"):
            make(size)


@pytest.mark.parametrize("timeout", [True, 0, -1, float("nan"), 10**400, 10**5000, "5", [], 1j],
                         ids=lambda t: type(t).__name__)
def test_a_timeout_that_is_no_time(pool, timeout):
    for call in (lambda: pool.run(rank, timeout=timeout), lambda: RankPool(1, timeout=timeout)):
        with pytest.raises(RankError, match="timeout is a number of seconds above 0, not"):
            call()


@pytest.mark.parametrize("timeout", [np.int64(30), np.float32(30), Fraction(61, 2), float("inf")], ids=str)
def test_a_timeout_of_another_kind_of_number(pool, timeout):
    assert pool.run(rank, timeout=timeout) == [0, 1]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc's memory")
def test_a_rank_keeps_the_memory_of_its_activations():
    """What is mapped piece by piece goes back to the system at once, and comes again with a fault for each page."""

    def on_the_heap(size):
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.argtypes = [ctypes.c_void_p]
        address = libc.malloc(size)
        with open("/proc/self/maps") as maps:
            heap = [line.split()[0].split("-") for line in maps if line.rstrip().endswith("[heap]")]
        libc.free(address)
        return any(int(start, 16) <= address < int(end, 16) for start, end in heap)  # two: before the fork, and since

    with RankPool(1) as fresh:
        assert fresh.run(on_the_heap, 31 << 20) == [True]
        assert fresh.run(on_the_heap, 33 << 20) == [False], "and weights do go back"

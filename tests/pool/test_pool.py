"""RankPool: results, output and refusals, on real processes."""

import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
from helpers.failing import light_path

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


def test_a_pool_has_its_own_timeout():
    with RankPool(1, timeout=0.2) as pool, pytest.raises(RankError, match="^not finished after 0.2 s"):
        pool.run(lambda: time.sleep(30))


@pytest.mark.parametrize("size", [True, 0, 65, 2.0, "2", None], ids=repr)
def test_a_size_that_no_pool_has(size):
    for make in (RankPool, shared_pool):
        with pytest.raises(RankError, match="a pool has 1 to 64 ranks, not"):
            make(size)


def test_freed_memory_goes_back_to_the_system(pool):
    def fn():
        pieces = [b"x" * 100_000 for _ in range(5000)]
        state["last"] = pieces[-1]  # glibc by itself gives back only what is free behind it
        time.sleep(0.1)

    before = pool.run(lambda: psutil.Process().memory_info().rss)
    pool.run(fn)
    after = pool.run(lambda: (state.pop("last"), psutil.Process().memory_info().rss)[1])
    assert all(now - then < 250e6 for then, now in zip(before, after)), (before, after)


@pytest.mark.parametrize("timeout", [True, 0, -1, float("nan"), "5", []], ids=repr)
def test_a_timeout_that_is_no_time(pool, timeout):
    for call in (lambda: pool.run(rank, timeout=timeout), lambda: RankPool(1, timeout=timeout)):
        with pytest.raises(RankError, match="timeout is a number of seconds above 0, not"):
            call()


def test_threads_of_a_rank_spin_for_a_short_time(tmp_path):
    code = ("import os, torch; from tplab.pool import RankPool\nwith RankPool(1) as pool: print(pool.run(lambda: ("
            "os.environ['OPENBLAS_NUM_THREADS'], os.environ['GOMP_SPINCOUNT'], torch.get_num_threads())))")
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=env | {
        "PYTHONPATH": light_path(tmp_path), "OMP_NUM_THREADS": "2"})
    assert run.stdout == "[('1', '1000', 2)]\n", run.stderr

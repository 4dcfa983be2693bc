"""RankPool: results, output and refusals, on real processes."""

import os
import subprocess
import sys
import time
from fractions import Fraction

import numpy as np
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


def test_output_is_shown_by_the_parent_in_rank_order(pool, capsys):
    pool.run(lambda: print("hello\nfrom", rank()))
    assert capsys.readouterr().out.splitlines() == [
        "[rank 0] hello", "[rank 0] from 0", "[rank 1] hello", "[rank 1] from 1",
    ]  # fmt: skip


def test_a_pool_has_its_own_timeout():
    with RankPool(1, timeout=0.2) as pool, pytest.raises(RankError, match="^not finished after 0.2 s"):
        pool.run(lambda: time.sleep(30))


@pytest.mark.parametrize("size", [True, 0, 65, 2.0, "2", None], ids=repr)
def test_a_size_that_no_pool_has(size):
    for make in (RankPool, shared_pool):
        with pytest.raises(RankError, match="a pool has 1 to 64 ranks, not"):
            make(size)


@pytest.mark.parametrize("timeout", [True, 0, -1, float("nan"), "5", []], ids=repr)
def test_a_timeout_that_is_no_time(pool, timeout):
    for call in (lambda: pool.run(rank, timeout=timeout), lambda: RankPool(1, timeout=timeout)):
        with pytest.raises(RankError, match="timeout is a number of seconds above 0, not"):
            call()


@pytest.mark.parametrize("timeout", [np.int64(30), np.float32(30), Fraction(61, 2), float("inf")], ids=str)
def test_a_timeout_of_another_kind_of_number(pool, timeout):
    assert pool.run(rank, timeout=timeout) == [0, 1]


@pytest.mark.parametrize("spins, expected", [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")], ids=str)
def test_threads_of_a_rank_spin_for_a_short_time_unless_the_environment_says_otherwise(tmp_path, spins, expected):
    code = ("import os, torch; from tplab.pool import RankPool\nwith RankPool(1) as pool: print(pool.run(lambda: ("
            "os.environ['OPENBLAS_NUM_THREADS'], os.environ['GOMP_SPINCOUNT'], torch.get_num_threads())))")
    env = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=env | spins | {
        "PYTHONPATH": light_path(tmp_path), "OMP_NUM_THREADS": "2"})
    assert run.stdout == f"[('1', '{expected}', 2)]\n", run.stderr

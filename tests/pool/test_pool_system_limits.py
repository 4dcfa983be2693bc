"""A system that does not let a pool start: one sentence that names the limit and what raises it."""

import math
import os
import resource
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from helpers.failing import light_path

from tplab.pool import RankPool, system_limits
from tplab.pool.rank_process import threads_per_rank
from tplab.ranks import RankError, rank


def test_too_few_open_files_are_said_and_the_pools_that_run_go_on():
    with RankPool(2) as pool:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for more in (2, 8, 14, 25):
            resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + more, hard))
            try:
                with pytest.raises(RankError, match="^a pool of 2 needs about 26 more open files, .* raise the limit"):
                    RankPool(2)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert pool.run(rank) == [0, 1]


def test_as_many_open_files_as_are_said_are_enough(tmp_path):
    """Also where a fork server has to be started, as in a process of its own."""
    code = """
import psutil, resource
from tplab.pool import RankPool
used, (_, hard) = psutil.Process().num_fds(), resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 26, hard))
with RankPool(2) as pool:
    print(pool.run(len, "abc"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100,
                          env={**os.environ, "PYTHONPATH": light_path(tmp_path)})
    assert done.stdout == "[3, 3]\n", done.stderr


@pytest.mark.parametrize("room, words", [
    ((5, 17), "13 more processes and threads, but this user has 5 of the 17 that"), ((5, 18), "None")])
def test_too_few_threads_are_said(room, words, monkeypatch):
    monkeypatch.setattr(system_limits, "_room", lambda limit, count: room)
    assert words in str(system_limits.too_few_threads(2))


def test_a_pool_that_does_not_start_says_why_where_it_is_known(monkeypatch):
    def refused(spec):
        raise RankError("Resource temporarily unavailable")

    monkeypatch.setattr("tplab.pool.launcher.start", refused)
    for known, said in (("the reason", "the reason"), (None, "Resource temporarily unavailable")):
        monkeypatch.setattr("tplab.pool.pool.too_few_threads", lambda size, known=known: known)
        with pytest.raises(RankError, match=f"^{said}$"):
            RankPool(2)


def test_what_is_counted(monkeypatch):
    mine = psutil.Process()
    assert system_limits._open_files() == mine.num_fds() and system_limits._loopback_is_up()
    others = [SimpleNamespace(info={"uids": SimpleNamespace(real=uid), "num_threads": threads})
              for uid, threads in ((7, 3), (8, 100), (7, None), (7, 2))]
    others.append(SimpleNamespace(info={"uids": None, "num_threads": None}))  # has just ended
    monkeypatch.setattr(psutil, "process_iter", lambda names: others)
    monkeypatch.setattr("os.getuid", lambda: 7)
    assert system_limits._threads_of_user() == 5
    monkeypatch.setattr("os.getuid", lambda: 0)
    assert system_limits._threads_of_user() == 0
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY, 9))
    assert system_limits._room(resource.RLIMIT_NOFILE, pytest.fail) == (0, math.inf)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (9, 10))
    assert system_limits._room(resource.RLIMIT_NOFILE, lambda: 4) == (4, 9)


def test_more_threads_than_a_rank_can_have_are_refused_before_any_process_starts(monkeypatch):
    for asked in ("1025", "99999999999"):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        with pytest.raises(RankError, match=f"^OMP_NUM_THREADS is {asked}; a rank has 1 to 1024 threads"):
            RankPool(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "1024")
    assert threads_per_rank(2) == 1024

"""What the ranks' libraries find in the environment when they are loaded."""

import gc
import os
import runpy
import signal
from pathlib import Path

import pytest

from tplab import RankPool, pool

FILE = Path(pool.__file__).with_name("before_imports.py")  # importing it would do to this process what it does to ranks


@pytest.mark.parametrize("given, found", [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"),
                                          ({"OMP_WAIT_POLICY": "active"}, None)])
def test_threads_look_a_thousand_times_and_sleep_unless_the_environment_says_otherwise(given, found, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever is done to it
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        runpy.run_path(str(FILE))
        assert not gc.isenabled() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, interrupt)
    assert os.environ.get("GOMP_SPINCOUNT") == found and os.environ["OPENBLAS_NUM_THREADS"] == "1"


def test_a_rank_has_it_from_the_fork_server():
    with RankPool(1) as ranks:
        told = ranks.run(lambda: (os.environ["OPENBLAS_NUM_THREADS"], os.environ.get("GOMP_SPINCOUNT")))
    assert told == [("1", os.environ.get("GOMP_SPINCOUNT", None if "OMP_WAIT_POLICY" in os.environ else "1000"))]

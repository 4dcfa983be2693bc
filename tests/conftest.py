"""What every test of the house shares: one thread per process, no hub, one way to ask for the real model."""

import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

# Before torch or transformers is imported by any test: two ranks with two threads each on two cores run nearly
# three times slower than with one each, and no unit test may depend on a network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# What the tests solve must not stand in the user's own progress.
os.environ["TPLAB_PROGRESS"] = os.path.join(tempfile.mkdtemp(prefix="tplab-tests-"), "progress.json")

import hypothesis
import pytest

from tplab.pool.capture import libc

ROOT = Path(__file__).resolve().parent.parent
PROGRESS = Path(os.environ["TPLAB_PROGRESS"]).parent

# A job in a script's background ignores Ctrl-C; tests that press it begin where a terminal's would.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What is imported and collected stays: garbage collection need not search it, now or later
# (`pytest_collection_finish`).
gc.disable()

# A file's tests stay with one worker: begun last, these would leave the others idle at the end.
LONG = {"test_align_sweep", "test_cli", "test_diagnose", "test_exercises", "test_fast_compiled", "test_faults_wing",
        "test_notebooks", "test_patient_zero"}

# A deadline per example measures how busy the machine is, not whether the code is right.
hypothesis.settings.register_profile("tplab", deadline=None)
hypothesis.settings.load_profile("tplab")


def pytest_addoption(parser):
    parser.addoption("--browser", action="store_true", help="collect tests/browser as well, which needs a Chromium")
    parser.addoption("--all-cases", action="store_true", help="all cases of products that are tested by turns")


def pytest_configure(config):
    from helpers import turns

    turns.ALL = config.getoption("--all-cases")


def pytest_ignore_collect(collection_path, config):
    """Without ``--browser`` its tests are not there: what they import is an extra."""
    return True if collection_path.name == "browser" and not config.getoption("--browser") else None


def pytest_unconfigure():
    shutil.rmtree(PROGRESS, ignore_errors=True)


def pytest_collection_modifyitems(items):
    """Mark what uses the fixtures `pool` and `smollm2`, and all of tests/pool. Files that take a minute come first."""
    items.sort(key=lambda item: item.path.stem not in LONG)
    for item in items:
        used = {item.path.parent.name, *getattr(item, "fixturenames", ())}
        for name in used & {"pool", "smollm2"}:
            item.add_marker(name)


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(10_000)  # a tenth as often
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _freed_memory_goes_back():
    """To the system, after the file that used it: glibc would keep what a large model took."""
    yield
    gc.collect()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


@pytest.fixture(scope="session")
def root():
    """The repository's own folder."""
    return ROOT


@pytest.fixture
def pool():
    """Two ranks for tests that neither end nor change them."""
    from tplab import shared_pool

    return shared_pool(2)


@pytest.fixture(scope="session")
def smollm2():
    """The real model's checkpoint; skipped where it was never fetched, except in CI, where it must be there."""
    from tplab.checkpoint import CheckpointError, open_checkpoint

    try:
        return open_checkpoint("smollm2")
    except CheckpointError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI must fetch smollm2 first: {error}")
        pytest.skip(f"smollm2 is not at hand: {error}")

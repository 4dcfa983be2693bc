"""JupyterLab as ``launch`` starts it, on a copy of the notebooks, in a headless browser, without a user's settings.

Asked for by ``./launch test --browser`` (``pytest --browser tests/browser``); skipped where no Chromium is found.
"""

import os
import shutil
from pathlib import Path

import pytest
from helpers.lab_server import Server
from helpers.lab_window import Window

from course.lab import testing
from course.lab.working_copy import without_outputs

ROOT = Path(__file__).resolve().parents[2]
# A cell of each kind that a person plays with, and the numbers of the processes behind it.
CELLS = ["from course import lesson\nlesson.panel(['nan_mask', 'no_mask'], ticked=['nan_mask'])",
         "from tplab.pool import shared_pool\npool = shared_pool(2)\nprint('ranks', *pool.pids)",
         "import time\nprint('now it waits')\npool.run(time.sleep, 600)"]


@pytest.fixture(scope="session")
def chromium():
    """A headless browser of the machine's own."""
    found = testing.browser()
    if not found:
        pytest.skip(testing.NO_BROWSER)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        # As root, which in a container is often the only user, Chromium starts without its sandbox only.
        options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = play.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The :class:`Server` of most tests; when it ends, none of its processes is left."""
    place = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", place / "notebooks")
    (place / "run_all.ipynb").write_bytes(without_outputs(ROOT / "notebooks/00_start_here.ipynb"))
    running = Server(place, CELLS)
    yield running
    left = running.end(running.process.terminate)
    assert not left, f"{left} lived on without the server"


@pytest.fixture
def own_server(tmp_path):
    """One that a test may end."""
    running = Server(tmp_path, CELLS)
    yield running
    running.end(running.process.kill)


@pytest.fixture
def window(chromium, server):
    """JupyterLab in a window of 1400 pixels; see :class:`Window`."""
    window = Window(chromium, server)
    yield window
    window.close()

"""JupyterLab as ``launch`` starts it, on a copy of the notebooks, in a headless browser; nobody's settings or trust.

Asked for by ``./launch test --browser`` (``pytest --browser tests/browser``); skipped where no Chromium is found.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from helpers.lab_window import Window, wait_for
from helpers.launching import command_of_launch

ROOT = Path(__file__).resolve().parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# A cell of each kind that a person plays with, and the numbers of the processes behind it.
CELLS = ["from tplab import lesson\nlesson.panel(['nan_mask', 'no_mask'], ticked=['nan_mask'])",
         "from tplab import LLM, show\nwith LLM('fable', tensor_parallel_size=2) as llm:\n"
         "    run = show.record(llm, [[1, 2, 3, 4, 5], [6, 7, 8]])\nshow.block_stepper(run, step=2)",
         "from tplab.pool import shared_pool\npool = shared_pool(2)\nprint('ranks', *pool.pids)",
         "import time\nprint('now it waits')\npool.run(time.sleep, 600)"]


@pytest.fixture(scope="session")
def chromium():
    """A headless browser of the machine's own."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not found:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed (Debian: apt install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        # As root, which in a container is often the only user, Chromium starts without its sandbox only.
        options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        browser = play.chromium.launch(executable_path=found, args=options)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """``(address, token, folder)`` of a JupyterLab; when it ends, none of its processes is left."""
    place = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", place / "notebooks")
    shutil.copy(ROOT / "notebooks/00_start_here.ipynb", place / "run_all.ipynb")
    cells = [{"cell_type": "code", "id": f"cell{at}", "metadata": {}, "execution_count": None, "outputs": [],
              "source": source} for at, source in enumerate(CELLS)]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    (place / "played.ipynb").write_text(json.dumps(
        {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
    own = {name: str(place / name.lower()) for name in (
        "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTERLAB_SETTINGS_DIR",
        "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR", "TPLAB_PROGRESS")}
    command = [sys.executable, *command_of_launch(place),
               "--LabApp.expose_app_in_browser=True"]  # its commands, which menus and buttons call, by their names
    with open(place / "words", "w") as words:
        running = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, cwd=place,
                                   env={**os.environ, **own, "OMP_NUM_THREADS": "1"})
    try:
        told = wait_for(lambda: running.poll() or re.search(r"(http://127\.0\.0\.1:\d+)/lab\S*\?token=(\w+)",
                                          (place / "words").read_text()), 90)
        yield told[1], told[2], place
    finally:
        family = [psutil.Process(running.pid), *psutil.Process(running.pid).children(recursive=True)]
        running.terminate()
        _, left = psutil.wait_procs(family, 20)
        for one in left:
            one.kill()
    assert not left, f"{left} lived on without the server"


@pytest.fixture
def window(chromium, server):
    """JupyterLab in a window of 1400 pixels; see :class:`Window`."""
    window = Window(chromium, *server)
    yield window
    window.close()

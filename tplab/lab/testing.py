"""``./launch test``: the unit tests, and beside them every notebook, solved and against its stored text.

Some of them want the real model, smollm2: it is fetched first, once.

With ``--browser``, instead, tests/browser: JupyterLab and the report as a person sees them.

Two lanes, because most tests wait for processes to start: on two cores they take little more than half of the time of
one after the other. Each lane takes the next part when its last one is done, so both end at about the same time. The
first lane's output is shown as it comes, the other's between two parts of the first; pytest's closing lines come last.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from pytest import ExitCode

from tplab.checkpoint import CheckpointError, fetch
from tplab.files import replace_unprintable

ROOT = Path(__file__).resolve().parents[2]
SOLVED = "tests/test_notebooks.py"
# Taken by whichever lane is free. Each begins by importing torch and transformers, so there are few.
APART = {"unit tests of align": ["tests/align"], "unit tests of the exercises": ["tests/lesson"]}
# What is compiled for a processor is tested in three forms: for this one, held to AVX2 as on an older one, and off.
OFF = ["TPLAB_FAST=0"]
AVX2 = ["NUMBA_CPU_NAME=haswell", "NUMBA_CPU_FEATURES=+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,+fma,"
        "+f16c,+bmi,+bmi2,+lzcnt,+movbe", "ATEN_CPU_CAPABILITY=avx2", "ONEDNN_MAX_CPU_ISA=AVX2",
        "MKL_ENABLE_INSTRUCTIONS=AVX2"]
# The first lane takes them from the front, the second from the back: the longest of each first.
PARTS = {"unit tests": ["tests", *(f"--ignore={path}" for path in [SOLVED, *sum(APART.values(), [])])],
         **APART,
         "engine, held to AVX2": [*AVX2, "tests/fast", "tests/engine",
                                  "--ignore=tests/fast/test_fast_compiled.py"],  # which asks for another processor, too
         "engine, with the fast path off": [*OFF, "tests/engine", "tests/llm"],
         "notebooks against their stored text": ["--nbval", "notebooks"],
         "notebooks with their solutions": [SOLVED]}


def pytest_command(options: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *options]


def run_part(options: list[str], show: Callable[[str], object] = lambda line: None) -> tuple[int, str]:
    """Pytest's exit code and its output, of which ``show`` gets each line as it comes.

    Options that begin like ``NAME=value`` are for the environment.
    """
    settings = [option for option in options if re.match("[A-Z0-9_]+=", option)]
    # Two lanes on two cores: with two threads each, what the ranks' results are compared with is computed on threads
    # that wait for each other most of the time.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **dict(setting.split("=", 1) for setting in settings)}
    # Hundreds of processes start from this folder; without bytecode each would compile what it imports again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ["--color=yes"] * sys.stdout.isatty() + options[len(settings):]
    lines = []
    with subprocess.Popen(pytest_command(options), cwd=ROOT, env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace") as running:
        for line in running.stdout:
            lines.append(line)
            show(line)
    return running.returncode, "".join(lines)


def waiting_part(take: Callable[[], str]) -> str | None:
    """What ``take`` hands out; None if nothing waits any more, for the other lane may have taken the last."""
    try:
        return take()
    except IndexError:
        return None


def second_lane(waiting: deque, done: deque) -> None:
    """Run one part after the other, from the last; each goes into ``done`` as ``(part, exit code, output)``."""
    while part := waiting_part(waiting.pop):
        code, output = run_part(PARTS[part])
        done.append((part, code, output))
        if code == ExitCode.INTERRUPTED:
            waiting.clear()


BROWSERS = ("chromium", "chromium-browser", "google-chrome")
NO_BROWSER = f"skipped: no browser, none of {', '.join(BROWSERS)} is installed (Debian: apt install chromium)"


def browser() -> str | None:
    """Where the machine's own browser is."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def in_a_browser() -> int:
    """Pytest's exit code for tests/browser, after what they need was installed, once; 0 where no browser is."""
    if not browser():
        print(f"launch test --browser: {NO_BROWSER}")
        return 0
    if not find_spec("axe_playwright_python"):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", *project["optional-dependencies"]["browser"]]
        if code := subprocess.call(pip):
            return code
    return subprocess.call(pytest_command(["--browser", "tests/browser"]), cwd=ROOT)


def fetch_smollm2() -> None:
    """The model that unit tests skip without, and that notebook 06's stored text shows; its absence ends nothing."""
    try:
        fetch("smollm2")
    except CheckpointError as error:
        print(f"launch test: smollm2 is missing, so tests are skipped and notebook 06 fails: {error}", flush=True)


def main() -> str | None:
    """What failed, in one sentence; None if nothing did. Every part is run, whatever came of the others."""
    fetch_smollm2()
    waiting, done, ended = deque(PARTS), deque(), {}

    def show_done():
        while done:
            part, *ended[part] = done.popleft()
            print(f"launch test: {part}\n{ended[part][1]}", flush=True)

    with ThreadPoolExecutor(1) as beside:
        second = beside.submit(second_lane, waiting, done)
        try:
            while part := waiting_part(waiting.popleft):
                print(f"launch test: {part}", flush=True)
                ended[part] = run_part(PARTS[part], partial(print, end="", flush=True))
                show_done()
        finally:
            waiting.clear()  # after an interrupt the second lane begins nothing more
    second.result()
    show_done()
    for part, (_, output) in ended.items():
        print(f"launch test: {part}", *output.splitlines()[-1:], sep="\n", flush=True)
    failed = [f"{part} (pytest's exit code {code})" for part, (code, _) in ended.items() if code]
    return f"launch test: failed: {', '.join(failed)}" if failed else None


if __name__ == "__main__":
    replace_unprintable()
    try:
        sys.exit(in_a_browser() if "--browser" in sys.argv[1:] else main())
    except KeyboardInterrupt:
        sys.exit(130)

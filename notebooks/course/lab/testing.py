"""``./launch test``: the unit tests, and every notebook against its stored text.

Some of them want the real model, smollm2: it is fetched first, once.

With ``--forms``, instead, the engine's tests once more: held to AVX2 as on an older processor, and with the fast path
off. With ``--forms all``, also every notebook's stored text, in these two forms and with two threads. With
``--browser``, instead, tests/browser: JupyterLab and the report as a person sees them.

Three or four workers (pytest-xdist), because many tests wait for processes to start: on two cores they take little more
than half of the time of one after the other. The tests of one file stay with one worker, for they share what is set up.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

from pytest import ExitCode

from tplab.checkpoint import CheckpointError, fetch
from tplab.pool import available_cores

ROOT = Path(__file__).resolve().parents[3]
PYTEST = [sys.executable, "-m", "pytest"]
OFF = {"TPLAB_FAST": "0"}
# In a notebook's own process and on each rank; where one thread waits for the other it leaves its core.
TWO_THREADS = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
AVX2 = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+avx,+avx2,"
        "+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
# Compiled code runs on a pool; threads and torchrun's ranks use the reference. Of tests/engine, one test has a pool.
ON_A_POOL = "tests/engine/test_engine_draft.py::test_on_real_ranks_and_the_fast_path"
NBVAL = ["--nbval", *sorted(f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb"))]
# Of each part: its settings of the environment, and what pytest is told.
PARTS = {"unit tests and notebooks with their solutions": ({}, ["--no-loadscope-reorder", "-p", "no:nbval", "tests"]),
         "notebooks against their stored text": ({}, NBVAL)}
FORMS = {"engine, held to AVX2": (AVX2, ["tests/fast", "tests/invariant/test_invariant_sums.py", ON_A_POOL,
                                         "--ignore=tests/fast/test_fast_compiled.py"]),  # that file has its own forms
         "engine, with the fast path off": (OFF, ["tests/llm/test_llm_processes.py", ON_A_POOL])}


def notebooks_in_forms() -> dict[str, tuple[dict, list[str]]]:
    """Parts like ``PARTS``: every notebook in each form."""
    forms = {"held to AVX2": AVX2, "with the fast path off": OFF, "with two threads": TWO_THREADS}
    return {f"notebooks, {form}": (settings, NBVAL) for form, settings in forms.items()}


def run_part(settings: dict[str, str], options: list[str]) -> int:
    """Pytest's exit code."""
    # Three workers on two cores: with two threads each, what the ranks' results are compared with is computed on
    # threads that wait for each other most of the time.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, **settings}
    # Hundreds of processes start from this folder; without bytecode each would compile what it imports again.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    workers = str(max(3, min(4, available_cores() // 2)))  # each has models and ranks of its own in memory
    return subprocess.call([*PYTEST, "--numprocesses", workers, "--dist", "loadfile", *options], cwd=ROOT,
                           env=environment)


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
    return subprocess.call([*PYTEST, "--browser", "tests/browser"], cwd=ROOT)


def fetch_smollm2() -> None:
    """Fetch the model without which unit tests are skipped and notebook 06 fails; if it cannot be fetched, go on."""
    try:
        fetch("smollm2")
    except CheckpointError as error:
        print(f"launch test: smollm2 is missing, so tests are skipped and notebook 06 fails: {error}", flush=True)


def main(parts: dict[str, tuple[dict, list[str]]] = PARTS) -> str | None:
    """What failed, in one sentence; None if nothing did. Every part is run, also after another one has failed."""
    fetch_smollm2()
    failed = []
    for part, (settings, options) in parts.items():
        print(f"launch test: {part}", flush=True)
        if code := run_part(settings, options):
            failed.append(f"{part} (pytest's exit code {code})")
        if code == ExitCode.INTERRUPTED:
            break
    return f"launch test: failed: {', '.join(failed)}" if failed else None


if __name__ == "__main__":
    try:
        forms = FORMS | (notebooks_in_forms() if "all" in sys.argv[1:] else {})
        sys.exit(in_a_browser() if "--browser" in sys.argv[1:] else main(forms if "--forms" in sys.argv[1:] else PARTS))
    except KeyboardInterrupt:
        sys.exit(130)

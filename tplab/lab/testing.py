"""``./launch test``: the unit tests, and beside them every notebook, solved and against its stored text.

With ``--browser``, instead, tests/browser: JupyterLab and the report as a person sees them.

Two lanes, because most tests wait for processes to start: on two cores they take little more than half of the time of
one after the other. The first lane's output is shown as it comes, the other's when it is complete.
"""

import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from pytest import ExitCode

ROOT = Path(__file__).resolve().parents[2]
SOLVED = "tests/test_notebooks.py"
UNITS = {"unit tests": ["tests", f"--ignore={SOLVED}"]}
NOTEBOOKS = {"notebooks with their solutions": [SOLVED],
             "notebooks against their stored text": ["--nbval", "notebooks"]}


def pytest_command(options: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *options]


def notebook_lane() -> dict[str, tuple[int, str]]:
    """``{part: (pytest's exit code, its output)}``, one part after the other until one is interrupted."""
    done = {}
    for part, options in NOTEBOOKS.items():
        run = subprocess.run(pytest_command(options), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             text=True, errors="replace")
        done[part] = run.returncode, run.stdout
        if run.returncode == ExitCode.INTERRUPTED:
            break
    return done


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


def main() -> str | None:
    """What failed, in one sentence; None if nothing did. Every part is run, whatever came of the others."""
    with ThreadPoolExecutor(1) as beside:
        notebooks = beside.submit(notebook_lane)
        codes = {}
        for part, options in UNITS.items():
            print(f"launch test: {part}", flush=True)
            codes[part] = subprocess.call(pytest_command(options), cwd=ROOT)
        for part, (code, output) in notebooks.result().items():
            print(f"launch test: {part}\n{output}", flush=True)
            codes[part] = code
    failed = [f"{part} (pytest's exit code {code})" for part, code in codes.items() if code]
    return f"launch test: failed: {', '.join(failed)}" if failed else None


if __name__ == "__main__":
    try:
        sys.exit(in_a_browser() if "--browser" in sys.argv[1:] else main())
    except KeyboardInterrupt:
        sys.exit(130)

"""``launch test``: the parts of the tests, the environment of each, and what came of them."""

import runpy
import sys
from pathlib import Path

import pytest

from course.lab import testing

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def fetched(monkeypatch):
    """The models that were asked for, instead of fetching them."""
    names = []
    monkeypatch.setattr(testing, "fetch", names.append)
    return names


@pytest.mark.parametrize("broken", [(), *((part,) for part in testing.PARTS), tuple(testing.PARTS)])
def test_all_parts_of_the_tests_always_run_and_each_can_fail_them(monkeypatch, capsys, broken):
    ran = []

    def run_part(*given):
        ran.extend(name for name, its in testing.PARTS.items() if its == given)
        return 5 * (ran[-1] in broken)

    monkeypatch.setattr(testing, "run_part", run_part)
    failed = testing.main() or ""
    assert {part for part in testing.PARTS if f"{part} (pytest's exit code 5)" in failed} == set(broken)
    assert ran == list(testing.PARTS)
    assert capsys.readouterr().out.splitlines() == [f"launch test: {part}" for part in ran]


def test_every_file_of_tests_is_run_and_the_engines_in_each_form():
    (_, tests), (_, notebooks) = testing.PARTS.values()
    assert tests[-1] == "tests" and not any(word.startswith("--ignore") for word in tests) and "--nbval" in notebooks
    files = [path for path in notebooks if path.startswith("notebooks/")]
    assert sorted(files) == sorted(f"notebooks/{path.name}" for path in ROOT.glob("notebooks/*.ipynb"))
    assert [settings for settings, _ in testing.FORMS.values()] == [testing.AVX2, testing.OFF]
    parts = (testing.PARTS | testing.FORMS).values()
    paths = [path.removeprefix("--ignore=").split("::") for _, options in parts for path in options]
    assert all((ROOT / file).exists() for file, *_ in paths if file.split("/")[0] in ("tests", "notebooks"))
    assert all(f"def {name}(" in (ROOT / file).read_text() for file, *names in paths for name in names)


def test_every_notebook_is_run_in_every_form():
    assert all(settings and options == testing.NBVAL for settings, options in testing.notebooks_in_forms().values())
    assert [settings for settings, _ in testing.notebooks_in_forms().values()] == [
        testing.AVX2, testing.OFF, testing.TWO_THREADS]


@pytest.mark.parametrize("words, ran", [([], {"unit"}), (["--forms", "engine"], {"engine"}),
                                        (["--forms", "all"], {"engine", "all"}), (["--browser"], {"browser"})])
def test_the_words_choose_what_is_run(words, ran, monkeypatch):
    """Each part in its place: the unit tests, the engine's forms, the notebooks' forms, the browser."""
    commands = []

    def call(command, cwd=None, env=None):
        commands.append((command, env))
        return 0

    for name in ("sys.stdout", "sys.stderr"):
        monkeypatch.setattr(name, sys.__stdout__)
    monkeypatch.setattr("sys.argv", ["testing", *words])
    monkeypatch.setattr("subprocess.call", call)
    monkeypatch.setattr("shutil.which", "/usr/bin/{}".format)
    monkeypatch.setattr("tplab.checkpoint.fetch", lambda name: None)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(testing.__file__, run_name="__main__")
    assert not left.value.code
    each = sum(word.endswith(".ipynb") for command, _ in commands for word in command)
    all_of_them = len(testing.NBVAL) - 1
    assert any("tests" in command for command, _ in commands) == ("unit" in ran)
    assert any("tests/fast" in command and env["ATEN_CPU_CAPABILITY"] == "avx2" for command, env in commands) == (
        "engine" in ran)
    assert any("tests/browser" in command for command, _ in commands) == ("browser" in ran)
    assert each == all_of_them * (3 if "all" in ran else int("unit" in ran))
    assert any(env["OMP_NUM_THREADS"] == "2" for command, env in commands if env) == ("all" in ran)


def test_a_part_runs_on_workers_and_leaves_bytecode(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(testing, "available_cores", lambda: 5)
    (tmp_path / "test_it.py").write_text(
        "import os, sys\n"
        "def test_it(): assert not sys.dont_write_bytecode and os.environ['PYTEST_XDIST_WORKER_COUNT'] == '3'\n"
        "def test_more(): assert os.environ['TPLAB_X1'] != '+a,b=c'\n")
    assert testing.run_part({"TPLAB_X1": "+a,b=c"}, ["-p", "no:nbval", str(tmp_path)]) == 1
    assert "1 failed, 1 passed" in capfd.readouterr().out


def test_without_a_browser_its_tests_are_skipped_in_one_line_and_nothing_is_installed(monkeypatch, capsys):
    monkeypatch.setattr(testing.shutil, "which", lambda name: None)
    monkeypatch.setattr(testing.subprocess, "call", None)
    assert testing.in_a_browser() == 0
    assert capsys.readouterr().out == ("launch test --browser: skipped: no browser, none of chromium, "
                                       "chromium-browser, google-chrome is installed (Debian: apt install chromium)\n")

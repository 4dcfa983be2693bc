"""``launch test``: two lanes that share the parts, what is shown of them, and what came of them."""

import runpy
import sys
from collections import deque
from pathlib import Path
from threading import Event, Semaphore, get_ident
from types import SimpleNamespace

import pytest

from tplab.checkpoint import CheckpointError
from tplab.lab import testing

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fetched(monkeypatch):
    """The models that were asked for, instead of fetching them."""
    names = []
    monkeypatch.setattr(testing, "fetch", names.append)
    return names


def test_smollm2_is_fetched_first_and_its_absence_is_said(monkeypatch, capsys, fetched):
    monkeypatch.setattr(testing, "run_part", lambda options, show=None: (int(fetched != ["smollm2"]), ""))
    assert testing.main() is None

    def offline(name):
        raise CheckpointError(f"{name} cannot be downloaded")

    monkeypatch.setattr(testing, "fetch", offline)
    assert testing.main() is None
    assert "notebook 06 fails: smollm2 cannot be downloaded" in capsys.readouterr().out


@pytest.mark.parametrize("broken", [(), *((part,) for part in testing.PARTS), tuple(testing.PARTS)])
def test_all_parts_of_the_tests_always_run_and_each_can_fail_them(monkeypatch, capsys, broken):
    ran, lanes = [], set()

    def run_part(options, show=lambda line: None):
        (part,) = [name for name, its in testing.PARTS.items() if its is options]
        ran.append(part)
        lanes.add(get_ident())
        lines = [f"what {part} printed\n", f"== {part} ended ==\n"]
        for line in lines:
            show(line)
        return int(part in broken), "".join(lines)

    monkeypatch.setattr(testing, "run_part", run_part)
    failed = testing.main() or ""
    assert {part for part in testing.PARTS if f"{part} (pytest's exit code 1)" in failed} == set(broken)
    assert sorted(ran) == sorted(testing.PARTS) and len(lanes) <= 2
    shown = capsys.readouterr().out
    assert all(shown.count(f"what {part} printed") == 1 for part in ran)
    assert sorted(shown.splitlines()[1 - 2 * len(ran)::2]) == sorted(f"== {part} ended ==" for part in ran)


def test_every_file_of_tests_is_in_one_part_on_this_processor():
    """Parts in other forms, which begin with settings of the environment, run some of them again."""
    def parts_of(file):
        for part, options in testing.PARTS.items():
            if "=" in options[0]:
                continue
            ignored = [word.removeprefix("--ignore=") for word in options if word.startswith("--ignore=")]
            if any(file.is_relative_to(ROOT / path) for path in options) and not any(
                    file.is_relative_to(ROOT / path) for path in ignored):
                yield part

    files = [file for file in (ROOT / "tests").rglob("test_*.py") if file.parent.name != "browser"]
    assert len(files) > 100 and not {file: parts for file in files if len(parts := list(parts_of(file))) != 1}
    assert all((ROOT / path).exists() for options in testing.PARTS.values() for path in options
               if path[0] != "-" and "=" not in path)


@pytest.mark.parametrize("slow", ["unit tests", "notebooks with their solutions"])
def test_a_lane_that_is_done_takes_what_the_other_has_not_begun(monkeypatch, slow):
    others = Semaphore(0)

    def run_part(options, show=None):
        if options is testing.PARTS[slow]:
            assert all(others.acquire(timeout=30) for _ in range(len(testing.PARTS) - 1))
        else:
            others.release()
        return 0, ""

    monkeypatch.setattr(testing, "run_part", run_part)
    assert testing.main() is None


def test_an_interrupt_ends_both_lanes(monkeypatch):
    ran, cleared = [], Event()

    class Waiting(deque):
        def clear(self):
            super().clear()
            cleared.set()

    def run_part(options, show=None):
        ran.append(options)
        if show:
            raise KeyboardInterrupt
        cleared.wait(20)
        return 0, ""

    monkeypatch.setattr(testing, "deque", Waiting)
    monkeypatch.setattr(testing, "run_part", run_part)
    with pytest.raises(KeyboardInterrupt):
        testing.main()
    assert len(ran) == 2

    monkeypatch.setattr(testing, "run_part", lambda options: (int(pytest.ExitCode.INTERRUPTED), "stopped"))
    waiting, done = deque(testing.PARTS), deque()
    testing.second_lane(waiting, done)
    assert not waiting and [code for _, code, _ in done] == [2]


def test_a_part_is_shown_as_it_comes_and_leaves_bytecode(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "test_it.py").write_text("import sys\ndef test_it(): assert sys.dont_write_bytecode\n")
    shown = []
    code, output = testing.run_part([str(tmp_path)], shown.append)
    assert code == 1 and "".join(shown) == output and shown[-1].startswith("=") and "1 failed" in shown[-1]


def test_a_part_has_the_environment_that_it_names(tmp_path):
    (tmp_path / "test_it.py").write_text("import os\ndef test_it(): assert os.environ['TPLAB_X1'] == '+a,b=c'\n")
    assert testing.run_part(["TPLAB_X1=+a,b=c", "TPLAB_Y=", str(tmp_path)])[0] == 0
    assert testing.run_part([str(tmp_path)])[0] == 1


@pytest.mark.parametrize("said, threads", [(None, "1"), ("3", "3")])
def test_a_part_computes_on_one_thread_unless_the_environment_says_more(said, threads, monkeypatch):
    class Ran(SimpleNamespace):
        returncode = 0

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            seen.append(self.env["OMP_NUM_THREADS"])

    seen = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    monkeypatch.setattr(testing.subprocess, "Popen", lambda command, **more: Ran(**more | {"stdout": ()}))
    assert testing.run_part([]) == (0, "") and seen == [threads]
    commands = []
    monkeypatch.setattr(testing.subprocess, "Popen", lambda command, **more: commands.append(command) or Ran(
        **more | {"stdout": ()}))
    for person in (True, False):
        monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda person=person: person))
        testing.run_part(["x"])
    assert [command[3:] for command in commands] == [["--color=yes", "x"], ["x"]]


@pytest.mark.parametrize("there", [True, False])
def test_the_browsers_tests_install_what_they_need_once(there, monkeypatch):
    ran = []
    monkeypatch.setattr(testing.shutil, "which", {"chromium": "/usr/bin/chromium"}.get)
    monkeypatch.setattr(testing, "find_spec", lambda name: there or None)
    monkeypatch.setattr(testing.subprocess, "call", lambda command, **more: ran.append(command[2:]) or 0)
    assert testing.in_a_browser() == 0
    assert ran.pop() == ["pytest", "--browser", "tests/browser"]
    assert [command[:2] for command in ran] == [["pip", "install"]] * (not there)
    assert there or any(word.startswith("playwright") for word in ran[0])


def test_without_a_browser_its_tests_are_skipped_in_one_line_and_nothing_is_installed(monkeypatch, capsys):
    monkeypatch.setattr(testing.shutil, "which", lambda name: None)
    monkeypatch.setattr(testing.subprocess, "call", None)
    assert testing.in_a_browser() == 0
    assert capsys.readouterr().out == ("launch test --browser: skipped: no browser, none of chromium, "
                                       "chromium-browser, google-chrome is installed (Debian: apt install chromium)\n")


def test_the_second_lane_goes_from_the_last_part_to_the_first_whatever_fails(monkeypatch):
    names = {tuple(options): part for part, options in testing.PARTS.items()}
    monkeypatch.setattr(testing, "run_part", lambda options: (5, names[tuple(options)]))
    done = deque()
    testing.second_lane(deque(testing.PARTS), done)
    assert list(done) == [(part, 5, part) for part in reversed(testing.PARTS)]


def test_every_exit_code_but_0_is_a_failure_and_one_in_the_other_lane_is_not_lost(monkeypatch):
    monkeypatch.setattr(testing, "run_part", lambda options, show=None: (5 if "--nbval" in options else 0, ""))
    assert testing.main() == "launch test: failed: notebooks against their stored text (pytest's exit code 5)"

    def breaks(waiting, done):
        raise ZeroDivisionError

    monkeypatch.setattr(testing, "second_lane", breaks)
    with pytest.raises(ZeroDivisionError):
        testing.main()


def test_ctrl_c_is_no_traceback(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["testing", "--browser"])
    monkeypatch.setattr("sys.stdout", sys.__stdout__)
    monkeypatch.setattr("shutil.which", interrupted)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(testing.__file__, run_name="__main__")
    assert left.value.code == 130

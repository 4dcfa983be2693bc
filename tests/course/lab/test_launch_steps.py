"""The steps of ``launch``, one by one and without a process: what is asked, installed, kept and handed on."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.fixture
def calls(fresh, monkeypatch):
    """Every program that launch starts, without the Python in front; ``codes`` says by a word which of them fail."""
    made = SimpleNamespace(commands=[], codes={}, output="")

    def started(command, **options):
        made.commands.append(command[1:])
        code = next((code for word, code in made.codes.items() if word in command), 0)
        return subprocess.CompletedProcess(command, code, stdout=made.output)

    monkeypatch.setattr(fresh.subprocess, "run", started)
    monkeypatch.setattr(fresh.subprocess, "Popen", lambda command, **options: SimpleNamespace(
        stdout=[], wait=lambda: started(command).returncode))
    monkeypatch.setattr(fresh.subprocess, "call", lambda command, **options: started(command).returncode)
    return made


def terminal(monkeypatch, answer=None):
    """A person who says ``answer``; no terminal if it is None."""
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: answer is not None))
    monkeypatch.setattr("builtins.input", lambda question: answer)


def test_the_python_of_an_environment_on_windows_is_condas_or_a_venvs(fresh, monkeypatch, tmp_path):
    assert fresh.python_in(tmp_path) == tmp_path / "bin/python"
    monkeypatch.setattr(fresh, "os", SimpleNamespace(name="nt"))
    assert fresh.python_in(tmp_path) == tmp_path / "Scripts/python.exe"
    (tmp_path / "python.exe").touch()
    assert fresh.python_in(tmp_path) == tmp_path / "python.exe"


def test_an_install_is_as_good_as_its_project_python_and_place(fresh, monkeypatch, tmp_path):
    keys = [fresh.install_key("python") for fresh.python_version in (lambda _: (3, 11, 7), lambda _: (3, 12, 1))]
    (tmp_path / "pyproject.toml").write_text("[project]")
    keys.append(fresh.install_key("python"))
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/pyproject.toml").write_text("[project]")
    monkeypatch.setattr(fresh, "ROOT", tmp_path / "moved")
    assert len({*keys, fresh.install_key("python")}) == 4


@pytest.mark.parametrize("stamp", ["{", "", None])
def test_a_stamp_that_cannot_be_read_is_none(stamp, fresh, tmp_path):
    if stamp is not None:
        fresh.stamp_file(tmp_path).write_text(stamp)
    assert fresh.read_stamp(tmp_path) == {} and not fresh.is_installed(tmp_path / "nowhere")


def test_the_environment_is_made_only_where_there_is_none_and_the_stamp_keeps_what_it_knows(
        fresh, calls, monkeypatch, tmp_path):
    monkeypatch.setattr(fresh, "python_version", lambda python: (3, 11, 7))
    monkeypatch.setattr(fresh, "install", lambda python: calls.commands.append(["install", str(python)]))
    folder, python = tmp_path / ".venv", tmp_path / ".venv/bin/python"
    fresh.stamp_file(folder).write_text('{"smollm2_settled": true, "key": "old"}')
    assert fresh.ready_environment() == python and calls.commands == [["install", str(python)]]
    kept = json.loads(fresh.stamp_file(folder).read_text())
    assert kept == {"smollm2_settled": True, "key": fresh.install_key(python)}
    python.unlink()
    fresh.ready_environment()
    assert calls.commands[1:] == [["-m", "venv", str(folder)], ["install", str(python)]]
    calls.codes["venv"] = 1
    with pytest.raises(fresh.LaunchError, match="apt install python3-venv"):
        fresh.ready_environment()
    assert len(calls.commands) == 4


@pytest.mark.parametrize("platform, driver, asks", [("linux", False, True), ("linux", True, False),
                                                    ("darwin", False, False)])
def test_what_is_installed_in_which_order(platform, driver, asks, fresh, calls, monkeypatch, tmp_path):
    steps = calls.commands
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(fresh, "has_nvidia_driver", lambda: driver)
    monkeypatch.setattr(fresh, "refuse_cuda_by_accident", lambda python: steps.append(["cuda?"]))
    look, new = ["-m", "pip", "--version"], ["-m", "pip", "install", "--quiet", "pip>=23.3"]
    lab = ["-m", "pip", "install", "--editable", f"{tmp_path}[test]"]
    fresh.install("python")
    assert steps == [look, new, *([["cuda?"]] if asks else []), lab]
    steps.clear()
    calls.codes["--version"] = 1
    fresh.install("python")
    assert steps[:3] == [look, ["-m", "ensurepip"], new]
    calls.codes["--editable"] = 1
    with pytest.raises(fresh.LaunchError, match="pip install --editable .* failed"):
        fresh.install("python")


def test_what_pip_finds_at_hand_is_not_told_and_the_rest_is(fresh, monkeypatch, capsys):
    said = ["Requirement already satisfied: torch\n", "Collecting pip\n", "  Requirement already satisfied, too\n"]
    monkeypatch.setattr(fresh.subprocess, "Popen", lambda command, **options: SimpleNamespace(
        stdout=said, wait=lambda: int(command[1:] != ["-m", "pip", "install", "x"])))
    fresh.pip("python", "install", "x")
    assert capsys.readouterr().out == "".join(said[1:])
    with pytest.raises(fresh.LaunchError, match="^pip install y failed; its own words above say why"):
        fresh.pip("python", "install", "y")


@pytest.mark.parametrize("answer, goes_on", [("y", True), (" YES ", True), ("n", False), ("", False), (None, True)])
def test_the_cuda_build_is_taken_if_a_person_says_so_or_there_is_no_terminal(
        answer, goes_on, fresh, calls, monkeypatch, capsys):
    calls.output = json.dumps({"install": [{"metadata": {"name": "nvidia-x"}}, {"metadata": {"name": "torch"}}]})
    terminal(monkeypatch, answer)
    if goes_on:
        fresh.refuse_cuda_by_accident("python")
    else:
        with pytest.raises(fresh.LaunchError):
            fresh.refuse_cuda_by_accident("python")
    assert "1 extra packages" in (said := capsys.readouterr().out)
    assert "PIP_EXTRA_INDEX_URL" in said and "--torch-backend=cpu torch==1.2.3" in said
    assert any("torch==1.2.3" in words for words in calls.commands), "pip is asked about the version that is pinned"
    assert ("Nobody is here to ask" in said) == (answer is None)
    calls.codes["--dry-run"] = 1
    fresh.refuse_cuda_by_accident("python")  # the install itself will say why
    calls.codes, calls.output = {}, json.dumps({"install": [{"metadata": {"name": "torch"}}]})
    fresh.refuse_cuda_by_accident("python")
    assert capsys.readouterr().out == ""


def test_a_driver_is_found_by_its_folder_or_its_program(fresh, monkeypatch):
    for folder, program in ((True, None), (False, "/usr/bin/nvidia-smi"), (False, None)):
        monkeypatch.setattr(Path, "exists", lambda self, there=folder: there and "nvidia" in str(self))
        monkeypatch.setattr(fresh.shutil, "which", lambda name, found=program: found)
        assert fresh.has_nvidia_driver() == bool(folder or program)


@pytest.mark.parametrize("platform, variables, there", [
    ("linux", {}, False), ("linux", {"DISPLAY": ":0"}, True), ("linux", {"WAYLAND_DISPLAY": "wayland-0"}, True),
    ("darwin", {}, True)])
def test_a_display_is_x_wayland_or_no_linux(platform, variables, there, fresh, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(fresh.os, "environ", variables)
    assert fresh.has_display() == there


@pytest.mark.parametrize("user, code, folder", [(0, 0, "my_notebooks"), (1000, 1, "notebooks")])
def test_root_may_open_the_lab_and_it_stays_on_loopback(user, code, folder, fresh, calls, monkeypatch, tmp_path):
    handed, asked = [], []
    monkeypatch.setattr(fresh, "ready_environment", lambda: "python")
    monkeypatch.setattr(fresh, "offer_smollm2", asked.append)
    monkeypatch.setattr(fresh, "become", lambda *command: handed.extend(command))
    monkeypatch.setattr(fresh, "has_display", lambda: True)
    monkeypatch.setattr(fresh.os, "geteuid", lambda: user)
    calls.codes["course.lab.working_copy"] = code
    fresh.main([])
    assert calls.commands == [["-m", "course.lab.working_copy"]]
    assert asked == ["python"] and handed == [
        "python", "-m", "jupyterlab", f"--ServerApp.root_dir={tmp_path}",
        f"--LabApp.default_url=/lab/tree/{folder}/00_start_here.ipynb", "--ServerApp.ip=127.0.0.1",
        "--Application.log_level=WARN", *(["--allow-root"] if user == 0 else [])]


@pytest.mark.parametrize("answer, here, fetched, settled", [
    ("y", False, True, True), ("n", False, False, True), (None, False, False, False), (None, True, False, True),
    ("y", True, False, True)])
def test_the_real_model_is_offered(answer, here, fetched, settled, fresh, calls, monkeypatch, capsys):
    calls.codes["-c"] = int(not here)
    terminal(monkeypatch, answer)
    fresh.stamp_file(folder := fresh.environment_folder()).write_text('{"key": "k"}')
    fresh.offer_smollm2("python")
    assert (["-m", "tplab", "fetch", "smollm2"] in calls.commands) == fetched
    assert fresh.read_stamp(folder) == {"key": "k", **({"smollm2_settled": True} if settled else {})}
    assert ("python -m tplab fetch smollm2" in capsys.readouterr().out) == (answer is None and not here)
    calls.codes["fetch"] = 1
    fresh.offer_smollm2("python")
    assert len(calls.commands) == (2 if answer is None and not here else 1 + fetched)


def test_in_a_checkout_that_cannot_be_written_the_offer_is_not_noted(fresh, calls, monkeypatch, capsys):
    calls.codes.update({"-c": 1, "fetch": 1})
    terminal(monkeypatch, "y")
    monkeypatch.setattr(fresh.os, "access", lambda folder, mode: mode != os.W_OK)
    fresh.offer_smollm2("python")
    assert not fresh.stamp_file(fresh.environment_folder()).exists()
    assert "It did not come" in capsys.readouterr().out


def test_another_program_finds_the_environments_own_programs_first(fresh, monkeypatch):
    became = []
    monkeypatch.setenv("PATH", "/usr/bin")
    monkeypatch.setattr(fresh.os, "execve", lambda *given: became.append(given) or sys.exit(0))
    with pytest.raises(SystemExit):
        fresh.become(Path("/venv/bin/python"), "-m", "x")
    ((program, words, environment),) = became
    assert (program, words) == (Path("/venv/bin/python"), ["/venv/bin/python", "-m", "x"])
    assert environment == {**os.environ, "PATH": "/venv/bin:/usr/bin"}


def test_the_first_word_chooses_the_command(fresh, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(fresh, "lab", lambda words: ran.append(("lab", words)))
    monkeypatch.setattr(fresh, "COMMANDS", {"run": lambda words: ran.append(("run", words))})
    monkeypatch.setattr("sys.stdout", sys.__stdout__)
    for words in ([], ["--no-browser"], ["run", "01", "--out", "x"]):
        fresh.main(words)
    assert ran == [("lab", []), ("lab", ["--no-browser"]), ("run", ["01", "--out", "x"])]
    said = []
    monkeypatch.setattr(fresh, "say", said.append)
    for words in (["-h"], ["--help"], ["help"]):
        fresh.main(words)
    assert said == [fresh.HELP] * 3 and len(ran) == 3
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    with pytest.raises(fresh.LaunchError, match="needs Python 3.11 or newer"):
        fresh.main([])


def test_the_tests_and_the_doctor_are_run_by_the_environments_python(fresh, monkeypatch, tmp_path):
    became, python = [], tmp_path / ".venv/bin/python"
    monkeypatch.setattr(fresh, "ready_environment", lambda: python)
    monkeypatch.setattr(fresh, "become", lambda *command: became.append(command))
    monkeypatch.setattr(fresh, "is_installed", lambda folder: False)
    with pytest.raises(fresh.LaunchError, match="installs it"):
        fresh.doctor([])
    monkeypatch.setattr(fresh, "is_installed", lambda folder: folder == tmp_path / ".venv")
    fresh.doctor([])
    fresh.test([])
    fresh.test(["--browser"])
    fresh.test(["--forms"])
    assert became == [(python, "-m", "course.lab.doctor"), (python, "-m", "course.lab.testing"),
                      (python, "-m", "course.lab.testing", "--browser"),
                      (python, "-m", "course.lab.testing", "--forms")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, EOFError])
def test_ctrl_c_and_ctrl_d_at_a_question_are_no_traceback(error, launch, monkeypatch):
    def ends(**options):
        raise error

    monkeypatch.setattr("sys.argv", ["launch"])
    monkeypatch.setattr("sys.stdout", SimpleNamespace(reconfigure=ends))
    with pytest.raises(SystemExit) as left:
        runpy.run_path(launch.__file__, run_name="__main__")
    assert left.value.code == 130


def test_what_a_person_can_mend_is_said_behind_the_name_of_the_command(launch, monkeypatch):
    monkeypatch.setattr("sys.argv", ["launch"])
    monkeypatch.setattr("sys.stdout", sys.__stdout__)
    monkeypatch.setattr("sys.version_info", (3, 10, 9))
    with pytest.raises(SystemExit, match="^launch: launch needs Python 3.11 or newer"):
        runpy.run_path(launch.__file__, run_name="__main__")

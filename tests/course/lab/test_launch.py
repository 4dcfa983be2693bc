"""The door: ``launch``, and the doctor."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Event

import pytest
from helpers.launching import load_launch

from course.lab import doctor

ROOT = Path(__file__).resolve().parents[3]


def shell(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)


# ---- the words on the command line -----------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["test", "--help"], ["doctor", "--help"]])
def test_help_needs_nothing_but_the_standard_library(words, tmp_path):
    # -S: no site-packages at all, so an import of anything installed would fail.
    answer = shell("-I", "-S", str(ROOT / "launch"), *words, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert "usage: launch" in answer.stdout


def test_it_is_executable_and_small():
    assert os.access(ROOT / "launch", os.X_OK)
    assert len((ROOT / "launch").read_text().splitlines()) <= 302


@pytest.mark.parametrize("words",
                         [["frobnicate"], ["run", "--fast"], ["test", "extra"], ["run", "-p", "model"], ["--no-brow"]])
def test_wrong_words_are_refused_before_anything_is_installed(words, tmp_path):
    (tmp_path / "launch").write_bytes((ROOT / "launch").read_bytes())
    answer = shell("launch", *words, cwd=tmp_path)
    assert answer.returncode == 2
    assert "usage" in answer.stderr and (words != ["frobnicate"] or "run, test, doctor" in answer.stderr)
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("words", [["01", "-p", "seed", "1", "02"], ["01", "02", "-p", "seed", "1"],
                                   ["-p", "seed", "1", "01", "02"]])
def test_notebooks_and_parameters_may_come_in_any_order(launch, monkeypatch, words):
    handed = []
    monkeypatch.setattr(launch, "ready_environment", lambda: Path("python"))
    monkeypatch.setattr(launch, "become", lambda python, *command: handed.append(command))
    launch.run(words)
    module, asked = handed[0][1], json.loads(handed[0][2])
    assert module == "course.lab.batch"
    assert asked == {"notebooks": ["01", "02"], "parameters": [["seed", "1"]], "out": None}


# ---- the environment -------------------------------------------------------------------------------------------------


def test_conda_environment_is_taken_but_never_base(fresh, monkeypatch, tmp_path):
    assert fresh.environment_folder() == tmp_path / ".venv"
    monkeypatch.setenv("CONDA_PREFIX", "/somewhere/envs/tplab")
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "tplab")
    assert fresh.environment_folder() == Path("/somewhere/envs/tplab")
    monkeypatch.delenv("CONDA_DEFAULT_ENV")
    assert fresh.environment_folder() == Path("/somewhere/envs/tplab")
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "base")
    assert fresh.environment_folder() == tmp_path / ".venv"


def test_second_start_installs_nothing_and_a_changed_project_installs_again(fresh, monkeypatch, tmp_path):
    installs = []
    monkeypatch.setattr(fresh, "install", installs.append)
    for expected in (1, 1):
        assert fresh.ready_environment() == tmp_path / ".venv/bin/python"
        assert len(installs) == expected
    with (tmp_path / "pyproject.toml").open("a") as project:
        project.write("# one more dependency\n")
    fresh.ready_environment()
    assert len(installs) == 2


def test_of_two_that_install_at_once_the_second_waits_and_installs_nothing(fresh, monkeypatch, capsys):
    installs, first_is_at_it, go_on = [], Event(), Event()

    def install(python):
        installs.append(python)
        first_is_at_it.set()
        assert go_on.wait(60)

    say = fresh.say
    monkeypatch.setattr(fresh, "install", install)
    with ThreadPoolExecutor(2) as two:
        first = two.submit(fresh.ready_environment)
        assert first_is_at_it.wait(60)
        monkeypatch.setattr(fresh, "say", lambda text: (say(text), text.startswith("Waiting") and go_on.set()))
        second = two.submit(fresh.ready_environment)
        assert first.result(60) == second.result(60)
    assert len(installs) == 1 and "Waiting for any other launch" in capsys.readouterr().out


def test_a_checkout_that_cannot_be_written_is_told_in_one_line(fresh, monkeypatch, tmp_path):
    def refused(self, *arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(fresh.LaunchError,
                       match=r"not installed yet, and .*\.venv cannot be written: Permission denied"):
        fresh.ready_environment()


def test_failed_install_is_tried_again(fresh, monkeypatch):
    def no_network(python):
        raise fresh.LaunchError("pip failed")

    monkeypatch.setattr(fresh, "install", no_network)
    for _ in range(2):
        with pytest.raises(fresh.LaunchError):
            fresh.ready_environment()
    assert not fresh.is_installed(fresh.environment_folder())


def test_environment_whose_python_is_gone_is_named(fresh, tmp_path):
    (tmp_path / ".venv/bin/python").unlink()
    (tmp_path / ".venv/bin/python").symlink_to("/nowhere/python")
    with pytest.raises(fresh.LaunchError, match=r"does not run.*Delete .*\.venv"):
        fresh.ready_environment()


def test_old_python_in_the_environment_is_named(fresh, tmp_path):
    (tmp_path / ".venv/bin/python").unlink()
    (tmp_path / ".venv/bin/python").write_text("#!/bin/sh\necho 3 9 18\n")
    (tmp_path / ".venv/bin/python").chmod(0o755)
    with pytest.raises(fresh.LaunchError, match="3.9.18.*3.11 or newer"):
        fresh.ready_environment()


# ---- JupyterLab ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words, display, opens", [([], ":0", True), ([], "", False), (["--no-browser"], ":0", False)])
def test_lab_opens_a_browser_only_where_there_is_a_display(fresh, monkeypatch, words, display, opens):
    commands = []
    monkeypatch.setattr(fresh, "install", lambda python: None)
    monkeypatch.setattr(fresh, "offer_smollm2", lambda python: None)
    monkeypatch.setattr(fresh, "become", lambda python, *command: commands.append(command))
    monkeypatch.setattr(fresh.subprocess, "call", lambda command: 1)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    fresh.lab(words)
    assert ("--no-browser" not in commands[0]) == opens


def installed_here():
    here = load_launch()
    return here.is_installed(here.environment_folder())


def wait_until_it_listens(port):
    """The address is printed a few milliseconds before the server listens on it."""
    for _ in range(100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail(f"nothing listens on port {port}")


@pytest.mark.skipif(not installed_here(), reason="./launch has not installed this checkout; it would do so now")
def test_lab_starts_on_the_first_notebook_on_loopback_with_a_token():
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    started = time.monotonic()
    lab = subprocess.Popen([sys.executable, str(ROOT / "launch")], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, env=environment, cwd="/")  # fmt: skip
    try:
        for line in lab.stdout:
            if address := re.search(r"http://127\.0\.0\.1:\d+/lab/tree/my_notebooks/00_start_here\.ipynb\?token=\w+",
                                    line):
                break
        assert address, "the address was never printed"
        busy = max(1, os.getloadavg()[0] / os.cpu_count())  # ten seconds on a machine that has nothing else to do
        assert time.monotonic() - started < 10 * busy
        server, token = address.group().split("/lab")[0], address.group().split("token=")[1]
        wait_until_it_listens(int(server.rsplit(":")[-1]))
        listing = f"{server}/api/contents/notebooks?content=0"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(listing, timeout=10)
        with urllib.request.urlopen(f"{listing}&token={token}", timeout=10) as answer:
            assert json.load(answer)["path"] == "notebooks", "the repository is not the root folder"
    finally:
        lab.terminate()
        lab.communicate(timeout=20)


# ---- the doctor ------------------------------------------------------------------------------------------------------


def test_doctor_finds_the_lab_ready(monkeypatch, capsys):
    monkeypatch.chdir("/")
    code, said = doctor.main(), capsys.readouterr().out
    assert code == 0, said
    for words in ("torch 2.13.0", "model fable", "model smollm2", "two ranks start", "The lab is ready."):
        assert words in said


def test_doctor_before_the_install_says_how_to_install(tmp_path):
    (tmp_path / "launch").write_bytes((ROOT / "launch").read_bytes())
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    environment = {name: value for name, value in os.environ.items() if name != "CONDA_PREFIX"}
    answer = shell("launch", "doctor", cwd=tmp_path, env=environment)
    assert answer.returncode == 1
    assert "./launch installs it" in answer.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("finding, code", [
    (doctor.Finding("all is well"), 0), (doctor.Finding("no model", "fetch it", essential=False), 0),
    (doctor.Finding("no torch", "install it"), 1)])
def test_doctor_fails_for_what_the_lab_cannot_do_without(finding, code, monkeypatch, capsys):
    for examine in ("machine", "packages", "kernel", "ranks"):
        monkeypatch.setattr(doctor, examine, lambda: [doctor.Finding("fine")])
    monkeypatch.setattr(doctor, "models", lambda: [finding])
    assert doctor.main() == code
    said = capsys.readouterr().out
    assert str(finding) in said and ("The lab is ready." in said) == (code == 0)


def test_doctor_notices_ranks_that_cannot_add(monkeypatch):
    class Pool:
        def run(self, fn):
            return [3.0, 2.0]

    monkeypatch.setattr("tplab.pool.RankPool", lambda size: nullcontext(Pool()))
    (found,) = doctor.ranks()
    assert "get 3 and 2" in str(found) and found.remedy and found.essential

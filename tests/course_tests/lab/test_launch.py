"""The door: ``launch``, the environment that it makes, JupyterLab as it starts it, and the doctor."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path

import pytest
from helpers.launching import ROOT, load_launch

from course.lab import doctor, environment

COMMANDS = [["--help"], ["run", "--help"], ["test", "--help"], ["doctor", "--help"]]


def shell(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, **options)


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A launch whose repository is an empty folder, with a ready-made .venv that is this Python."""
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    launch = load_launch()
    launch.ROOT = tmp_path
    for folder in (".", "notebooks"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "pyproject.toml").write_text("[project]\n")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(sys.executable)
    return launch


@pytest.fixture
def installs(fresh):
    """Every install, which does nothing."""
    made = []
    fresh.install = made.append
    return made


# ---- the words on the command line -----------------------------------------------------------------------------------


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_needs_nothing_but_the_standard_library(words, tmp_path):
    # -S: no site-packages at all, so an import of anything installed would fail.
    answer = shell("-I", "-S", str(ROOT / "launch"), *words, cwd=tmp_path)
    assert answer.returncode == 0 and "usage: launch" in answer.stdout, answer.stderr


@pytest.mark.parametrize("words", [["frobnicate"], ["run", "--fast"], ["test", "extra"], ["run", "-p", "model"],
                                   ["--no-brow"]], ids=" ".join)
def test_wrong_words_are_refused_before_anything_is_installed(words, tmp_path):
    shutil.copy(ROOT / "launch", tmp_path)
    answer = shell("launch", *words, cwd=tmp_path)
    assert answer.returncode == 2 and "usage" in answer.stderr and not (tmp_path / ".venv").exists()
    assert words != ["frobnicate"] or "run, test, doctor" in answer.stderr


@pytest.mark.parametrize("words", [["01", "-p", "seed", "1", "02"], ["-p", "seed", "1", "01", "02"]], ids=" ".join)
def test_notebooks_and_parameters_may_come_in_any_order(fresh, installs, words):
    handed = []
    fresh.become = lambda python, *command: handed.extend(command)
    fresh.main(["run", *words, "--out", "x"])
    assert handed == ["-m", "course", "run", "-p", "seed", "1", "--out", "x", "01", "02"]


def test_it_is_executable_and_says_which_python_it_needs(fresh, monkeypatch):
    assert os.access(ROOT / "launch", os.X_OK)
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    with pytest.raises(fresh.LaunchError, match="needs Python 3.11 or newer"):
        fresh.main([])


# ---- the environment -------------------------------------------------------------------------------------------------


def test_conda_environment_is_taken_but_never_base(fresh, monkeypatch, tmp_path):
    assert fresh.environment_folder() == tmp_path / ".venv"
    monkeypatch.setenv("CONDA_PREFIX", "/somewhere/envs/tplab")
    assert fresh.environment_folder() == Path("/somewhere/envs/tplab")
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "base")
    assert fresh.environment_folder() == tmp_path / ".venv"


@pytest.mark.parametrize("project", ["pyproject.toml", "notebooks/pyproject.toml"])
def test_second_start_installs_nothing_and_a_changed_project_installs_again(project, fresh, installs, tmp_path):
    for expected in (1, 1):
        assert fresh.ready_environment() == tmp_path / ".venv/bin/python" and len(installs) == expected
    with (tmp_path / project).open("a") as file:
        file.write("# one more dependency\n")
    fresh.ready_environment()
    assert len(installs) == 2


def test_failed_install_is_tried_again(fresh, monkeypatch):
    monkeypatch.setattr(fresh, "pip", lambda *words: (_ for _ in ()).throw(fresh.LaunchError("pip failed")))
    for _ in range(2):
        with pytest.raises(fresh.LaunchError, match="pip failed"):
            fresh.ready_environment()
    assert not fresh.is_installed(fresh.environment_folder())


@pytest.mark.parametrize("python, words", [(None, r"does not run.*Delete .*\.venv"),
                                           ("#!/bin/sh\necho 3 9 18\n", "3.9.18.*3.11 or newer")])
def test_a_python_that_cannot_be_used_is_named(python, words, fresh, tmp_path):
    place = tmp_path / ".venv/bin/python"
    place.unlink()
    if python is None:
        place.symlink_to("/nowhere/python")
    else:
        place.write_text(python)
        place.chmod(0o755)
    with pytest.raises(fresh.LaunchError, match=words):
        fresh.ready_environment()


# ---- JupyterLab ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words, display, opens", [([], ":0", True), ([], "", False), (["--no-browser"], ":0", False)])
def test_lab_opens_a_browser_only_where_there_is_a_display(fresh, installs, monkeypatch, words, display, opens):
    command = []
    fresh.offer_smollm2, fresh.become = (lambda python: None), (lambda python, *given: command.extend(given))
    monkeypatch.setattr(fresh.subprocess, "call", lambda command: 1)  # no copies of the notebooks
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("DISPLAY", display)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    fresh.lab(words)
    assert ("--no-browser" not in command) == opens and "--ServerApp.ip=127.0.0.1" in command


@pytest.mark.skipif(not (here := load_launch()).is_installed(here.environment_folder()),
                    reason="./launch has not installed this checkout; it would do so now")
def test_lab_starts_on_the_first_notebook_on_loopback_with_a_token():
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    lab = subprocess.Popen([sys.executable, str(ROOT / "launch")], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True, env=environment, cwd="/")  # fmt: skip
    try:
        address = next(filter(None, (re.search(
            r"http://127\.0\.0\.1:\d+/lab/tree/my_notebooks/00_start_here\.ipynb\?token=\w+", line)
            for line in lab.stdout)), None)
        assert address, "the address was never printed"
        server, token = address.group().split("/lab")[0], address.group().split("token=")[1]
        for _ in range(3000):  # the address is printed a few milliseconds before the server listens on it
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(server.rsplit(":")[-1]))) == 0:
                    break
            time.sleep(0.1)
        listing = f"{server}/api/contents/notebooks?content=0"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(listing, timeout=300)
        with urllib.request.urlopen(f"{listing}&token={token}", timeout=300) as answer:
            assert json.load(answer)["path"] == "notebooks", "the repository is not the root folder"
    finally:
        lab.terminate()
        lab.communicate(timeout=300)


# ---- the doctor ------------------------------------------------------------------------------------------------------


def test_doctor_finds_the_lab_ready(monkeypatch, capsys):
    monkeypatch.chdir("/")
    code, said = doctor.main(), capsys.readouterr().out
    assert code == 0, said
    for words in ("torch 2.13.0", "papermill", "model fable", "model smollm2", "two ranks start", "The lab is ready."):
        assert words in said
    assert list(environment().frame["state"]) == ["ok"] * 3


def test_doctor_before_the_install_says_how_to_install(tmp_path):
    for file in ("launch", "pyproject.toml", "notebooks/pyproject.toml"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    answer = shell("launch", "doctor", cwd=tmp_path, env={**os.environ, "CONDA_PREFIX": ""})
    assert answer.returncode == 1 and "./launch installs it" in answer.stderr and not (tmp_path / ".venv").exists()


@pytest.mark.parametrize("needs, said", [
    (["no-such; python_version < '3'", "gone; extra == 'browser'"], []),
    (["no-such>=3"], ["[FAIL] no-such is not installed (required: >=3)"]),
    (["torch>=2", "torch==1"], ["[ok  ] torch {} (required: >=2)", "[FAIL] torch {} (required: ==1)"]),
    (["torch>=99; extra == 'test'"], ["[note] torch {} (required: >=99, for launch test)"])])
def test_what_is_installed_is_held_against_what_is_required(needs, said):
    found = [str(finding).split("\n       -> ") for finding in doctor.packages(needs)]
    assert [line for line, *_ in found] == [line.format(metadata.version("torch")) for line in said]
    assert all(("pip install" in "".join(remedy)) != line.startswith("[ok") for line, *remedy in found)

"""Temporary folders: they go with their process, and what a killed one has left goes with the next start."""

import fcntl
import os
import signal
import subprocess
import sys

import pytest

from tplab.pool import preload, private_folder

MAKE = "from tplab.pool.private_folder import make_folder; print(make_folder(), flush=True)\n"


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other(temporary):
    """Another process, and the folder that it has made."""
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen([sys.executable, "-c", MAKE + "import time; time.sleep(600)"], env=environment,
                          stdout=subprocess.PIPE, text=True) as process:
        yield process, process.stdout.readline().strip()
        process.kill()


def test_what_a_killed_process_has_left_is_removed_by_the_next_one_that_makes_a_folder(temporary, other):
    process, theirs = other
    with open(os.path.join(theirs, "weights"), "w") as file:
        file.write("many")
    mine = private_folder.make_folder()
    assert {mine, theirs} == {str(path) for path in temporary.iterdir()}, "both live"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert os.path.exists(theirs)
    more = private_folder.make_folder()
    assert {mine, more} == {str(path) for path in temporary.iterdir()}
    for folder in mine, more:
        private_folder.remove_folder(folder)
    assert not list(temporary.iterdir())


def test_a_folder_that_a_process_holds_stays_whatever_its_number(temporary):
    """In another container a process has another number; and a folder that is not tplab's is never removed."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    held, left, file = (temporary / f"tplab-{ended.pid}-{name}" for name in ("held", "left", "file"))
    held.mkdir()
    left.mkdir()
    file.touch()
    (temporary / f"tplab-{ended.pid}-link").symlink_to(temporary / "elsewhere")
    (temporary / "elsewhere").mkdir()
    (temporary / "tplab-score-1").mkdir()
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    private_folder.remove_folder(private_folder.make_folder())
    os.close(lock)
    assert {path.name for path in temporary.iterdir()} == {
        held.name, file.name, f"tplab-{ended.pid}-link", "elsewhere", "tplab-score-1"}


def test_at_its_end_a_process_removes_its_own_and_a_fork_of_it_does_not(temporary):
    code = MAKE + """
import os, sys
if not (child := os.fork()):
    sys.exit()
os.waitpid(child, 0)
print(os.listdir(os.environ["TMPDIR"]))
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(temporary)},
                          capture_output=True, text=True, check=True)
    folder, seen = done.stdout.splitlines()
    assert seen == str([os.path.basename(folder)]) and not list(temporary.iterdir())


def test_a_fork_server_that_ends_before_its_parent_takes_nothing_away(temporary, monkeypatch):
    clock = iter([0.0, 0.5, 1.5])
    monkeypatch.setattr(preload.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("it took"))
    (temporary / f"tplab-{os.getppid()}-pool").mkdir()
    preload._sweep(os.getpid(), os.getppid(), str(temporary / "listener"))
    assert list(temporary.iterdir())

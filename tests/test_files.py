"""What a command writes: refused before the work where it can be, whole or not there after it."""

import os
import resource
import socket
from contextlib import contextmanager

import pytest

from tplab.files import FileError, check_writable, write_file


@contextmanager
def full_disk():
    """No file of this process may grow beyond 100 bytes, pytest's own report into a file neither: so only for a moment.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_earlier_file_and_nothing_beside_it(tmp_path):
    (tmp_path / "report.json").write_text("the old report")
    with full_disk(), pytest.raises(FileError, match=r"report\.json could not be written: File too large"):
        write_file(tmp_path / "report.json", lambda new: new.write_text("x" * 1000))
    assert (tmp_path / "report.json").read_text() == "the old report"
    assert os.listdir(tmp_path) == ["report.json"]


def test_an_error_without_a_number_keeps_its_words(tmp_path):
    def write(new):
        raise OSError("the pen is dry")

    with pytest.raises(FileError, match=r"report\.json could not be written: the pen is dry"):
        write_file(tmp_path / "report.json", write)


def test_a_reader_of_the_earlier_file_reads_it_to_its_end(tmp_path):
    (tmp_path / "report.json").write_text("the old report")
    with open(tmp_path / "report.json") as earlier:
        write_file(tmp_path / "report.json", lambda new: new.write_text("the new one") if new.parents[1] == tmp_path
                   else pytest.fail("a file of another disk cannot be renamed to this one"))
        assert os.listdir(tmp_path) == ["report.json"]
        assert earlier.read() == "the old report" and (tmp_path / "report.json").read_text() == "the new one"


def test_an_interrupt_leaves_the_earlier_file_too(tmp_path):
    def interrupted(new):
        new.write_text("half")
        raise KeyboardInterrupt

    (tmp_path / "report.json").write_text("the old report")
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "report.json", interrupted)
    assert os.listdir(tmp_path) == ["report.json"] and (tmp_path / "report.json").read_text() == "the old report"


def test_a_file_keeps_its_permissions_and_a_new_one_has_the_usual_ones(tmp_path):
    (tmp_path / "private").write_text("")
    (tmp_path / "private").chmod(0o600)
    (tmp_path / "usual").write_text("")
    for name in ("private", "new"):
        write_file(tmp_path / name, lambda new: new.write_text("words"))
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert (tmp_path / "private").read_text() == (tmp_path / "new").read_text() == "words"


def make(kind, path):
    if kind == "a link":
        path.symlink_to("/etc/hostname")
    elif kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(os.path.relpath(path))  # the whole path may be longer than a socket's may be
    return path


@pytest.mark.parametrize("kind", ["a link", "a named pipe", "a folder", "a socket"])
def test_whatever_is_not_a_regular_file_is_refused_and_stays(kind, tmp_path):
    path = make(kind, tmp_path / "there")
    before = path.lstat()
    for refused in (check_writable, lambda path: write_file(path, lambda new: new.write_text("words"))):
        with pytest.raises(FileError, match=f"there is {kind}; give the name of a file"):
            refused(path)
    assert path.lstat() == before


@pytest.mark.parametrize("path, words", [
    ("/dev/null", "/dev/null is a device"), ("a" * 300, "File name too long"), ("", "'' is not the name of a file"),
    ("nowhere/file", "there is no folder .*nowhere"), ("/etc/hostname/file", "there is no folder /etc/hostname"),
    ("folder/", "'folder/' is not the name of a file"),
])  # fmt: skip
def test_a_name_that_cannot_be_written_is_refused(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileError, match=words):
        check_writable(path)


@pytest.mark.parametrize("closed, words", [("report", "report cannot be written: no permission$"),
                                           (".", "no permission to make files in "), (None, None)])
def test_what_may_not_be_written_is_refused(closed, words, tmp_path, monkeypatch):
    """The system is asked: a user who runs this as root can write everywhere."""
    (tmp_path / "report").write_text("")
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: may(path, mode) and not (
        closed and os.path.samefile(path, tmp_path / closed) and mode & os.W_OK))
    if closed is None:
        return check_writable(tmp_path / "report")
    with pytest.raises(FileError, match=words):
        check_writable(tmp_path / "report")

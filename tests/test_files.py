"""What a command writes: refused before the work where it can be, whole or not there after it."""

import os
import stat

import pytest

from tplab.errors import TplabError
from tplab.files import check_writable, write_file


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_full_disk_or_an_interrupt_leaves_the_earlier_file_and_nothing_beside_it(tmp_path, error):
    def write(new):
        new.write_text("half")
        raise error

    (tmp_path / "report.json").write_text("the old report")
    with pytest.raises(TplabError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
        write_file(tmp_path / "report.json", write)
    assert isinstance(error, KeyboardInterrupt) or "could not be written: No space left" in str(caught.value)
    assert (tmp_path / "report.json").read_text() == "the old report" and os.listdir(tmp_path) == ["report.json"]


def test_a_file_keeps_its_permissions_and_a_reader_of_the_earlier_one_reads_it_to_its_end(tmp_path):
    (tmp_path / "private").write_text("the old report")
    (tmp_path / "private").chmod(0o600)
    (tmp_path / "usual").touch()
    with open(tmp_path / "private") as earlier:
        for name in ("private", "new"):
            write_file(tmp_path / name, lambda new: new.write_text("words"))
        assert earlier.read() == "the old report"
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o600
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert (tmp_path / "private").read_text() == (tmp_path / "new").read_text() == "words"


@pytest.mark.parametrize("path, words", [
    ("/dev/null", "/dev/null is not a regular file"), ("link", "link is not a regular file"),
    ("folder", "folder is not a regular file"), ("pipe", "pipe is not a regular file"),
    ("nowhere/file", "there is no folder .*nowhere"), ("/etc/hostname/file", "there is no folder /etc/hostname"),
    ("", "or no name of a file"), ("new/", "or no name of a file")])
def test_what_cannot_be_written_is_refused_and_stays(path, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("/etc/hostname", "link")
    os.mkfifo("pipe")
    os.mkdir("folder")
    for refused in (check_writable, lambda path: write_file(path, lambda new: new.write_text("words"))):
        with pytest.raises(TplabError, match=words):
            refused(path)
    assert sorted(os.listdir()) == ["folder", "link", "pipe"] and os.readlink("link") == "/etc/hostname"
    check_writable("report")

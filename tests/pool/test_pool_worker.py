"""What a rank's process does with a command, and the pool's small helpers: in this process, on memory like a pool's."""

import gc
import os
import socket
import sys
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
from helpers.failing import descriptors

from tplab.model import attention
from tplab.patch import Patch
from tplab.pool import pool as pool_module
from tplab.pool import private_folder, worker
from tplab.pool.control_block import (
    ABANDONED,
    ANSWER_LENGTH,
    ANSWERED,
    ANSWERED_AT,
    BIRTH,
    DROP,
    FAILED,
    JOIN,
    OK,
    OUTCOME,
    RUN,
    SETUP,
    STARTED,
    Command,
    ControlBlock,
)
from tplab.pool.shared_file import SharedFile
from tplab.pool.transfer import dumps, loads
from tplab.ranks import RankError
from tplab.ranks.errors import Abandoned

EPOCH, BORN = 4, 3


@pytest.fixture
def rank(tmp_path, monkeypatch):
    """Rank 1 of 2 without a process: what it does is noted in `did`."""
    memory, inbox, outbox = (SharedFile(name, str(tmp_path), size) for name, size in (
        ("block", ControlBlock.bytes_needed(2)), ("inbox", 0), ("outbox", 0)))
    parent, wake = Pipe()
    rank, did = object.__new__(worker._Rank), []
    rank.control, rank.pid, rank.interruptible = ControlBlock(memory, 2), os.getpid(), False
    rank.did, rank.parent = did, parent
    rank.spec = SimpleNamespace(rank=1, size=2, birth=BORN, inbox=inbox, outbox=outbox, wake=wake, folder=str(tmp_path))
    rank.output = SimpleNamespace(restart=lambda: did.append("restart"))
    rank.group = SimpleNamespace(begin_epoch=lambda epoch: did.append(("epoch", epoch)),
                                 begin_command=lambda: did.append("looked about"), end=lambda: None)
    rank.control.set_word(1, BIRTH, BORN)
    monkeypatch.setattr(worker, "_leave_gloo", lambda: did.append("left gloo"))
    monkeypatch.setattr(worker.capture, "flush", lambda: did.append("flushed"))
    monkeypatch.setattr(worker.dist, "FileStore", lambda path, size: (path, size))
    monkeypatch.setattr(worker.dist, "init_process_group", lambda *args, **options: did.append(("gloo", args, options)))
    yield rank
    rank.control.close()
    for file in (memory, inbox, outbox, parent, wake):
        file.close()


def obey(rank, fn, *args, kind=RUN, patches=(), number=1, **kwargs):
    """One command from its posting to the end of the pipe; (outcome, answer)."""
    payload = fn if isinstance(fn, bytes) else dumps((fn, args, kwargs, patches))
    rank.spec.inbox.put(payload)
    rank.control.post(Command(number, kind, EPOCH, len(payload)))
    rank.serve()
    answer = rank.spec.outbox.get(rank.control.word(1, ANSWER_LENGTH))
    return rank.control.word(1, OUTCOME), loads(answer) if answer else None


@pytest.fixture
def last(rank):
    """The parent says no more: a rank that finds no new command goes."""
    os.write(rank.parent.fileno(), b"w")  # an old wake-up; after it the rank looks again
    with socket.socket(fileno=os.dup(rank.parent.fileno())) as parent:
        parent.shutdown(socket.SHUT_WR)


def test_a_call_and_its_answer(rank, last):
    seen = []
    rank.control.set_word(1, ANSWERED, 99)
    put = rank.spec.outbox.put
    rank.spec.outbox.put = lambda data: (seen.append(rank.control.word(1, ANSWERED)), put(data))
    assert obey(rank, "{}-{end}".format, 5, end=6) == (OK, "5-6")
    assert seen == [99] and rank.control.word(1, ANSWERED) == rank.control.word(1, STARTED) == 1
    assert rank.control.word(1, ANSWERED_AT) > 0 and rank.did == ["restart", "looked about", "flushed"]
    assert not rank.interruptible
    rank._interrupt(None, None)  # after the call a late signal does nothing


def test_the_parent_is_woken_by_each_answer(rank):
    rank.control.post(Command(1, DROP, EPOCH, 0))
    rank.control.set_word(1, BIRTH, BORN)
    word = rank.control.set_word
    rank.control.set_word = lambda r, name, value: (word(r, name, value), name == STARTED and word(r, BIRTH, BORN + 1))
    rank.serve()  # DROP, then its place belongs to another process
    assert rank.did == ["left gloo"] and rank.control.word(1, STARTED) == 1 and rank.control.word(1, ANSWERED) == 0
    assert not rank.parent.poll()
    rank._answer(2, FAILED, b"abc")
    assert os.read(rank.parent.fileno(), 9) == b"a" and rank.spec.outbox.get(9) == b"abc"
    assert [rank.control.word(1, name) for name in (OUTCOME, ANSWER_LENGTH, ANSWERED)] == [FAILED, 3, 2]


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_whatever_a_call_raises_is_its_answer(rank, last, error):
    def fn():
        raise error

    outcome, report = obey(rank, fn)
    assert outcome == FAILED and (report.kind, report.text.partition(":")[0]) == ("raised", type(error).__name__)
    assert type(loads(report.exception)) is type(error) and report.frames[-1].function == "fn"
    assert not rank.interruptible


def test_what_cannot_be_read_or_sent_back(rank, last):
    outcome, report = obey(rank, b"no pickle")
    assert outcome == FAILED and report.text.endswith("The call could not be read on the rank.")
    outcome, answer = rank._run(EPOCH, lambda: {"a": [sys._getframe()]}, ())
    assert outcome == FAILED
    assert loads(answer).text.startswith("RankError: result['a'][0] (frame) of rank 1 cannot be sent back: ")


@pytest.mark.parametrize("abandoned, runs", [(EPOCH - 1, True), (EPOCH, False), (EPOCH + 1, False)])
def test_a_call_of_an_epoch_that_is_over_is_not_begun(rank, last, abandoned, runs):
    rank.control.words[ABANDONED] = abandoned
    outcome, answer = obey(rank, len, "abc")
    assert (outcome, answer if runs else answer.kind) == ((OK, 3) if runs else (FAILED, "stopped"))


def test_a_signal_ends_the_call_and_nothing_else(rank, last, monkeypatch):
    def fn():
        rank._interrupt(None, None)

    outcome, answer = rank._run(EPOCH, fn, ())
    assert (outcome, loads(answer).kind) == (FAILED, "stopped") and not rank.interruptible
    assert [frame.function for frame in loads(answer).frames] == ["fn"]

    def late(*_):
        raise Abandoned  # it arrived just as the function ended

    monkeypatch.setattr(rank, "_execute", late, raising=False)
    outcome, report = obey(rank, len, "abc")
    assert (outcome, report.kind, report.text) == (FAILED, "stopped", "stopped")


def test_patches_hold_for_the_call_only(rank, last):
    target, right = "tplab.model.attention.mask_scores", attention.mask_scores
    patch = Patch(target, lambda scores, mask: "patched")
    assert obey(rank, lambda: sys.modules[attention.__name__].mask_scores(1, 2), patches=(patch,)) == (OK, "patched")
    assert attention.mask_scores is right


def test_to_join_is_to_begin_anew(rank, last, tmp_path):
    assert obey(rank, b"", kind=JOIN) == (OK, None)
    assert rank.did[:4] == ["restart", "looked about", "left gloo", ("epoch", EPOCH)]
    _, args, options = rank.did[4]
    assert args == ("gloo",) and options["store"] == (f"{tmp_path}/gloo-{EPOCH}", 2)
    assert (options["rank"], options["world_size"]) == (1, 2) and options["timeout"].total_seconds() >= 600


def test_modules_and_files_are_looked_for_where_the_notebook_does(rank, last, tmp_path, monkeypatch):
    own = ["/somewhere"]
    monkeypatch.setattr(sys, "path", own)
    monkeypatch.chdir("/")
    worker._set_up(["/a"], None)  # the notebook's folder is gone
    assert sys.path is own and own == ["/a"] and os.getcwd() == "/"
    assert obey(rank, dumps((None, (["/b", "/c"], str(tmp_path)), {}, ())), kind=SETUP) == (OK, None)
    assert sys.path is own and own == ["/b", "/c"] and os.getcwd() == str(tmp_path)


# The parent's helpers.


def test_a_working_folder_that_was_removed(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    assert pool_module._working_folder() == str(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert pool_module._working_folder() is None


def test_a_private_folder_is_ours_alone_and_goes_when_there_is_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = pool_module._private_folder()
    assert os.stat(folder).st_mode & 0o777 == 0o700 and os.listdir(folder) == []
    assert private_folder.folders_of(os.getpid()) == [folder]
    (tmp_path / os.path.basename(folder) / "left").touch()
    pool_module._empty(folder)
    assert os.listdir(folder) == []
    os.rmdir(folder)
    pool_module._empty(folder)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    os.rmdir(folder)
    with pytest.raises(RankError, match="cannot have it: .*Not a directory"):
        pool_module._empty("/dev/null/x")

    def full(dir):
        raise OSError(28, "No space")

    monkeypatch.setattr(pool_module.tempfile, "NamedTemporaryFile", full)
    with pytest.raises(RankError, match=f"No space: '{tmp_path}/tplab-{os.getpid()}-"):
        pool_module._private_folder()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RankError("no")], ids=["interrupt", "error"])
def test_a_pool_that_could_not_be_made_leaves_nothing(tmp_path, monkeypatch, error):
    def refuse(pool):
        made.append(pool)
        raise error

    made = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(pool_module.RankPool, "_ready", refuse)
    gc.collect()  # or what other tests have left is closed meanwhile
    before = descriptors()
    with pytest.raises((KeyboardInterrupt, RankError)):
        pool_module.RankPool(2)
    assert made[0].closed and made[0] not in pool_module._open_pools and os.listdir(tmp_path) == []
    assert "closed" in repr(made[0])
    assert descriptors() <= before



@pytest.mark.parametrize("closed, pid, taken", [(False, 0, True), (True, 0, False), (False, 1, False)])
def test_a_shared_pool_is_taken_while_it_is_open_and_this_process_made_it(closed, pid, taken, monkeypatch):
    """A fork has its parent's pools in its memory, and none of their ranks."""
    there = SimpleNamespace(closed=closed, _pid=os.getpid() + pid)
    monkeypatch.setattr(pool_module, "_shared", {2: there})
    monkeypatch.setattr(pool_module, "RankPool", lambda size: f"a new one of {size}")
    assert pool_module.shared_pool(2) == (there if taken else "a new one of 2")

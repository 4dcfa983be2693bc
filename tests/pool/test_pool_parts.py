"""The pool's parts by themselves, with no process at hand: what is laid out where, and read how."""

import os
import signal
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch

from tplab.pool import launcher, rank_process
from tplab.pool.capture import SHOWN_BYTES, Output, Reader, show
from tplab.pool.control_block import (
    BIRTH,
    BLOCK_WORDS,
    NUMBER,
    RUN,
    SLOT_BYTES,
    STARTED,
    Command,
    ControlBlock,
)
from tplab.pool.rank_process import RankProcess, gloo_call, in_gloo, threads_per_rank
from tplab.pool.shared_file import SharedFile, no_room
from tplab.pool.shared_memory import SharedMemoryGroup
from tplab.pool.transfer import dumps, dumps_call, find_unsendable, loads
from tplab.pool.watch import Watch
from tplab.ranks import RankError
from tplab.ranks.errors import Abandoned, Frame
from tplab.ranks.oplog import BARRIER


@pytest.fixture
def control(tmp_path):
    memory = SharedFile("control-block", str(tmp_path), ControlBlock.bytes_needed(3))
    block = ControlBlock(memory, 3)
    yield block
    block.close()
    memory.close()


# Memory.


def test_every_word_log_and_slot_has_a_place_of_its_own(control):
    control.post(Command(101, 102, 103, 104))
    places = [(r, name) for r in range(3) for name in range(BLOCK_WORDS)]
    for value, (r, name) in enumerate(places, 1000):
        control.set_word(r, name, value)
    for r, log in enumerate(control.logs):
        for _ in range(r + 1):
            log.enter(BARRIER, (), 0, 0, None)
    slots = sorted((control.slot_offset(r, parity), r, parity) for r in range(3) for parity in (0, 1))
    for at, r, parity in slots:
        control.bytes[at : at + SLOT_BYTES] = bytes([2 * r + parity + 1]) * SLOT_BYTES
    assert len(control.bytes) == ControlBlock.bytes_needed(3) >= slots[-1][0] + SLOT_BYTES
    assert all(at % 4096 == 0 and control.bytes[at] == control.bytes[at + SLOT_BYTES - 1] == 2 * r + parity + 1
               for at, r, parity in slots)
    assert [len(log.records()) for log in control.logs] == [1, 2, 3]
    assert [control.word(r, name) for r, name in places] == list(range(1000, 1000 + len(places)))
    assert control.command() == (101, 102, 103, 104)


def test_a_new_process_finds_its_own_block_empty_and_no_other(control):
    for r in range(3):
        for name in range(BLOCK_WORDS):
            control.set_word(r, name, 7)
        control.logs[r].enter(BARRIER, (), 0, 0, None)
    control.clear_rank(1, 5)
    assert {name: control.word(1, name) for name in range(BLOCK_WORDS) if control.word(1, name)} == {BIRTH: 5}
    assert all(control.word(r, name) == 7 for r in (0, 2) for name in range(BLOCK_WORDS))
    assert [log.last_seq() for log in control.logs] == [1, 0, 1] and control.logs[1].records() == []


def test_a_command_is_read_whole_and_its_number_is_written_last():
    class Words(dict):
        """A command that changes while it is read."""
        looks = 0

        def __getitem__(self, name):
            self.looks += 1
            if self.looks == 2:
                block.post(Command(2, RUN, 20, 200))
            return super().__getitem__(name)

        def __setitem__(self, name, value):
            written.append(name)
            super().__setitem__(name, value)

    written, block = [], object.__new__(ControlBlock)
    block.words = Words()
    block.post(Command(1, RUN, 10, 100))
    assert block.command() == (2, RUN, 20, 200) and written[3] == written[7] == NUMBER and len(written) == 8


def test_a_shared_file_is_read_and_written_whole(tmp_path, monkeypatch):
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real_write(fd, data[:3], at))  # as the kernel may, in pieces
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: real_read(fd, [into[0][:2]], at))
    file = SharedFile("x", str(tmp_path), 4)
    twin = file.duplicate()
    file.put(b"longer than that")
    assert (file.length(), twin.get(16)) == (16, b"longer than that")
    assert (file.get(4, 7), file.get(99, 12)) == (b"than", b"that")
    file.put(b"short")
    assert (twin.length(), twin.get(5)) == (5, b"short")
    file.truncate(2)
    assert twin.get(9) == b"sh"
    file.close()
    file.close()
    assert file.fd == -1 and twin.length() == 2 and twin.size == 4
    twin.truncate()
    assert twin.length() == 0


def test_no_room_names_the_file_else_the_folder():
    assert "'/own/file'" in str(no_room(OSError(28, "No space", "/own/file"), "/own"))
    assert "'/own'" in str(no_room(OSError(28, "No space"), "/own")) and no_room(OSError("no"), None)


def test_slots_are_views_by_turn_and_kind(control):
    group = SharedMemoryGroup(1, control, strict=False)
    for dtype in (torch.uint8, torch.float64):
        assert group.chunk(dtype) * dtype.itemsize == SLOT_BYTES
        for parity in (0, 1):
            for r, slot in enumerate(group._slots(parity, dtype, (3, 4, 5))):
                at = slot.data_ptr() - group.memory.data_ptr()
                assert (at, len(slot), slot.dtype) == (control.slot_offset(r, parity), 3 + r, dtype)
                assert not slot.is_inference()
    assert [len(slot) for slot in group._slots(0, torch.uint8, 9)] == [9, 9, 9]
    for n in range(1, 600):
        group._slots(0, torch.uint8, n)
    assert len(group.views) <= 513, "each shape ever seen would be kept for ever"
    group.epoch, group.step = 5, 9
    group.words[group.step_at[1]] = 9
    group.log.enter(BARRIER, (), 0, 0, None)
    group.begin_epoch(6)
    assert (group.epoch, group.step, group.checked, group.words[group.step_at[1]], group.log.seq) == (6, 0, 0, 0, 0)


@pytest.mark.parametrize("abandoned, leaves", [(4, False), (5, True), (6, True)])
def test_a_waiting_rank_leaves_when_its_epoch_is_over(control, monkeypatch, abandoned, leaves):
    group = SharedMemoryGroup(1, control, strict=False)
    group.epoch, naps = 5, []

    def nap(address, seen, seconds):
        naps.append(seconds)
        for r in (0, 2):
            group.words[group.step_at[r]] = 3

    monkeypatch.setattr("tplab.pool.shared_memory.sleep_while", nap)
    group.words[0] = abandoned
    if leaves:
        with pytest.raises(Abandoned):
            group._wait_for(3)
    else:
        group._wait_for(3)
    assert bool(naps) == (not leaves)


# What crosses.


def test_what_plain_pickling_must_do_it_does():
    for t in (torch.nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(2, requires_grad=True),
              torch.eye(2).to_sparse(), torch.ones(2, device="meta")):
        back = loads(dumps(t))
        assert type(back) is type(t) and back.requires_grad == t.requires_grad and back.layout == t.layout
        assert back.device == t.device


LOCK = __import__("threading").Lock()


class Holder:
    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("value, path", [
    ((1, LOCK), "x[1]"), ([[[[LOCK]]]], "x[0][0][0][0]"), ([[[[[LOCK]]]]], "x[0][0][0][0]"),
    (Holder({"a": LOCK}), "x.value['a']"), ({"a": 1, 2: (0, LOCK)}, "x[2][1]"),
], ids=["tuple", "four deep", "deeper", "attribute", "dict"])
def test_the_innermost_part_that_cannot_be_sent_is_named(value, path):
    found, part, _ = find_unsendable(value, "x")
    assert found == path and (part is LOCK or path == "x[0][0][0][0]")
    assert find_unsendable([1, "a"], "x") is None


def test_a_call_that_cannot_be_sent_names_its_part():
    local, unsendable = LOCK, SimpleNamespace(target="tplab.a.b", replacement=lambda: LOCK)
    for call, words in (((lambda: local, (), {}), "uses local (lock)"), ((lambda: LOCK, (), {}), "uses LOCK (lock)"),
                        ((print, (1, 2), {"end": LOCK}), "argument end (lock)"), ((LOCK.acquire, (), {}), "function"),
                        ((print, (), {}, (unsendable,)), "the replacement for tplab.a.b uses LOCK")):
        with pytest.raises(RankError, match="No rank has been touched") as caught:
            dumps_call(*call)
        assert words in str(caught.value)


# What was printed.


def test_prints_are_kept_to_a_size_and_counted(monkeypatch):
    totals, kept = [], []
    monkeypatch.setattr(os, "write", lambda fd, data: kept.append((fd, bytes(data))))
    output = Output(totals.append)
    assert [output.write(b"x" * n) for n in (SHOWN_BYTES - 2, 5, 7)] == [SHOWN_BYTES - 2, 5, 7]
    assert kept == [(1, b"x" * (SHOWN_BYTES - 2)), (1, b"xx")]
    output.restart()
    output.write(b"y")
    assert totals == [SHOWN_BYTES - 2, SHOWN_BYTES + 3, SHOWN_BYTES + 10, 0, 1] and kept[-1] == (1, b"y")
    assert output.writable() and output.fileno() == 1


def test_what_is_shown_of_a_ranks_output(tmp_path, capsys):
    memory = SharedFile("output", str(tmp_path))
    memory.put(b"caf\xc3")
    reader = Reader(memory)
    assert reader.take(9) == ("caf\ufffd", 5) and reader.take(0) == ("", 0)
    memory.put(b"z" * 64 * SHOWN_BYTES)
    reader.trim()
    assert memory.length() == 64 * SHOWN_BYTES  # not yet beyond any use
    memory.close()
    show(3, "\n a \nb\x0cc\r\n\n", 0)
    show(4, "", 1234)
    *lines, cut, _ = capsys.readouterr().out.split("\n")
    assert lines == ["[rank 3] ", "[rank 3]  a ", "[rank 3] b\x0cc", "[rank 3] "]
    assert cut == "[rank 4] … cut here: 1,234 bytes more were printed"


# One process.


@pytest.mark.parametrize("code, words", [(None, "exit code None"), (0, "exit code 0"), (3, "exit code 3"),
                                         (-9, "SIGKILL"), (-11, "SIGSEGV"), (-40, "signal 40")])
def test_how_a_process_ended(code, words):
    process = object.__new__(RankProcess)
    process.child = SimpleNamespace(join=lambda seconds: None, exitcode=code)
    assert process.death() == words


def test_what_faulthandler_wrote(tmp_path):
    process = object.__new__(RankProcess)
    process.stacks = SharedFile("stacks", str(tmp_path))
    dump = 'Thread 0x7:\n  File "a b.py", line {} in inner\n  File "c.py", line 5 in <module>\n'
    process.stacks.put((dump.format(3) + "Fatal Python error: Aborted\n" + dump.format(4)).encode() + b"\xff")
    assert [(f.file, f.line, f.function) for f in process.stack(crash=True)] == [
        ("c.py", 5, "<module>"), ("a b.py", 4, "inner")]
    assert [f.line for f in process.stack()] == [5, 4, 5, 3]
    process.stacks.put(dump.format(3).encode())
    assert process.stack(crash=True) == [] and len(process.stack()) == 2
    process.stacks.close()


@pytest.mark.parametrize("started, alive, up", [(0, True, False), (1, True, True), (1, False, False)])
def test_only_a_process_that_takes_commands_is_sent_signals(monkeypatch, started, alive, up):
    process, sent = object.__new__(RankProcess), []
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    process.rank, process.child = 1, SimpleNamespace(is_alive=lambda: alive, pid=77)
    process.control = SimpleNamespace(word=lambda rank, name: started * ((rank, name) == (1, STARTED)))
    process.signal(signal.SIGUSR1)
    assert (process.is_up(), process.dead()) == (up, not alive) and sent == [(77, signal.SIGUSR1)] * up


def test_the_pipe_of_a_process_that_has_gone():
    process = object.__new__(RankProcess)
    process.pipe, theirs = Pipe()
    os.write(theirs.fileno(), b"aa")
    assert process.drain() is True
    process.wake()
    theirs.close()
    process.wake()
    assert process.drain() is False
    process.pipe.close()


def test_a_snapshot_waits_for_ranks_that_answer_and_leaves_nothing_behind(monkeypatch, tmp_path):
    def process(rank, up, *parts):
        one = object.__new__(RankProcess)
        one.rank, one.is_up, one.stacks = rank, lambda: up, SharedFile("stacks", str(tmp_path))
        one.stacks.put(b'  File "old.py", line 1 in old\n')
        one.parts, one.signal = list(parts), lambda number: None
        return one

    line = b'  File "a.py", line %d in f\n'
    processes = [process(0, True, line % 1, line % 2, b"", line % 3), process(1, False), process(2, True, line % 4)]

    def nap(seconds):  # each look finds some more, and at last no more
        for one in processes:
            if one.parts:
                one.stacks.put(one.stacks.get(one.stacks.length()) + one.parts.pop(0))

    monkeypatch.setattr(rank_process.time, "sleep", nap)
    monkeypatch.setattr(rank_process.time, "monotonic", lambda: 0.0)
    assert {rank: [f.line for f in frames] for rank, frames in rank_process.snapshot(processes).items()} == {
        0: [2, 1], 1: [], 2: [4]}
    assert [one.stacks.length() for one in processes] == [0, 31, 0]


def test_where_a_stack_enters_gloo():
    def stack(*places):
        return [Frame(os.path.join("/lib", *file.split("/")), 1, name) for file, name in places]

    inside = stack(("own.py", "fn"), ("torch/distributed/c10d_logger.py", "wrapper"),
                   ("torch/distributed/c10d.py", "all_reduce"), ("torch/distributed/c10d.py", "_wait"))
    assert in_gloo(inside) and gloo_call(inside) == "all_reduce" and gloo_call(inside[1:2]) == "wrapper"
    assert not in_gloo([*inside, *stack(("own.py", "hook"))]) and not in_gloo([])
    assert not in_gloo(stack(("torch/distributed_own.py", "f")))


@pytest.mark.parametrize("name, kept", [("tplab-rank-1", {"name"}), ("own", {"name", "init_main_from_name"})])
def test_the_main_module_stays_out_of_ranks_only(monkeypatch, name, kept):
    def prepare(name):
        return {"name": name, "init_main_from_name" if name == "own" else "init_main_from_path": "/a.py",
                **({"init_main_from_name": "a"} if name != "own" else {})}

    monkeypatch.setattr(launcher.spawn, "get_preparation_data", prepare)
    with pytest.raises(ZeroDivisionError), launcher._without_main():
        assert launcher.spawn.get_preparation_data(name).keys() == kept
        raise ZeroDivisionError
    assert launcher.spawn.get_preparation_data is prepare


@pytest.mark.parametrize("end", ["started", "refused", "interrupted"])
def test_a_start_that_no_caller_waits_for_any_more(monkeypatch, end):
    calls = []
    process = SimpleNamespace(kill=lambda: calls.append("killed"), join=lambda: calls.append("gone"))
    spec = SimpleNamespace(rank=1, folder="/own", close=lambda: calls.append("closed"))

    def make(task):
        if end == "refused":
            raise OSError("no more processes")
        task.unwanted = end == "interrupted"
        return process

    monkeypatch.setattr(launcher._Start, "_process", make)
    if end == "refused":
        with pytest.raises(RankError, match=r"rank 1 could not be started: no more processes \(temporary folder: /own"):
            launcher.start(spec)
    else:
        task = launcher._Start(spec)
        task.run()
        assert task.done.is_set() and task.process is process
    assert calls == ["closed"] + ["killed", "gone"] * (end == "interrupted")


def test_which_ranks_have_met(control):
    """What a watch makes of the op logs: only collectives of this command count."""
    watch = object.__new__(Watch)
    watch.control, watch.before, watch.status = control, [1, 1, 2], ["running", "returned", "returned"]
    for r, count in enumerate((1, 1, 2)):
        for _ in range(count):
            control.logs[r].enter(BARRIER, (), 0, 0, None)
            control.logs[r].leave()
    assert [watch.last_op(r) for r in range(3)] == [None] * 3 and not watch._never_met()
    control.logs[0].enter(BARRIER, (), 0, 0, None)  # number 2, which rank 1 has left without
    assert watch.last_op(0).seq == watch.waits_in(0).seq == 2 and watch._never_met()
    control.logs[0].leave()
    assert watch.last_op(0).seq == 2 and watch.waits_in(0) is None and not watch._never_met()
    control.logs[0].enter(BARRIER, (), 0, 0, None)
    control.logs[1].enter(BARRIER, (), 0, 0, None)
    watch.status = ["running", "running", "returned"]
    assert watch._never_met()  # rank 0 waits with number 3, rank 1 is still on its way
    watch.status = ["running", "running", "failed"]
    control.logs[2].enter(BARRIER, (), 0, 0, None)
    watch.status = ["running", "running", "returned"]
    assert not watch._never_met()


@pytest.mark.parametrize("cores, size, asked, threads", [
    (16, 2, None, 7), (2, 2, None, 1), (2, 1, None, 1), (8, 3, None, 2), (1, 1, None, 1),
    (4, 2, "4", 4), (4, 2, "3,1", 3), (16, 2, "", 7), (16, 2, "many", 7), (16, 2, "0", 7)])
def test_cores_are_dealt_out(cores, size, asked, threads, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert threads_per_rank(size) == threads

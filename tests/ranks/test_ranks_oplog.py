"""The op log: order, shapes and call sites; what it keeps, and what it costs."""

import struct
import sys
import timeit

import pytest
import torch

from tplab.ranks import OpRecord, all_gather, all_reduce, barrier, op_log
from tplab.ranks.errors import side_by_side
from tplab.ranks.oplog import RECORDS, OpLog


def test_the_log_has_order_shapes_and_call_sites(run):
    def fn():
        before = len(op_log())
        all_reduce(torch.ones(2, 3))
        all_gather(torch.ones(4, dtype=torch.bfloat16), 0)
        barrier()
        return [(str(r), r.left, r.line, r.file) for r in op_log()[before:]]

    first = fn.__code__.co_firstlineno
    for records in run(fn):
        assert [(text, left, line - first) for text, left, line, _ in records] == [
            ("all_reduce [2, 3] float32", True, 2), ("all_gather [4] bfloat16 dim 0", True, 3), ("barrier", True, 4),
        ]  # fmt: skip
        assert {file for *_, file in records} == {__file__}


def test_the_log_keeps_the_newest(run):
    def fn():
        for i in range(1500):
            all_reduce(torch.ones(i % 5 + 1))
        records = op_log()
        return len(records), records[-1].shape, records[-1].seq - records[0].seq

    assert run(fn) == [(1024, (5,), 1023)] * 3


@pytest.mark.parametrize("differs, head, rows", [
    (20, "(17 earlier ones agree), ≠ marks the first difference:", [18, 19, 20, 21, 22, 23]),
    (2, ", ≠ marks the first difference:", [1, 2, 3, 4, 5]),
    (None, "(24 earlier ones agree), the same operations on all ranks:", [25, 26, 27, 28, 29, 30]),
])
def test_an_error_shows_six_collectives_around_the_first_difference(differs, head, rows):
    logs = [[OpRecord(n, "barrier" if (r, n) == (1, differs) else "broadcast", (), "int64", 0, "", 1, True)
             for n in range(1, 31)] for r in (0, 1)]
    first, _, *lines = side_by_side(logs, {})
    assert first.endswith(head)
    assert [line.split("  broadcast")[0].strip() for line in lines] == [
        f"≠ #{n}" if n == differs else f"#{n}" for n in rows]


def test_the_log_knows_every_file(run):
    """A notebook has hundreds of cells, and each is a file."""
    def fn():
        scope = {"barrier": barrier}
        for i in range(300):
            exec(compile("barrier()", f"<cell {i}>", "exec"), scope)
        exec(compile("barrier()", "long/" * 20 + "x" * 510, "exec"), scope)  # of a long name the end
        return [record.file for record in op_log()[-301:]]

    assert run(fn) == [[*(f"<cell {i}>" for i in range(300)), "/" + "x" * 510]] * 3


def test_a_reader_sees_no_old_record_under_the_new_name_while_it_is_replaced():
    log, frames, seen = OpLog(), [], []
    for name in "old", "new":
        scope = {"sys": sys}
        exec(compile("frame = sys._getframe()", name, "exec"), scope)
        frames.append(scope["frame"])

    class Noted(list):
        def __setitem__(self, index, file):
            seen.append(log.record(log.seq - RECORDS))
            super().__setitem__(index, file)

    for _ in range(RECORDS):
        log.enter(4, (), 0, 0, frames[0])
    log._noted = Noted(log._noted)
    log.enter(4, (), 0, 0, frames[1])
    assert seen == [None] and [log.record(n).file for n in (2, RECORDS + 1)] == ["old", "new"]
    log.clear()
    assert log.records() == [] and log.record(0) is None and log.last_seq() == log.seq == 0


def test_records_after_a_number_begin_behind_it():
    log, frame = OpLog(), sys._getframe()
    for _ in range(5):
        log.enter(4, (), 0, 0, frame)
    assert [record.seq for record in log.records(3)] == [4, 5] and log.records(5) == []


def test_a_record_costs_little():
    """About three times as much as one write of so many numbers; to read a file, or format a stack, costs more."""
    log, frame, numbers, memory = OpLog(), sys._getframe(), struct.Struct("=17q"), bytearray(200)

    def record():
        log.enter(1, (1, 576), 1, 0, frame)
        log.leave()

    ours, one = (min(timeit.repeat(fn, number=500, repeat=20))
                 for fn in (record, lambda: numbers.pack_into(memory, 0, *range(17))))
    assert ours < 8 * one

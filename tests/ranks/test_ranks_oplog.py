"""The op log: order, shapes and call sites; what it keeps, and what it costs."""


import pytest
import torch

from tplab.ranks import OpRecord, all_gather, all_reduce, barrier, op_log
from tplab.ranks.errors import side_by_side


def test_the_log_has_order_shapes_and_call_sites(run):
    def fn():
        all_reduce(torch.ones(2, 3))
        all_gather(torch.ones(4, dtype=torch.bfloat16), 0)
        barrier()
        return [(str(r), r.left, r.line, r.file) for r in op_log()[-3:]]

    first = fn.__code__.co_firstlineno
    for records in run(fn):
        assert [(text, left, line - first) for text, left, line, _ in records] == [
            ("all_reduce [2, 3] float32", True, 1), ("all_gather [4] bfloat16 dim 0", True, 2), ("barrier", True, 3),
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
    (20, "(17 earlier ones look alike), ≠ marks the first difference:", [18, 19, 20, 21, 22, 23]),
    (2, ", ≠ marks the first difference:", [1, 2, 3, 4, 5]),
    (None, "(24 earlier ones look alike), the same operations on all ranks:", [25, 26, 27, 28, 29, 30]),
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

"""What is said of whom when a run has failed: from all that a watch knows to one error, with no process at hand."""

import os
from types import SimpleNamespace

import pytest
import torch

from tplab.pool import failures
from tplab.pool.control_block import ANSWERED_AT
from tplab.pool.transfer import dumps
from tplab.pool.worker import Report
from tplab.ranks import CollectiveMismatch, OpRecord
from tplab.ranks.errors import Cause, Frame


def record(seq, left=False, line=1):
    return OpRecord(seq, "barrier", (), "int64", 0, "a.py", line, left)


def watch_of(status, ops=(), reports=(), died_at=(), crash=(), fn=None, answered=(), ended=(), closed=False):
    """A watch as `failures` reads one: by rank the status, newest collective, report, lines at this moment."""
    size, stopped = len(status), []
    at = dict(enumerate(answered))
    watch = SimpleNamespace(
        status=list(status), reports=[*reports, *[None] * size], died_at=[*died_at, *[0] * size], fn=fn, timeout=0.25,
        ended=set(ended), before=[1] * size, stop=lambda: stopped.append(True), stopped=stopped,
        pool=SimpleNamespace(size=size, closed=closed, timeout=60),
        processes=[SimpleNamespace(rank=r, death=lambda: "SIGKILL", stack=lambda crash, r=r: list(crashes.get(r, ())))
                   for r in range(size)],
        control=SimpleNamespace(word=lambda r, name: at.get(r, 0) if name == ANSWERED_AT else 0,
                                logs=[SimpleNamespace(records=lambda after: [f"after {after}"]) for _ in status]))
    crashes, newest = dict(enumerate(crash)), [*ops, *[None] * size]
    watch.last_op = lambda r: newest[r]
    watch.waits_in = lambda r: newest[r] if newest[r] and not newest[r].left else None
    watch.running = lambda: [r for r, s in enumerate(watch.status) if s == "running"]
    return watch


@pytest.fixture
def said(monkeypatch):
    """The error of a watch, whose logs are no logs here."""
    monkeypatch.setattr("tplab.ranks.errors.side_by_side", lambda logs, causes: [])
    stacks = {}
    monkeypatch.setattr(failures, "snapshot", lambda processes: {p.rank: stacks.get(p.rank, []) for p in processes})

    def error(judge, watch, **places):
        stacks.update({int(name[1:]): frames for name, frames in places.items()})
        found = judge(watch)
        assert watch.stopped
        return found

    return error


def report(text, exception=None, kind="raised", *frames):
    return Report(kind, text, list(frames), exception and dumps(exception))


def kinds(error):
    return [(c.rank, c.kind, c.consequence) for c in error.causes.values()]


AT = Frame("b.py", 4, "f")


def test_the_first_that_failed_by_itself_stands_on_top(said):
    lost = "DistBackendError: Connection reset by peer"
    error = said(failures.failure, watch_of(
        ["failed", "returned", "running", "failed", "failed", "running"],
        [None, None, record(3), None, record(4)],
        [report(lost), None, None, report("ValueError: late", ValueError("late")), report("KeyError", KeyError())],
        answered=[1, 0, 0, 30, 20]), r5=[AT])
    assert error.summary == "rank 4 raised KeyError" and type(error.first.exception) is KeyError
    assert kinds(error) == [(4, "raised", False), (0, "raised", True), (1, "returned", False), (2, "waiting", True),
                            (3, "raised", False), (5, "running", True)]
    assert error.logs == [["after 1"]] * 6 and error.causes[3].at == 30 and error.notes == []


def test_of_a_mismatch_the_ranks_own_words_are_told(said):
    found = CollectiveMismatch("they differ", [Cause(r, "waiting", text) for r, text in enumerate(("calls", "other"))])
    error = said(failures.failure, watch_of(["failed", "failed"], reports=[report("x", found), report("y", found)]))
    assert type(error) is CollectiveMismatch and error.summary == "they differ"
    assert error.causes[1].text == "other"


def test_an_exception_whose_class_is_unknown_here_is_told_by_its_text(said):
    broken = Report("raised", "Own: text", [], b"no pickle")
    assert said(failures.failure, watch_of(["failed"], reports=[broken])).first.exception is None


def test_a_stopped_rank_says_where(said):
    stopped = [report("", None, "stopped", AT), report("", None, "stopped"), report("", None, "stopped")]
    error = said(failures.failure, watch_of(
        ["failed"] * 4, [record(2), record(3), record(3, left=True)], [*stopped, report("X")], answered=[1, 2, 3, 4]))
    assert error.first.rank == 3
    assert [error.causes[r].text for r in range(3)] == ["stopped in barrier at b.py, line 4", "stopped in barrier",
                                                        "stopped"]
    assert all(error.causes[r].consequence for r in range(3))


def test_how_and_where_a_rank_died(said):
    def fn():
        pass

    watch = watch_of(["dead"] * 5, [record(2), record(2), record(2, left=True)], crash=[[AT]], fn=fn,
                     died_at=[50, 40, 30, 20, 60], ended={4})
    error = said(failures.failure, watch)
    assert error.first.rank == 3 and error.summary.startswith("rank 3 died (SIGKILL) in fn, before any collective")
    assert error.first.frames == [Frame(__file__, fn.__code__.co_firstlineno, "fn")]
    assert [error.causes[r].text for r in range(3)] == [
        "died (SIGKILL) at b.py, line 4", "died (SIGKILL) in barrier at a.py, line 1",
        "died (SIGKILL) after barrier at a.py, line 1"]
    assert error.notes == ["rank 4 did not stop and had to be ended.",
                           "The next run starts ranks 0, 1, 2, 3, 4 afresh, with an empty state."]
    watch.fn, watch.status = None, ["returned", "dead", "dead", "dead", "dead"]
    error = said(failures.failure, watch)
    assert error.first.text == "died (SIGKILL)" and error.first.frames == []
    assert error.notes[1].endswith("ranks 1, 2, 3, 4 afresh, with an empty state; the others keep theirs.")


def test_ranks_that_had_to_be_ended_are_counted_in_order(said):
    watch = watch_of(["running"] * 3, ended={2, 0})
    assert said(failures.too_late, watch).notes == [
        "ranks 0, 2 did not stop and had to be ended.",
        "The next run starts ranks 0, 2 afresh, with an empty state; the others keep theirs."]


def test_too_late_and_skipped_name_every_rank(said):
    gloo = [Frame("own.py", 2, "fn"), Frame(os.path.join(os.path.dirname(torch.__file__), "distributed", "c.py"), 9,
                                            "barrier")]
    watch = watch_of(["running", "returned", "running", "running", "running"], [record(5, line=8)])
    error = said(failures.too_late, watch, r2=gloo, r3=[AT])
    parts = ["waits in barrier at a.py, line 8", "returned", "waits in dist.barrier at own.py, line 2",
             "is still running at b.py, line 4", "is still running, in code that does not say where"]
    assert error.summary == "not finished after 0.25 s: " + "; ".join(f"rank {r} {p}" for r, p in enumerate(parts))
    assert error.first.rank == 3 and list(error.causes) == [3, 4, 0, 1, 2]
    assert not any(cause.consequence for cause in error.causes.values())
    error = said(failures.skipped, watch, r2=gloo, r3=[AT])
    assert error.summary.startswith("rank 1 returned; rank 0 waits") and error.first.rank == 0


def test_a_pool_that_was_closed_under_its_run(said):
    assert str(said(failures.failure, watch_of(["dead"], closed=True))) == (
        "the pool was closed while it was running this")

"""Failures on purpose: real ranks, the time each report took, and what is left behind."""

import os

import pytest

from course import lesson
from course.judge.incidents import Incident
from tplab.errors import TplabError
from tplab.pool import RankPool
from tplab.ranks import OpRecord, RankError, errors, rank
from tplab.ranks.errors import Cause, Frame


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


def raises():
    return 1 / (1 - rank())


def test_an_incident_is_told_and_timed(pool, capsys):
    incidents = lesson.Incidents(pool)
    incidents.provoke("a rank raises", raises, within=60)  # on a busy machine too; how fast it is, the ranks' tests say
    assert capsys.readouterr().out.startswith("RankError: rank 1 raised ZeroDivisionError: division by zero\n")
    assert 0 < incidents.happened["a rank raises"].seconds < 60
    assert incidents.errors["a rank raises"].first.rank == 1
    assert incidents.happened["a rank raises"].in_time


def test_ranks_that_an_incident_has_ended_are_back_before_the_next_one_is_timed(pool, monkeypatch):
    incidents, run, seen = lesson.Incidents(pool), RankPool.run, []

    def watched(self, fn, **more):
        seen.append((fn, None in self.pids, more.get("timeout")))
        return run(self, fn, **more)

    incidents.provoke("a rank dies", lambda: os._exit(3) if rank() else None, within=60)
    monkeypatch.setattr(RankPool, "run", watched)
    incidents.provoke("a rank raises", raises, within=60, timeout=50)
    assert seen == [(rank, True, None), (raises, False, 50)]


def test_what_does_not_fail_is_no_incident(pool, monkeypatch):
    incidents = lesson.Incidents(pool)
    with pytest.raises(TplabError, match="nothing: this was to fail on the ranks, and what came was None"):
        incidents.provoke("nothing", rank, within=1)
    monkeypatch.setattr(RankPool, "run", lambda self, fn, **more: fn is rank or 1 / 0)
    with pytest.raises(TplabError, match=r"what came was ZeroDivisionError\('division by zero'\)"):
        incidents.provoke("nothing", raises, within=1)
    assert not incidents.happened


def test_a_report_that_comes_too_late_is_not_in_time():
    assert [Incident(RankError("x"), seconds, 1.0).in_time for seconds in (0.5, 1.0, 1.5)] == [True, True, False]


def test_what_is_left_behind_is_counted_and_marked(pool):
    incidents = lesson.Incidents(pool)
    assert "✗" not in str(incidents.left_behind())
    with RankPool(1):
        more = str(incidents.left_behind())
    assert more.count("✗") == 3, more  # a process, a folder, a file
    assert "✗" not in str(incidents.left_behind())


def test_the_text_of_an_error_is_the_same_whatever_the_cells_number(monkeypatch):
    """nbval runs every cell as In[1]; columns must not be wider for In[17]."""
    def text(number):
        monkeypatch.setattr(errors, "file_label", lambda file: f"cell In[{number}]" if file == "a cell" else file)
        log = [OpRecord(1, "barrier", (), "None", 0, "a cell", 5, False)], [OpRecord(1, "barrier", (), "None", 0,
                                                                                     "b.py", 6, True)]
        cause = Cause(0, "waiting", f"waits in barrier at cell In[{number}], line 5", [Frame("a cell", 5, "f")])
        return lesson.error_text(RankError(f"rank 0 {cause.text}", [cause, Cause(1, "returned", "returned")], log,
                                     ["A note."]))

    assert text(1) == text(17)
    assert text(3).splitlines() == [
        "RankError: rank 0 waits in barrier at line 5", "  line 5, in f", "rank 1 returned", "",
        "collectives of this run, the same operations on all ranks:",
        "      rank 0                    rank 1", "  #1  barrier @ line 5 (waits)  barrier @ b.py, line 6", "A note."]
    assert lesson.error_text(ValueError("x")) == "ValueError: x"
    long = "word " * 30 + "end"
    first, second, code = lesson.error_text(ValueError(f"{long}\n    {long}")).splitlines()
    assert code == f"    {long}" and first.startswith("ValueError: word") and second.strip().endswith("end")

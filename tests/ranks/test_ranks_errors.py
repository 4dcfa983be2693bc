"""The words of a failure: what each part of the message says, and of which rank."""

import os
import pickle
import sysconfig

from tplab.ranks import CollectiveMismatch, OpRecord, RankError
from tplab.ranks.errors import (
    Cause,
    Frame,
    file_label,
    location,
    render,
    waiting,
)


def record(seq, op="barrier", left=True, line=1, file="a.py"):
    return OpRecord(seq, op, (2,), "int64", 0, file, line, left)


def test_a_line_as_the_learner_knows_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    here = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    for file, label in {
        "<%%ranks In[3]>": "cell In[3]", "<stdin>": "<stdin>", f"{tmp_path}/own/a.py": "own/a.py",
        f"{tmp_path}beside/a.py": "a.py", f"{here}/tplab/model/x.py": "tplab/model/x.py", "/else/where/b.py": "b.py",
        sysconfig.get_path("stdlib") + "/json/decoder.py": "json/decoder.py",
        "/env/lib/site-packages/torch/nn/functional.py": "torch/nn/functional.py",
    }.items():
        assert file_label(file) == label and location(file, 7) == f"{label}, line 7"
    assert location("", 7) == "line 7"


def test_a_whole_message(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("first()\nsecond()\nthird()\n")
    at = [Frame(str(tmp_path / "a.py"), n, name) for n, name in ((1, "outer"), (2, ""))]
    error = RankError("it failed", [
        Cause(1, "raised", "raised X", at), Cause(0, "running", "is still running", at[1:]),
        Cause(2, "died", "died", at[:1], consequence=True), waiting(3, record(1), "waits"),
        Cause(4, "raised", "raised Y", at[:1]), Cause(5, "died", "died too", at[1:]),
    ], [[], []], ["a note"])
    assert str(error).split("\n") == [
        "it failed", "  a.py, line 1, in outer", "    first()", "  a.py, line 2", "    second()",
        "rank 0 is still running", "  a.py, line 2", "    second()", "rank 2 died (a consequence)",
        "rank 3 waits at a.py, line 1", "rank 4 raised Y", "  a.py, line 1, in outer", "    first()",
        "rank 5 died too", "  a.py, line 2", "    second()", "a note",
    ]  # fmt: skip
    assert error.first.rank == 1 and list(error.causes) == [1, 0, 2, 3, 4, 5]
    (tmp_path / "a.py").write_text("first()\nanother_one()\n")
    assert "    another_one()" in render(error).split("\n"), "a line as it was before the file was edited"
    error.logs = [[record(1)], []]
    assert render(error).split("\n")[-4:-1] == ["collectives of this run, ≠ marks the first difference:",
                                                "      rank 0                  rank 1",
                                                "≠ #1  barrier @ a.py, line 1  -"]


def test_a_refusal_has_no_cause_and_jupyter_shows_the_class_once():
    error = RankError("no\nroom")
    assert (error.first, error.causes, error.logs, error.notes) == (None, {}, [], [])
    assert error._render_traceback_() == ["RankError: no", "room"]


def test_a_failure_travels_without_what_cannot():
    class Local(Exception):
        pass

    back = pickle.loads(pickle.dumps(
        RankError("it failed", [Cause(1, "raised", "raised X", exception=Local())], [[record(1)]], ["a note"])))
    assert (back.summary, back.first.exception, back.logs, back.notes) == ("it failed", None, [[record(1)]], ["a note"])
    made = CollectiveMismatch("as told", [waiting(0, record(1))])
    assert type(back := pickle.loads(pickle.dumps(made))) is CollectiveMismatch and back.summary == "as told"
    made = CollectiveMismatch.of([record(1), record(1, "broadcast")], "strict")
    assert str(pickle.loads(pickle.dumps(made))) == str(made)
    assert made.summary.startswith("strict: rank 0 calls barrier at ") and made.first.rank == 0

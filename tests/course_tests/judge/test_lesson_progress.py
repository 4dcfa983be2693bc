"""What was solved is kept in a file of the user's: once, with when, and the cell of the latest right answer."""

import pytest
from helpers.answers import defined

from course import lesson
from course.judge import progress_file

CELL = 'limit = float("-inf")\ndef mask_scores(scores, mask):\n    return scores.masked_fill(mask, limit)\n'


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TPLAB_PROGRESS", str(tmp_path / "deep" / "progress.json"))
    monkeypatch.setattr(progress_file, "SOLVED", {})


def right(scores, mask):
    return scores.masked_fill(mask, float("-inf"))


def row():
    (found,) = [line.split() for line in str(lesson.progress()).splitlines() if " mask_scores" in line]
    return found


def test_when_it_was_solved_first_stands_and_the_latest_right_cell(monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form, *_: f"{form} first")
    assert progress_file.load() == {} and row() == ["01", "mask_scores"]
    progress_file.note("mask_scores", right)
    monkeypatch.setattr("time.strftime", lambda form, *_: "later")
    progress_file.note("mask_scores", defined(CELL, "mask_scores"))
    assert progress_file.load() == {"mask_scores": {"solved": "%Y-%m-%d %H:%M first", "code": CELL}}
    assert row() == ["01", "mask_scores", "%Y-%m-%d", "%H:%M", "first"]
    assert str(lesson.progress()).splitlines()[-1].split()[0] > "11"
    lesson.clear_progress()
    assert progress_file.load() == progress_file.SOLVED == {} and row() == ["01", "mask_scores"]


def test_where_the_file_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TPLAB_PROGRESS", "~/attempt.json")
    assert progress_file.path() == tmp_path / "attempt.json"
    monkeypatch.delenv("TPLAB_PROGRESS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert progress_file.path() == tmp_path / "data" / "tplab" / "progress.json"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert progress_file.path() == tmp_path / ".local" / "share" / "tplab" / "progress.json"


@pytest.mark.parametrize("text", ["{", "[]", '{"mask_scores": 3}'])
def test_a_damaged_file_is_named_and_left_alone(text, capsys):
    progress_file.path().parent.mkdir()
    progress_file.path().write_text(text)
    progress_file.note("mask_scores", right)
    told = capsys.readouterr().out
    assert "(progress is not kept: " in told and "remove it to begin anew" in told
    assert progress_file.path().read_text() == text and progress_file.SOLVED == {"mask_scores": right}


def test_a_folder_that_cannot_be_made_costs_no_verdict(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPLAB_PROGRESS", str(tmp_path / "file" / "progress.json"))
    progress_file.note("mask_scores", right)
    assert "(progress is not kept: " in capsys.readouterr().out


NOTE = """
from course.judge import progress_file

progress_file.note("mask_scores", lambda scores, mask: scores)
print(sorted(progress_file.load()))
"""


def test_a_notebook_run_as_a_batch_is_nobodys_work(monkeypatch, tmp_path):
    """papermill, nbconvert and nbval send cells and say that nobody can be asked; JupyterLab says the opposite."""
    from jupyter_client.manager import start_new_kernel

    monkeypatch.delenv("TPLAB_PROGRESS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        told = []
        for somebody in (False, True):
            client.execute_interactive(NOTE, allow_stdin=somebody, stdin_hook=lambda message: None, timeout=120,
                                       output_hook=lambda message: told.append(message["content"].get("text", "")))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "".join(told).split("\n")[:2] == ["[]", "['mask_scores']"]
    assert (tmp_path / "tplab" / "progress.json").exists()

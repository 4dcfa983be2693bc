"""What was solved is kept in a file of the user's: once, with when and after how many different answers."""

import json

import pytest

from course import lesson
from course.judge import progress_file


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TPLAB_PROGRESS", str(tmp_path / "deep" / "progress.json"))


def wrong(scores, mask):
    return scores


def other(scores, mask):
    return scores * 2


def right(scores, mask):
    return scores.masked_fill(mask, float("-inf"))


def hand_in(*answers):
    for answer in answers:
        lesson.judge(answer, "fable", [5, 6, 7], tensor_parallel_size=1, name="mask_scores")
    return progress_file.load()["mask_scores"]


def test_each_different_answer_is_a_try_and_solving_ends_the_count(capsys):
    kept = hand_in(wrong, wrong, other, right)
    assert kept["tries"] == 3 and kept["solved"][:2] == "20"
    assert hand_in(wrong, right) == kept
    assert progress_file.SOLVED["mask_scores"] is right


def test_when_it_was_solved_first_stands_and_its_latest_cell(monkeypatch, capsys):
    monkeypatch.setattr("time.strftime", lambda form: f"{form} the first time")
    hand_in(wrong, right)
    monkeypatch.setattr("time.strftime", lambda form: "later")
    kept = hand_in(lambda scores, mask: scores.masked_fill(mask, -float("inf")))
    assert kept["solved"] == "%Y-%m-%d %H:%M the first time" and kept["tries"] == 2 and "lambda" in kept["code"]


def test_an_answer_may_be_a_class_and_a_long_cell_is_not_kept():
    from helpers.answers import defined

    one = defined("class MyPool:\n    def take(self):\n        return self.users.pop()\n", "MyPool")
    assert progress_file.source(one) == "class MyPool:\n    def take(self):\n        return self.users.pop()\n"
    for length, is_kept in ((20_000, True), (20_001, False)):
        code = "def f(): pass\n#"
        assert (progress_file.source(defined(code + "x" * (length - len(code) - 1), "f")) is not None) == is_kept
    assert progress_file.source(len) is None


def test_a_tilde_is_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TPLAB_PROGRESS", "~/attempt.json")
    assert progress_file.path() == tmp_path / "attempt.json"


def test_the_table_counts_the_tries_of_what_is_not_solved_yet(capsys):
    lesson.clear_progress()  # nothing is there to be forgotten
    hand_in(wrong, other)
    row = next(line for line in str(lesson.progress()).splitlines() if "mask_scores" in line)
    assert row.split() == ["01", "mask_scores", "2"]
    assert str(lesson.progress()).splitlines()[-1].split()[0] == "11"


def test_another_answer_is_no_try_any_more_once_it_is_solved(capsys):
    kept = hand_in(wrong, right)
    assert len(kept["answers"]) == 2
    assert hand_in(lambda scores, mask: scores.masked_fill(mask, -float("inf")), other)["answers"] == kept["answers"]


def test_the_table_shows_it_and_clear_forgets_it(capsys):
    hand_in(wrong, right)
    row = next(line for line in str(lesson.progress()).splitlines() if "mask_scores" in line)
    assert row.split()[0] == "01" and row.split()[-1] == "2"
    lesson.clear_progress()
    assert progress_file.load() == {} and progress_file.SOLVED == {}
    assert "2" not in next(line for line in str(lesson.progress()).splitlines() if "mask_scores" in line)[2:]


def test_without_the_variable_it_lies_in_the_users_data_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("TPLAB_PROGRESS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert progress_file.path() == tmp_path / "tplab" / "progress.json"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert progress_file.path() == tmp_path / "me" / ".local" / "share" / "tplab" / "progress.json"


@pytest.mark.parametrize("text", ["{", "[]", '{"mask_scores": 3}', '{"mask_scores": {"answers": 2}}'])
def test_a_damaged_file_is_named_and_left_alone(text, capsys):
    progress_file.path().parent.mkdir()
    progress_file.path().write_text(text)
    verdict = lesson.judge(right, "fable", [5, 6, 7], tensor_parallel_size=1, name="mask_scores")
    assert verdict.passed
    told = capsys.readouterr().out
    assert "PASS  mask_scores" in told and "(progress is not kept: " in told and "remove it to begin anew" in told
    assert progress_file.path().read_text() == text


def test_a_folder_that_cannot_be_made_costs_no_verdict(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TPLAB_PROGRESS", str(tmp_path / "file" / "progress.json"))
    assert lesson.judge(right, "fable", [5, 6, 7], tensor_parallel_size=1, name="mask_scores").passed
    assert "(progress is not kept: " in capsys.readouterr().out


def test_what_an_older_version_kept_of_an_exercise_that_is_gone_stays(capsys):
    progress_file.path().parent.mkdir()
    progress_file.path().write_text(json.dumps({"gone": {"answers": ["a"], "solved": "2026-01-01 10:00", "tries": 1}}))
    hand_in(right)
    assert progress_file.load()["gone"]["solved"] == "2026-01-01 10:00"


def test_the_cell_of_the_latest_right_answer_is_kept(capsys):
    from helpers.answers import defined

    code = 'limit = float("-inf")\ndef mask_scores(scores, mask):\n    return scores.masked_fill(mask, limit)\n'
    hand_in(wrong, right)
    kept = hand_in(defined(code, "mask_scores"), wrong)
    assert kept["code"] == code and kept["tries"] == 2
    assert hand_in(right)["code"].startswith("def right(scores, mask):\n")


CELL = """
from course.judge import progress_file

progress_file.note("mask_scores", lambda scores, mask: scores, passed=True)
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
            client.execute_interactive(CELL, allow_stdin=somebody, stdin_hook=lambda message: None, timeout=120,
                                       output_hook=lambda message: told.append(message["content"].get("text", "")))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert "".join(told).split("\n")[:2] == ["[]", "['mask_scores']"]
    assert (tmp_path / "tplab" / "progress.json").exists()

"""What an exercise needs: checks, caught errors, code side by side, the environment."""

import pytest

from course import figures, lab, lesson
from course.lab import doctor


def test_a_shown_error_is_printed_and_the_notebook_goes_on(capsys):
    with lesson.shown_error():
        raise ValueError("split_sizes sum to 96")
    assert capsys.readouterr().out == "ValueError: split_sizes sum to 96\n"


def test_what_a_learner_is_to_write_is_folded_until_it_is_opened():
    folded = figures.side_by_side("x = 1", "x = 2", folded="when yours passes <1>")._repr_mimebundle_()["text/html"]
    assert folded.startswith("<details><summary>when yours passes &lt;1&gt;</summary>")
    assert "<details" not in figures.side_by_side("x = 1", "x = 2")._repr_mimebundle_()["text/html"]


def test_side_by_side_marks_the_lines_that_differ():
    shown = figures.side_by_side("def f(x):\n    return x * 0\n", "def f(x):\n    y = 1 < x\n    return y\n")
    html = shown._repr_mimebundle_()["text/html"]
    assert html.count("✗ ") == 1 + 1 and html.count("✓ ") == 1 + 2  # a heading each, one line and two lines
    assert "1 &lt; x" in html
    assert str(shown) == "broken:\n    def f(x):\n        return x * 0\n\n" \
                         "right:\n    def f(x):\n        y = 1 < x\n        return y"


def test_cores_are_those_that_this_process_may_use(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 3, 5} if pid == 0 else set(), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert lesson.available_cores() == 3
    monkeypatch.delattr("os.sched_getaffinity")
    assert lesson.available_cores() == 1
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert lesson.available_cores() == 6


def test_the_environment_is_ok_or_names_the_remedy(monkeypatch):
    monkeypatch.setattr(doctor, "models", lambda: [doctor.Finding("model fable: gone", "git checkout"),
                                                   doctor.Finding("model smollm2: not here", "fetch", essential=False)])
    table = lab.environment()
    assert table.frame.loc["packages", "state"] == "ok"
    assert table.frame.loc["the model fable", "state"] == "model fable: gone → git checkout"
    assert "✗ model fable" in str(table) and "smollm2" not in str(table)


@pytest.mark.parametrize("answer, says", [("lambda positions, keys: None",
                                           "With positions [[0, 1, 2, 3, 4]], 5 keys: it returns nothing"),
                                          ("[1, 2]", "it is [1, 2]; define a function that takes")])
def test_an_answer_without_a_name_of_its_own_is_known_by_the_one_that_stands_for_it(answer, says, capsys):
    exec(f"my_mask = {answer}\nlesson.judge(my_mask)", {"lesson": lesson})
    assert f"NOT YET my_mask: {says}" in " ".join(capsys.readouterr().out.split())

"""What an exercise needs: caught errors, the environment, answers without a name."""

import pytest

from course import lab, lesson
from course.lab import doctor


def test_a_shown_error_is_printed_and_the_notebook_goes_on(capsys):
    with lesson.shown_error():
        raise ValueError("split_sizes sum to 96")
    assert capsys.readouterr().out == "ValueError: split_sizes sum to 96\n"


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

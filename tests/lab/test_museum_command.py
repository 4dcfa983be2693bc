"""``python -m tplab faults``: what it lists, and the score's options, files and exit code."""

import json

import pytest

from tplab import cli
from tplab.faults import score as scoring
from tplab.faults.score import EXACT, HEALTHY, UNSEEN, Run, Score
from tplab.lab import museum


def run(name, outcome):
    return Run("fable", 2, "float32", name, (name,) if outcome == EXACT else (), outcome)


@pytest.fixture
def asked(monkeypatch):
    """What the score was asked for; it finds ``asked.score``."""
    class Asked:
        score, arguments = Score((run(None, HEALTHY), run("nan_mask", EXACT))), None

    def stand_in(*arguments):
        Asked.arguments = arguments
        return Asked.score

    monkeypatch.setattr(scoring, "score", stand_in)
    return Asked


def test_the_score_takes_models_ranks_and_dtypes(asked, capsys, tmp_path):
    files = [str(tmp_path / "s.json"), str(tmp_path / "s.png")]
    assert cli.main(["faults", "score", "fable", "smollm2", "--tp", "1,4", "--dtype", "float64", "--json", files[0],
                     "--picture", files[1]]) == 0
    assert asked.arguments[:3] == (["fable", "smollm2"], [1, 4], ["float64"]) and asked.arguments[3] >= 1
    assert "1 named exactly" in capsys.readouterr().out
    assert json.loads((tmp_path / "s.json").read_text())[1] == {
        "model": "fable", "tensor_parallel_size": 2, "dtype": "float32", "fault": "nan_mask", "said": ["nan_mask"],
        "outcome": "exact", "true": []}
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"


def test_a_number_of_ranks_that_is_said_twice_is_run_once(asked, monkeypatch):
    monkeypatch.setattr(museum, "available_cores", lambda: 7)
    assert cli.main(["faults", "score", "--tp", " 3, 1,,3", "--dtype", "float64,float64 "]) == 0
    assert asked.arguments[:4] == ([], [3, 1], ["float64"], 7)


def test_without_options_it_is_what_the_help_says_and_something_unseen_is_exit_code_1(asked):
    asked.score = Score((run("nan_mask", UNSEEN),))
    assert cli.main(["faults", "score"]) == 1
    assert asked.arguments[:3] == ([], [2, 3], ["float32", "bfloat16"])


@pytest.mark.parametrize("options, words", [
    (["score", "--tp", "0"], "--tp takes numbers of ranks from 1 up"), (["score", "--tp", "two"], "not 'two'"),
    (["score", "--dtype", "int8"], "int8"), (["nan_mask", "--tp", "3"], "--tp belongs to the score"),
    (["--picture", "x.png"], "--picture belongs to the score"), (["score", "--json", "/no/such/folder/x"], "no folder"),
    (["score", "no-such-folder"], "no folder 'no-such-folder'"), (["nan_mask", "score"], "no fault 'score'"),
])
def test_what_makes_no_sense_is_said_before_any_work(options, words, capsys):
    assert cli.main(["faults", *options]) != 0
    assert words in capsys.readouterr().err

"""The learner's own engine: all solutions together write what Hugging Face writes; what is missing or lost is said."""

import pytest
from helpers.answers import defined
from helpers.notebooks import solutions

from tplab import lesson, open_checkpoint
from tplab.align import hf_greedy
from tplab.lesson import progress_file
from tplab.lesson.own_engine import Pieces
from tplab.lesson.pieces import PIECES

IDS = list(range(5, 24))
PROMPTS = [IDS, IDS[:14] + [40, 41], IDS[3:8]]


@pytest.fixture(autouse=True)
def own_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TPLAB_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr(progress_file, "SOLVED", {})


@pytest.fixture(scope="module")
def reference():
    fable = open_checkpoint("fable")
    return [hf_greedy(fable, prompt, 12) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def solved():
    return {name: defined(code, name) for name, code in solutions(lesson.all_exercises()).items() if name in PIECES}


def test_every_piece_is_an_exercise(solved):
    assert set(solved) == set(PIECES)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_solutions_together_write_what_hugging_face_writes(size, solved, reference):
    assert lesson.your_engine(Pieces(solved), "fable", PROMPTS, 12, tensor_parallel_size=size) == reference


def test_so_do_they_under_the_engines_own_loop_and_without_a_loader_of_their_own(solved, reference):
    some = Pieces({name: one for name, one in solved.items() if name not in ("my_generate", "my_load")})
    assert lesson.your_engine(some, "fable", PROMPTS, 12) == reference


@pytest.mark.parametrize("name", PIECES)
def test_each_piece_is_really_asked(name, solved, capsys):
    """An answer that is empty where it stands must be noticed."""
    class Empty:
        def __init__(self, *args):
            raise ZeroDivisionError("this piece was asked")

    def empty(*args, **kwargs):
        raise ZeroDivisionError("this piece was asked")

    broken = Empty if isinstance(solved[name], type) else empty
    if name == "my_apply_rope":
        def broken(self, q, k, cos, sin):
            raise ZeroDivisionError("this piece was asked")
    assert lesson.your_engine(Pieces({name: broken}), "fable", [IDS], 4) == [[]]
    assert "this piece was asked" in capsys.readouterr().out


def hand_in(name, code):
    answer = defined(code, name)
    progress_file.note(name, answer, passed=True)
    progress_file.SOLVED.clear()  # another notebook, another process


def test_pieces_come_from_what_was_kept_and_the_rest_is_the_labs(solved, reference, capsys):
    hand_in("my_slot_mapping", solutions(lesson.all_exercises())["my_slot_mapping"])
    hand_in("my_key", "n = 3\nprint('a cell that calls')\ndef my_key(parent, ids): return hash((parent, tuple(ids)))")
    assert capsys.readouterr().out == ""
    pieces = lesson.own_pieces()
    assert set(pieces) == {"my_slot_mapping", "my_key"}
    whose = {line.split()[1]: line.rsplit("  ", 1)[1].strip() for line in str(pieces).splitlines()[2:]}
    assert {name for name, who in whose.items() if who == "yours"} == set(pieces) and set(whose) == set(solved)
    assert lesson.your_engine(pieces, "fable", PROMPTS, 12) == reference


def test_a_piece_that_cannot_be_defined_any_more_is_said_in_a_line(capsys):
    hand_in("my_key", "def my_key(parent, ids): return 1")
    kept = progress_file.path()
    kept.write_text(kept.read_text().replace("def my_key", "base = ids_of_another_cell\\ndef my_key"))
    assert lesson.own_pieces() == {}
    assert capsys.readouterr().out == ("my_key: what was kept cannot be defined by itself (NameError: name "
                                       "'ids_of_another_cell' is not defined); the lab's stands in\n")


def test_a_piece_that_fails_stops_it_in_words(solved, capsys):
    code = "def my_embedding(ids, weight_here, rows):\n    return nowhere[ids]"
    assert lesson.your_engine(Pieces({"my_embedding": defined(code, "my_embedding")}), "fable", [IDS], 4) == [[]]
    assert capsys.readouterr().out == ("your engine stops: on every rank: NameError: name 'nowhere' is not defined\n"
                                       "at your line 2: return nowhere[ids]\n")

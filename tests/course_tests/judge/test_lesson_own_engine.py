"""The learner's own engine: all solutions together write what Hugging Face writes; what is missing or lost is said."""

import re

import pytest
from helpers.answers import defined
from helpers.notebooks import solutions

from course import lesson
from course.exercises.own_engine import Pieces, pieces
from course.judge import progress_file
from tplab import open_checkpoint
from tplab.align import hf_greedy

pytestmark = pytest.mark.pool

PIECES = pieces()
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


@pytest.mark.parametrize("size", [1, 3])
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
    progress_file.note(name, answer)
    progress_file.SOLVED.clear()  # another notebook, another process


def test_pieces_come_from_what_was_kept_and_the_rest_is_the_labs(solved, reference, capsys):
    hand_in("my_positions", solutions(lesson.all_exercises())["my_positions"])
    hand_in("my_key", "n = 3\nprint('a cell that calls')\ndef my_key(parent, ids): return hash((parent, tuple(ids)))\n"
            "mine = lesson.judge(my_key)")
    assert capsys.readouterr().out == ""
    attempt = lesson.own_pieces()
    assert set(attempt) == {"my_positions", "my_key"}
    whose = {line.split()[1]: line.rsplit("  ", 1)[1].strip() for line in str(attempt).splitlines()[2:]}
    assert {name for name, who in whose.items() if who == "yours"} == set(attempt) and set(whose) == set(solved)
    assert lesson.your_engine(attempt, "fable", PROMPTS, 12) == reference


@pytest.mark.parametrize("code, why", [
    ("base = ids_of_another_cell\\ndef my_key", "NameError: name 'ids_of_another_cell' is not defined"),
    ("= 3\\ndef my_key", "SyntaxError: invalid syntax (<answer ??>, line 1)"), ("def their_key", "KeyError: 'my_key'")])
def test_a_piece_that_cannot_be_defined_any_more_is_said_in_a_line(code, why, capsys):
    hand_in("my_key", "def my_key(parent, ids): return 1")
    kept = progress_file.path()
    kept.write_text(kept.read_text().replace("def my_key", code))
    assert lesson.own_pieces() == {}
    said = re.sub(r"<answer \d+>", "<answer ??>", capsys.readouterr().out)
    assert said == f"my_key: what was kept cannot be defined by itself ({why}); the lab's stands in\n"


def test_a_piece_may_call_one_of_an_earlier_cell(reference):
    hand_in("my_column_shard", "def my_column_shard(source, rows):\n    return source[rows.start:rows.stop]")
    hand_in("my_merged", "def my_merged(sources, ranges):\n"
            "    return torch.cat([my_column_shard(*pair) for pair in zip(sources, ranges)])")
    assert lesson.your_engine(lesson.own_pieces(), "fable", PROMPTS, 12) == reference


def test_a_piece_that_fails_stops_it_in_words(solved, capsys):
    code = "def my_embedding(ids, weight_here, rows):\n    return nowhere[ids]"
    assert lesson.your_engine(Pieces({"my_embedding": defined(code, "my_embedding")}), "fable", [IDS], 4) == [[]]
    assert capsys.readouterr().out == ("your engine stops: on every rank: NameError: name 'nowhere' is not defined\n"
                                       "at your line 2: return nowhere[ids]\n")


def test_a_loader_is_not_asked_where_tensors_are_fused():
    broken = Pieces({"my_load": lambda ckpt, plan, r: 1 / 0})
    assert lesson.your_engine(broken, lesson.fused_copy(open_checkpoint("fable")), [IDS], 3) != [[]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_layers_of_the_solution_write_what_hugging_face_writes(size):
    fable, layer = open_checkpoint("fable"), defined(solutions(["MyLayer"])["MyLayer"], "MyLayer")
    assert lesson.written(layer, fable, IDS, 12, tensor_parallel_size=size) == hf_greedy(fable, IDS, 12)


def test_without_a_layer_of_ones_own_or_where_it_does_not_fit_the_engine_writes():
    fable = open_checkpoint("fable")
    for layer, ckpt in ((None, fable), (lambda *args: 1 / 0, lesson.fused_copy(fable))):
        assert lesson.written(layer, ckpt, IDS, 3) == hf_greedy(fable, IDS, 3)

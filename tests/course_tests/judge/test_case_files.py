"""The case files: each is seen, named and mended; what is wrong is refused in words; runs are counted; it is sealed."""

import builtins
import dis
import inspect
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.faults import nothing_is_patched
from helpers.notebooks import read, solution_code, tagged
from helpers.solved_cases import Solved

from course import lesson
from course.cases import CASES, NOWHERE, code_at, edited, engines_own, places
from course.cases.answering import _chosen, kinds, place_called
from course.cases.repairing import one_thread_if_small
from course.cases.sealed import CaseError
from course.judge import progress_file
from course.judge.answers import greedy
from course.judge.words import NotYet
from course.lab.batch import FOLDER
from tplab.align import floors
from tplab.checkpoint import open_checkpoint
from tplab.patch import applied, original

pytestmark = pytest.mark.pool

each_case = pytest.mark.parametrize("file", CASES.values(), ids=list(CASES))


@pytest.fixture(scope="module")
def ckpt():
    return open_checkpoint("fable")


def answers(file):
    """A right answer: where, what, why."""
    right = next(why for why, wrong in file.why.items() if not wrong)
    return [bug.place for bug in file.bugs] or [NOWHERE], list(file.kinds), right


@each_case
def test_a_case_is_seen_named_and_mended_and_what_hides_it_is_refused(file, ckpt):
    """On two and on three ranks by turns."""
    with one_thread_if_small(ckpt.config):
        solved = Solved(lesson.open_case(file.number, ckpt, tensor_parallel_size=2 + file.number % 2))
    assert not solved.wrong
    assert (solved.seen == NOWHERE) == (not file.bugs)
    assert len(solved.hidden) == len(file.false_repairs) >= 1
    assert all(re.search("In production|still wrong", said) for said in solved.hidden), solved.hidden
    assert nothing_is_patched()


@each_case
def test_wrong_answers_are_refused_in_words(file, ckpt, capsys):
    case, (where, what, why) = lesson.open_case(file.number, ckpt), answers(file)
    assert case.answer(where, what, why).passed
    refused = [case.answer(place, what, why) for place in (*file.elsewhere, "gumbel_noise", "no_such_place", "")]
    others = [kind for kind in kinds() if kind not in what]
    refused += [case.answer(where, kind, why) for kind in (*others[:2], "")]
    refused += [case.answer(where, what, wrong) for wrong, says in file.why.items() if says]
    refused.append(case.answer(where, what))
    assert len(refused) >= 8 and all(one.sentence and not one.passed for one in refused)
    assert len({one.sentence for one in refused}) >= 6
    said = capsys.readouterr().out
    assert said.count("NOT YET") == len(refused) and "Traceback" not in said
    assert all(len(line) <= 110 for line in said.splitlines())


@each_case
def test_a_case_file_is_complete(file):
    assert sum(not wrong for wrong in file.why.values()) == 1 and len(file.why) >= 3
    assert len(file.hints) >= 2 and all(one.endswith((".", "?")) for one in file.hints)
    assert file.report.endswith(".") and file.production.endswith(".")
    assert all(bug.place in places() for bug in file.bugs) and set(file.elsewhere) <= set(places())
    for bug in file.bugs:
        assert all(original(target) is bug.right is not bug.wrong for target in places()[bug.place])


@each_case
def test_a_case_is_sealed_from_a_casual_look(file, ckpt):
    case = lesson.open_case(file.number, ckpt)
    seen = " ".join([str(case), *dir(case), *map(str, case.trial.options)])
    secrets = [bug.fault for bug in file.bugs] + [bug.place for bug in file.bugs] + list(file.kinds)
    assert not [one for one in secrets if one in seen]
    assert not [name for name in dir(case) if name.startswith("_")]


def test_a_refusal_does_not_name_the_bug_for_nothing(ckpt):
    assert lesson.open_case(10, ckpt).mend(CASES["case_10"].false_repairs[0]) == (
        "the reported run is still wrong: layers.0.attn is still not what it should be")


def test_rounding_above_the_floor_is_no_reason_to_refuse_a_repair(ckpt, monkeypatch):
    """As on SmolLM2, where thirty layers' rounding passes the floor on some prompts, and no module is guilty."""
    monkeypatch.setitem(floors.RELATIVE, torch.float32, 1e-9)
    monkeypatch.setitem(floors.LOGITS_RELATIVE, torch.float32, 1e-9)
    monkeypatch.setitem(floors.LOGITS, torch.float32, 1e-9)
    case, file = lesson.open_case(5, ckpt), CASES["case_05"]
    (bug,), (hider,) = file.bugs, file.false_repairs
    assert not case.align(logical=True).ok and not case.mend(bug.right, bug.place)
    assert "still wrong" in case.mend(hider)


def test_runs_are_counted_and_end(ckpt, capsys):
    case = lesson.open_case(1, ckpt)
    report = case.align(logical=True)
    with case.broken():
        pass
    case.code("DecoderLayer.forward")
    assert case.runs_left == 5 and not report.patches and "def forward" in capsys.readouterr().out
    case.diagnose(report)
    case.hint()
    assert case.runs_left == 2 and "Hint 1 of 3: " in capsys.readouterr().out
    assert case.generate(max_tokens=2, logical=True) and case.align(logical=True)
    with pytest.raises(CaseError, match=r"this run costs 1, and 0 of 8 runs are left: .* open the case again"):
        case.align()
    assert lesson.open_case(1, ckpt).runs_left == 8 and nothing_is_patched()


def test_what_cannot_be_opened_is_said(ckpt):
    with pytest.raises(CaseError, match=rf"there is no case 99; there are 1 to {len(CASES)}"):
        lesson.open_case(99, ckpt)
    with pytest.raises(CaseError, match="did you mean 'RowParallelLinear.reduce'"):
        lesson.open_case(1, ckpt).code("RowParallelLinear.redcue")


def test_a_case_that_needs_ranks_says_so(ckpt):
    case = lesson.open_case(1, ckpt, tensor_parallel_size=1)
    assert case.tensor_parallel_size == 2 and "2 ranks, since with 1 nothing is wrong to be seen" in str(case)


@pytest.mark.parametrize("least, heads, wanted, ranks", [
    (1, 8, 1, 1), (2, 8, 1, 2), (4, 8, 1, 4), (4, 8, 4, 4), (4, 3, 1, None), (5, 8, 2, None), (5, 8, 6, 6)])
def test_a_case_is_opened_on_the_fewest_ranks_that_show_it(least, heads, wanted, ranks):
    file = replace(CASES["case_01"], needs=lambda config, size: "" if size >= least else "too few")
    assert file.ranks_for(SimpleNamespace(num_heads=heads), wanted) == ranks


@pytest.mark.parametrize("name, place", [
    ("RowParallelLinear.reduce", "RowParallelLinear.reduce"), ("nowhere", "nowhere"), ("Linear.reduce", None),
    ("linear.RowParallelLinear.reduce", "RowParallelLinear.reduce"), ("forward", None), (3, None)])
def test_a_place_is_called_by_its_whole_name(name, place):
    if place is not None:
        assert place_called(name, list(places())) == place
        return
    with pytest.raises(NotYet, match=f"there is no function {name!r}"):
        place_called(name, list(places()))


@pytest.mark.parametrize("said, meant", [("", None), ("the first", 0), ("the ", None), ("another one", 1), (1, None)])
def test_a_choice_is_said_by_how_it_begins(said, meant):
    options = ["the first of them", "the fifth", "another one"]
    if meant is not None:
        assert _chosen("what", said, options) == options[2 * meant]
        return
    with pytest.raises(NotYet, match=f"{said!r} is none of the choices, or begins several"):
        _chosen("what", said, options)


@pytest.mark.parametrize("repair, says", [
    (None, "there is no repair"), ({}, "there is no repair"), (len, "does not say what it replaces"),
    ({"DecoderLayer.forward": 3}, "a function of the engine is replaced by a function"),
    ({"DecoderLayer.forward": lambda self: self}, "but the replacement takes"),
    ({"DecoderLayer.forward": lambda self, hidden, cos, sin, context: 1 / 0}, "ZeroDivisionError"),
    ({"nowhere": len}, "a function of the engine is replaced by a function"),
    ({"no_such_place": len}, "there is no function 'no_such_place'"),
])
def test_what_is_no_repair_is_refused_in_words(ckpt, repair, says):
    assert says in lesson.open_case(1, ckpt).mend(repair)


def test_a_solved_case_is_kept(ckpt, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TPLAB_PROGRESS", str(tmp_path / "progress.json"))
    case, file = lesson.open_case(1, ckpt), CASES["case_01"]
    place, *_ = (bug.place for bug in file.bugs)
    assert not case.close(*answers(file), {place: file.false_repairs[0][place]})
    assert "case_01" not in progress_file.load()
    assert case.close(*answers(file), file.bugs[0].right)
    assert progress_file.load()["case_01"]["solved"].startswith("20")
    assert re.search(r"11 +case_01 +20\d\d-", str(lesson.progress()))
    said = [line for line in capsys.readouterr().out.splitlines() if line[:1] in "RP"]
    assert [line.split()[0] for line in said[-2:]] == ["RIGHT", "PASS"]


def test_a_right_answer_is_kept_for_the_repair(ckpt, capsys):
    case, file = lesson.open_case(1, ckpt), CASES["case_01"]
    (where, what, why), repair = answers(file), {file.bugs[0].place: file.bugs[0].right}
    case.answer(where, what, next(why for why in file.why if file.why[why]))
    assert not case.close("", "", "", repair)  # a wrong answer is not kept
    assert case.answer(where, what, why).passed and case.close("", "", "", repair)
    assert not lesson.open_case(1, ckpt).close("", "", "", repair) and capsys.readouterr().out.count("PASS") == 1


def test_a_case_follows_the_engine_or_says_that_it_cannot():
    changed = edited("mask_scores", "masked_fill(mask, -> masked_fill(~mask,")
    scores, mask = torch.zeros(1, 1, 2, 2), torch.tensor([[[[False, True], [False, False]]]])
    assert changed(scores, mask).isinf().sum() == 3 and engines_own("mask_scores")(scores, mask).isinf().sum() == 1
    assert "masked_fill(~mask" in inspect.getsource(changed)
    with pytest.raises(ValueError, match="mask_scores of the engine has 0 times 'nowhere'; the case changes one"):
        edited("mask_scores", "nowhere -> there")


@pytest.mark.parametrize("drafts", [0, 2])
def test_case_11_is_repaired_by_the_engines_own_code_also_where_tokens_are_guessed(drafts, ckpt):
    (bug,) = CASES["case_11"].bugs
    assert bug.right is engines_own(bug.place)
    ids = [*range(5, 21)] * 2
    with applied(*bug.repair):
        found = greedy(ckpt, [ids], 12, 1, logical=True, num_speculative_tokens=drafts)
    assert found == greedy(ckpt, [ids], 12, 1, logical=True)


def test_case_03_knows_models_whose_rotation_differs_by_type_of_layer():
    kinds = [{"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}]
    both = dict(zip(("sliding_attention", "full_attention"), kinds))
    config = SimpleNamespace(hf=SimpleNamespace(rope_parameters=both))
    assert CASES["case_03"].needs(config, 2) == ""
    kinds[1]["rope_type"] = "dynamic"
    assert CASES["case_03"].needs(config, 2) == "this model's RoPE (dynamic) is made anew for each text"


@each_case
def test_why_is_asked_when_where_is_right(file, ckpt, capsys):
    """What can be chosen says much about the bug, so nobody must see it before the place is found."""
    case, (where, what, _) = lesson.open_case(file.number, ckpt), answers(file)
    case.choices(), case.answer([*file.elsewhere][:1], what), case.choices()
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("why: asked when where is right") == 2 and not [why for why in file.why if why in said]
    case.answer(where), case.choices()
    said = " ".join(capsys.readouterr().out.split())
    assert all(why in said for why in file.why)


@each_case
def test_a_copy_of_the_code_at_a_place_runs_below_its_imports(file):
    with applied(*file.patches):
        for place in [bug.place for bug in file.bugs] + [*file.elsewhere]:
            space: dict = {}
            exec(code_at(place), space)
            (own,) = [one for one in map(inspect.unwrap, space.values())
                      if inspect.isfunction(one) and one.__globals__ is space]
            assert not {*globals_of(own.__code__)} - space.keys() - vars(builtins).keys()


def test_the_code_at_a_place_is_what_stands_there_now():
    assert "masked_fill" in code_at("mask_scores") and "\n\ndef forward" in code_at("DecoderLayer.forward")


@each_case
def test_a_solution_runs_in_an_empty_cell_and_is_what_the_case_calls_right(file):
    cells = tagged(read(FOLDER / "11_case_files.ipynb"), "solution")
    space: dict = {}
    exec(solution_code(cells[file.number - 1]), space)
    assert {*space["repair"]} == ({bug.place for bug in file.bugs} or {NOWHERE})
    assert space["where"] and space["what"] and space["why"] and all(map(callable, space["repair"].values()))
    own = [one for one in space.values() if inspect.isfunction(one) and one.__globals__ is space]
    assert not {name for one in own for name in globals_of(one.__code__)} - space.keys() - vars(builtins).keys()


def globals_of(code):
    """The global names that code reads, also in the functions inside it."""
    inner = [name for one in code.co_consts if inspect.iscode(one) for name in globals_of(one)]
    return [*inner, *(one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL")]


def test_all_places_at_once_are_no_answer_and_what_is_none_is_refused_in_words(ckpt, capsys):
    case = lesson.open_case(1, ckpt)
    assert not case.answer(where=list(case._places), what="a", why="a").passed
    assert capsys.readouterr().out.endswith("places are named; a case has one or two\n")
    assert not case.answer(where=torch.ones(2), what="a", why="a").passed
    assert "there is no function tensor([1., 1.])" in capsys.readouterr().out
    for size in ("2", 0, 2.5):
        with pytest.raises(CaseError, match="tensor_parallel_size must be a whole number from 1 up"):
            lesson.open_case(1, ckpt, tensor_parallel_size=size)

"""An open case's instruments: what each run is asked for, what it costs, and what is printed, without an engine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers.faults import nothing_is_patched
from helpers.reports import make_report

from course import lesson
from course.cases import CASES, Trial, sealed
from course.cases.repairing import unseen
from course.cases.sealed import CaseError, OpenCase
from tplab.align import Diagnosis
from tplab.checkpoint import open_checkpoint
from tplab.errors import TplabError

IDS = list(range(5, 45))
FABLE = open_checkpoint("fable")


def opened(trial=None, ranks=2, prompt=IDS, **changed):
    trials = {} if trial is None else {"trials": lambda take: (trial,)}
    return OpenCase(replace(CASES["case_01"], **trials, **changed), FABLE, prompt, ranks)


@pytest.fixture
def asked(monkeypatch):
    """Every run that an instrument makes, while the engine is broken."""
    runs = []

    def instrument(name):
        def run(ckpt, prompts, **options):
            assert ckpt is FABLE and not nothing_is_patched()
            runs.append((name, [list(one) for one in prompts], options))
            return "a report"

        return run

    for name in ("align", "align_decode"):
        monkeypatch.setattr(sealed, name, instrument(name))
    return runs


def test_the_reported_run_or_another_one_is_traced(asked):
    case, common = opened(), {"tensor_parallel_size": 2, "patches": ()}
    assert case.align() == case.align([[7, 8]], dtype="float64") == case.align(tensor_parallel_size=1) == "a report"
    assert asked == [("align", [IDS[:26]], common), ("align", [[7, 8]], {**common, "dtype": "float64"}),
                     ("align", [IDS[:26]], {**common, "tensor_parallel_size": 1})]
    assert case.runs_left == 5 and nothing_is_patched()


@pytest.mark.parametrize("trial, given, new, left", [
    (Trial("", [IDS[:9]]), {}, 5, {}), (Trial("", [IDS[:9]], 3, {"block_size": 8}), {}, 3, {"block_size": 8}),
    (Trial("", [IDS[:9]], 3, {"block_size": 8, "seed": 1}), {"new_tokens": 2, "block_size": 16}, 2,
     {"block_size": 16, "seed": 1})])
def test_a_decode_path_is_the_reported_one_where_nothing_else_is_said(asked, trial, given, new, left):
    case = opened(trial)
    case.align_decode(**given), case.align_decode([[7, 8, 9, 10]], **given)
    assert asked == [("align_decode", rows, {"tensor_parallel_size": 2, "patches": (), "new_tokens": new, **left})
                     for rows in ([IDS[:9]], [[7, 8, 9, 10]])]
    assert case.runs_left == 6


def test_a_trial_with_new_tokens_is_decoded_and_its_options_are_kept(asked):
    case = opened(Trial("", [IDS[:9]], 4, {"block_size": 8}))
    with case.broken():
        case._run(case.trial, ["a patch"], block_size=2, logical=True)
        case._run(Trial("", [IDS[:3]], 0, {"dtype": "float64"}))
    assert asked == [
        ("align_decode", [IDS[:9]], {"tensor_parallel_size": 2, "patches": ["a patch"], "new_tokens": 4,
                                     "block_size": 2, "logical": True}),
        ("align", [IDS[:3]], {"tensor_parallel_size": 2, "patches": (), "dtype": "float64"})]


@pytest.fixture
def engine(monkeypatch):
    """What the sealed engine is asked to write: it continues each prompt by its length."""
    runs = []

    class Engine:
        def __init__(self, *given, **options):
            assert not nothing_is_patched()
            runs.append((*given[1:], options))

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

        def generate(self, prompts, params, use_tqdm):
            runs.append((prompts, params.temperature, params.max_tokens, params.ignore_eos, use_tqdm))
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(len(prompt), 7))]) for prompt in prompts]

    monkeypatch.setattr("tplab.LLM", Engine, raising=False)
    return runs


def test_the_reported_run_is_shown_beside_hugging_faces(engine, monkeypatch, capsys):
    counts = []
    monkeypatch.setattr(sealed, "hf_greedy", lambda ckpt, prompt, count: counts.append(count) or [len(prompt), 7 + (
        len(prompt) > 15)])
    case, decode = opened(Trial("", [IDS[:36], IDS[:15]], 14)), FABLE.tokenizer().decode
    case.show()
    assert capsys.readouterr().out.splitlines() == [
        f"prompt 0 (22 tokens) …{decode(IDS[14:22])!r}", f"    Hugging Face: {decode([22, 8])!r}",
        f"    this engine:  {decode([22, 7])!r}", f"prompt 1 (1 tokens) …{decode(IDS[:1])!r}",
        f"    Hugging Face: {decode([1, 7])!r}", "    this engine:  the same"]
    assert counts == [14, 14] and engine[1][2] == 14 and case.runs_left == 8 and nothing_is_patched()
    opened(Trial("", [IDS[:3]], 2)).show()
    assert counts[2:] == [12] and engine[-1][2] == 12
    capsys.readouterr()
    opened(user_output=lambda ckpt, ranks: f"{ckpt.name} on {ranks} " + "ranks " * 30).show()
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("fable on 2 ranks ranks") and len(said) == 2 and len(counts) == 3


def test_the_diagnosis_costs_three_runs_and_says_all_its_lines(monkeypatch, capsys):
    case, report = opened(), make_report({"logits": 1.0})
    monkeypatch.setattr(type(report), "diagnosis_lines", lambda self: ["1. one " + "word " * 30, "2. two"])
    monkeypatch.setattr(sealed, "diagnose", lambda found: Diagnosis(None, f"about {type(found).__name__}"))
    case.diagnose(report)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("1. one word") and said[1].startswith("   word") and said[2] == "2. two"
    case.diagnose(TplabError("it stopped"))
    monkeypatch.setattr(type(report), "diagnosis_lines", lambda self: [])
    assert capsys.readouterr().out == "about TplabError\n" and case.runs_left == 2
    with pytest.raises(CaseError, match="the diagnosis costs 3, and 2 of 8 runs are left"):
        case.diagnose(report)
    case.runs_left = 3
    case.diagnose(report)
    assert case.runs_left == 0 and capsys.readouterr().out == "about AlignReport\n"


def test_hints_come_in_their_order(capsys):
    case = opened(hints=("Look.", "Look there."))
    case.hint(), case.hint(), case.hint()
    assert capsys.readouterr().out.splitlines() == [
        "Hint 1 of 2: Look.", "Hint 2 of 2: Look there.", "There are no more hints."]
    assert case.runs_left == 8


def test_the_solution_costs_what_is_left(capsys):
    case = opened(story="One looks.", sources=(("There it was.", "https://a.b/c"), ("And there.", "https://a.b/d")))
    case.solution()
    assert case.runs_left == 0 and capsys.readouterr().out.splitlines() == [
        "One looks.", "In the wild: There it was.", "  https://a.b/c", "In the wild: And there.", "  https://a.b/d"]


@pytest.mark.parametrize("ranks, asked, words", [(1, 1, "1 rank."), (3, 3, "3 ranks."), (
    3, 2, "3 ranks, since with 2 nothing is wrong to be seen.")])
def test_the_report_says_how_many_ranks_ran(ranks, asked, words):
    case = opened(Trial("a prompt", [IDS[:3]]), asked, report="With {ranks} it is wrong.", title="It is",
                  needs=lambda config, size: "" if size >= ranks else "too few")
    assert str(case) == f"Case 1: It is\n\nWith {ranks} it is wrong.\n\nThe run: a prompt; {words} Budget: 8 runs."
    assert repr(case) == str(case)  # what a cell shows whose last line is the case
    assert (case.number, case.title, case.asked_ranks, case.tensor_parallel_size) == (1, "It is", asked, ranks)


def test_a_case_reads_the_prompt_that_it_is_given_and_begins_again_where_it_ends():
    assert opened(prompt=[7, 8, 9]).trial.prompts == [([7, 8, 9] * 9)[:26]]
    case = opened(prompt="")
    assert case.prompt == lesson.default_prompt(FABLE)
    assert case.trial.prompts == opened(prompt=lesson.default_prompt("fable")).trial.prompts
    assert opened(prompt="Once").prompt == "Once"
    with pytest.raises(CaseError, match="case 1 cannot show with fable on up to four ranks"):
        opened(needs=lambda config, size: "never")


def test_a_case_is_called_by_its_number_or_its_name():
    assert lesson.open_case(3)._file is lesson.open_case("case_03")._file is CASES["case_03"]
    for wrong in ("case_3", "three", 0):
        with pytest.raises(CaseError, match=f"there is no case {wrong!r}; there are 1 to {len(CASES)}"):
            lesson.open_case(wrong)


def test_unseen_tokens_are_others_with_every_seed_and_go_on():
    config = SimpleNamespace(config=SimpleNamespace(vocab_size=50))
    take, again, other = unseen(config, 3), unseen(config, 3), unseen(config, 4)
    first = take(40)
    assert first == again(40) != other(40) and take(40) != first and len(first) == 40
    assert 0 <= min(first) and 40 < max(first) < 50


def test_an_answer_that_is_right_is_kept_for_the_repair_and_no_other(monkeypatch):
    case, given = opened(), []
    monkeypatch.setattr(sealed, "judge_answer", lambda file, *said: (
        given.append(said[:3]) or said[0] == "place", "" if said[2] == "w" else "no"))
    monkeypatch.setattr(sealed, "judge_repair", lambda case, *repair: "")
    assert not case.answer("other", "kind", "x").passed and not case.found and not case.close()
    assert case.answer("place", "kind", "w").passed and not case.answer("other", "kind", "x").passed and case.found
    assert case.close()
    for one in ({"where": "p"}, {"what": "k"}, {"why": "y"}):
        case.close(**one)
    assert given[1::3] == [("", "", ""), ("place", "kind", "w"), ("", "", "y")]
    assert given[5:7] == [("p", "", ""), ("", "k", "")]

"""Answers and repairs judged without an engine: what is run, in which order, and what is said of what came."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from course.cases import CASES, NOWHERE, Bug, Trial, answering, case_09, places, repairing
from course.cases.answering import judge_answer
from course.judge.words import NotYet
from tplab.align import Diagnosis

KNOWN = list(places())
BUGS = (Bug("RowParallelLinear.reduce", len, "a sum", "missing"),
        Bug("mask_scores", len, "a mask", "no_mask"))
FILE = replace(CASES["case_01"], bugs=BUGS, why={"right": "", "it is slow": "it is quick"}, elsewhere={
    "attend": "it attends to what it gets"}, production="It costs.",
    trials=lambda take: [Trial(f"trial {at} {take}", []) for at in range(3)])


def refused(function, *args, **kwargs):
    with pytest.raises(NotYet) as caught:
        function(*args, **kwargs)
    return str(caught.value)


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where, what, why, says", [
    (["RowParallelLinear.reduce", "mask_scores"], ["a sum", "a mask"], "right", ""),
    ({"mask_scores", "RowParallelLinear.reduce"}, ("a mask", "a sum"), "right", ""),
    ([], [], "", "where is not answered: name the function"),
    ("mask_scores", "", "", "mask_scores: yes, and that is not all: with this alone mended the engine is still wrong "
     "(1 more to find)"),
    (["mask_scores", "mask_scores"], "", "", "(1 more to find)"),
    (["mask_scores", "attend"], "", "", "not attend: it attends to what it gets (mask_scores: yes)"),
    (["attend"], "", "", "not attend: it attends to what it gets"),
    ("nowhere", "", "", "not nowhere: something is wrong in it"),
    ("DecoderLayer.forward", "", "", "not DecoderLayer.forward: what it makes of what it is given is right; a wrong"),
    (["RowParallelLinear.reduce", "mask_scores"], [], "", "where is right; what is not answered"),
    (["RowParallelLinear.reduce", "mask_scores"], ["a sum"], "", "so is 'a sum'; the other bug is of another kind"),
    (["RowParallelLinear.reduce", "mask_scores"], ["a sum", "a third"], "", "where is right; what is not 'a third'"),
    (["RowParallelLinear.reduce", "mask_scores"], ["a sum", "a mask"], "", "why is not answered"),
    (["RowParallelLinear.reduce", "mask_scores"], ["a sum", "a mask"], "it is slow", "why is not: it is quick")])
def test_where_then_what_then_why(where, what, why, says, monkeypatch, capsys):
    monkeypatch.setattr(answering, "kinds", lambda: ["a mask", "a sum", "a third"])
    found, wrong = judge_answer(FILE, where, what, why, KNOWN)
    assert bool(wrong) == bool(says) and says in wrong
    assert found == (not says or "where is right" in wrong or "where and what are right" in wrong)
    said = capsys.readouterr().out
    assert said == "RIGHT  case 1: where, what and why.\n" if not says else said.startswith("NOT YET  case 1: ")


def test_an_innocent_engine_is_blamed_nowhere(monkeypatch):
    innocent = replace(FILE, bugs=(), what="the input")
    monkeypatch.setattr(answering, "kinds", lambda: ["the input", "another"])
    assert judge_answer(innocent, NOWHERE, "the input", "right", KNOWN) == (True, "")
    said = judge_answer(innocent, [NOWHERE, "attend"], "the input", "right", KNOWN)
    assert said == (False, "not attend: it attends to what it gets"), "nowhere is no function that is right"


# ---- repairs ---------------------------------------------------------------------------------------------------------


def case(heads=9, size=2, run=None, file=FILE):
    config = SimpleNamespace(num_heads=heads, num_layers=3, hidden_size=8, intermediate_size=8)
    return SimpleNamespace(checkpoint=SimpleNamespace(config=config), tensor_parallel_size=size, trial="reported",
                           _run=run, _file=file, _places=KNOWN)


def report(logs=(), **more):
    return SimpleNamespace(checkpoint=case().checkpoint, op_logs=[[0] * count for count in logs], **more)


@pytest.fixture
def runs(monkeypatch):
    """Every run of the judge; ``runs.wrong`` says which of them, by its number, is not what it should be."""
    made = SimpleNamespace(asked=[], wrong={}, reports={})

    def run(case, trial, patches, size, logical=False):
        made.asked.append((trial if isinstance(trial, str) else trial.says, patches, size, logical))
        if (number := len(made.asked) - 1) in made.wrong:
            raise NotYet(made.wrong[number])
        return made.reports.get(number, report([7]))

    monkeypatch.setattr(repairing, "_run", run)
    monkeypatch.setattr(repairing, "unseen", lambda ckpt, seed: seed)
    return made


@pytest.mark.parametrize("heads, size, sizes", [(9, 2, [2, 4, 3, 1]), (3, 3, [3, 2, 1]), (2, 1, [1, 2])])
def test_a_repair_runs_as_reported_then_on_fresh_tokens_with_every_number_of_ranks(heads, size, sizes, runs):
    said = repairing._examine(case(heads, size), ("attempt",), 100)
    mended = (*FILE.patches, "attempt")
    first = [("reported", mended, size, False), *((f"trial {at} 100", mended, size, False) for at in range(3))]
    assert runs.asked == first + [(f"trial 0 {100 + at}", mended, more, True) for at, more in enumerate(sizes[1:], 1)]
    assert said.endswith(f"fresh tokens with {', '.join(map(str, sorted(sizes)))} ranks.")


@pytest.mark.parametrize("number, says", [
    (0, "the reported run is still wrong: q is off."),
    (1, "it hides the symptom: the reported run is right now; with fresh tokens, on 2 ranks, trial 0 5 is not. q is "
     "off. In production: It costs."),
    (6, "with fresh tokens, on 1 rank, trial 0 8 is not. q is off. In production: It costs.")])
def test_what_is_still_wrong_is_said_with_the_run_in_which_it_is(number, says, runs):
    runs.wrong[number] = "q is off."
    assert refused(repairing._examine, case(), (), 5).endswith(says) and len(runs.asked) == number + 1


def test_a_repair_may_not_cost_a_collective_more(runs):
    runs.reports = {0: report([7, 7]), 3: report([7, 9])}
    assert refused(repairing._examine, case(), (), 5).startswith(
        "the numbers are right, and a forward pass has 2 collectives more than it needs")


@pytest.mark.parametrize("found, says", [
    (Diagnosis(None, "fine"), ""),
    (Diagnosis("missing", "the sum is missing", "layers.0.mlp"), "layers.0.mlp is still not what it should be"),
    (Diagnosis("other", "another bug", "layers.0.q"), "another bug"),
    (Diagnosis(None, "who knows", "layers.0.q"), "layers.0.q is not what it should be")])
def test_its_own_bugs_name_is_not_given_away(found, says, monkeypatch):
    monkeypatch.setattr(repairing, "diagnose", lambda report: found)
    asked = []

    def run(*given, **options):
        asked.append((given, options))
        return report(ok=found.ok, guilty=["layers.0.q"], recording=SimpleNamespace(contradictions=[]))

    made = case(run=run)
    call = (made, "trial", ("p",), 3, True)
    assert (refused(repairing._run, *call) if says else repairing._run(*call) and "") == says
    assert asked == [(("trial", ("p",)), {"tensor_parallel_size": 3, "logical": True})]


def test_what_examines_a_function_says_what_is_wrong(monkeypatch, capsys):
    def examine(function, *given):
        seen.append(given)
        return function(3)

    seen, made = [], case(file=replace(FILE, examine=examine))
    monkeypatch.setattr(repairing, "one_thread_if_small", lambda config: nullcontext(seen.append(config)))
    assert repairing.judge_repair(made, lambda n: f"{n} is right", seed=0) == ""
    assert seen[:2] == [made.checkpoint.config, (made.checkpoint, 2, 0)]
    assert capsys.readouterr().out == "PASS  case 1: 3 is right\n"
    repairing.judge_repair(made, lambda n: "well " * 30, seed=0)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and max(map(len, said)) <= 110 and said[1].startswith("      well")

    def wrong(n):
        raise ValueError(f"{n} is wrong")

    assert repairing.judge_repair(made, wrong) == "3 is wrong"
    assert capsys.readouterr().out == "NOT YET  case 1: 3 is wrong\n" and 0 <= seen[-1][2] < 2**31
    assert repairing.judge_repair(made, lambda n: n / 0).startswith("ZeroDivisionError: division by")


def test_a_test_is_told_how_many_broken_engines_it_fails(monkeypatch):
    right, wrong = torch.zeros(2), torch.ones(2)
    engines = [("one", right, True), ("other", right, True), ("bug", wrong, False), ("bug", wrong, False)]
    monkeypatch.setattr(case_09, "logits", lambda folder, ranks, seed: (engines, right, right))
    judged = case_09.examine(lambda ours, theirs, exact: torch.equal(ours, theirs), SimpleNamespace(folder="f"), 3, 0)
    assert "on fresh tokens, 3 ranks and others, and fails 2 broken ones" in judged

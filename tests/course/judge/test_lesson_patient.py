"""The exercises of notebook 09 in patient zero's own engine, and cures that last for one call."""

import sys
from inspect import unwrap
from types import SimpleNamespace

import pytest
from helpers.answers import Right, answers, defined

from course import lesson
from course.judge import patient
from course.lab.batch import FOLDER
from tplab.errors import TplabError

sys.path.insert(0, str(FOLDER))

from patient_zero import linear  # noqa: E402


def right(name):
    code = next(one.code for one in answers()[name] if isinstance(one, Right))
    return defined(code, name)


def report(sentences=(), contradictions=(), first="logits"):
    return SimpleNamespace(first_divergence=SimpleNamespace(name=first), verdict="bug" if sentences or contradictions
                           else "clean", diagnoses=[SimpleNamespace(sentence=one) for one in sentences],
                           recording=SimpleNamespace(contradictions=list(contradictions)), open_questions=[])


@pytest.mark.parametrize("name, place, seen", [
    ("apply_rope", "attention.apply_rope", report()), ("kv_share", "linear.kv_share", report()),
    ("generate", "model.TensorParallelModel.generate", ([1, 2], [1, 2]))])
def test_what_passes_is_kept_and_was_tried_in_the_engine(name, place, seen, capsys):
    given, answer = {}, right(name)
    verdict = lesson.judge(answer, engine=lambda cures: given.update(cures) or seen)
    assert verdict.passed and verdict.function is answer and unwrap(given[place]) is answer
    assert capsys.readouterr().out.startswith(f"PASS  {name}: ")


@pytest.mark.parametrize("name, seen, words", [
    ("apply_rope", report(["q is off"], first="layers.3.q_rope"), "in the engine, q is off"),
    ("kv_share", report((), ["heads on no rank"]), "in the engine, heads on no rank"),
    ("generate", ([1, 3, 2], [1, 2, 2]), "in the engine, 1 of 3 tokens are Hugging Face's")])
def test_what_only_the_engine_shows_is_said_and_the_lab_goes_on_with_its_own(name, seen, words, capsys):
    verdict = lesson.judge(right(name), engine=lambda cures: seen)
    assert verdict.sentence == words and verdict.function is getattr(patient, name)
    assert capsys.readouterr().out == f"NOT YET  {name}: {words}\n"


def test_an_engine_that_fails_is_said_in_a_line(capsys):
    def fails(cures):
        raise TplabError("no ranks today")

    assert lesson.judge(right("kv_share"), engine=fails).sentence.startswith("TplabError: no ranks today\n")


def test_cures_stand_for_one_call_only():
    seen = lesson.with_cures({"linear.share": lambda total: "cured"}, lambda total: linear.share(total), 8)
    assert seen == "cured" and linear.share(8) == (0, 8)

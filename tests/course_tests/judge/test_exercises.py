"""The exercises prove themselves: references right, mistakes wrong and unlike; what learners answer is judged so."""

import inspect
import re

import pytest
from helpers.answers import answers, defined
from helpers.notebooks import solutions

from course import lesson
from course.judge.verdict import mistake, outcomes_of, right_ones

pytestmark = pytest.mark.pool

EXERCISES = lesson.all_exercises()
JUDGED = [name for name, one in EXERCISES.items() if one.notebook != "09"]  # those: in patient zero
ANSWERS = answers()
IDS = list(range(5, 24))
PROMPTS = {"05": [IDS[:17], IDS[3:9]]}  # what stands in the place of a notebook's own prompt
SOLUTIONS = solutions(EXERCISES)


def judged(name, answer, size, **options):
    options = {"prompt": PROMPTS.get(EXERCISES[name].notebook, IDS), "tensor_parallel_size": size, **options}
    return lesson.judge(answer, **options, name=name)


@pytest.mark.parametrize("name", JUDGED)
def test_the_reference_is_right_and_each_mistake_is_wrong_in_its_own_way(name):
    exercise = EXERCISES[name]
    examples, right = right_ones(exercise)
    assert len(examples) > 1 and all(one.is_right() for one in right), [one.error for one in right]
    for sentence in exercise.mistakes:
        for ways in outcomes_of(exercise, sentence):
            assert not all(one.is_right() for one in ways), f"no mistake: {sentence}"
            assert mistake(exercise, ways) == sentence


@pytest.mark.parametrize("name", EXERCISES)
def test_the_reference_is_the_notebooks_solution_word_for_word(name):
    assert inspect.getsource(EXERCISES[name].reference).rstrip() in SOLUTIONS[name]


@pytest.mark.parametrize("name, options", [
    ("my_rope", {"dtype": "float64"}), ("my_attend", {"dtype": "float64"}), ("my_spread", {"prompt": ""}),
    ("my_moe", {"dtype": "bfloat16", "model": "fable-moe"})])
def test_a_solution_passes_with_other_parameters_of_the_notebook(name, options):
    assert judged(name, defined(SOLUTIONS[name], name), 2, **options).passed


@pytest.mark.parametrize("number", range(len(ANSWERS)), ids=lambda number: f"{ANSWERS[number][0]}-{number}")
def test_what_a_learner_answers_is_judged_rightly_and_briefly(number, capsys):
    name, is_right, code = ANSWERS[number]
    verdict = judged(name, defined(code, name), 1 + number % 3 if is_right else 2)
    printed = capsys.readouterr().out
    lines = re.sub(r"\n {11}(?=\S)", " ", printed.rstrip("\n")).splitlines()
    assert verdict.passed == is_right, printed
    assert printed.startswith(f"PASS  {name}: " if is_right else f"NOT YET  {name}: ") and len(lines) <= 3, printed
    assert "Traceback" not in printed and "site-packages" not in printed and "tplab/" not in printed, printed
    assert "cannot be judged" not in printed and "It is computed" not in printed, printed
    assert all(len(line) <= 100 or len(line.split()) == 1 for line in printed.splitlines()), printed


def test_every_exercise_has_answers_and_they_come_in_the_order_of_the_series():
    wrong = [name for name, is_right, _ in ANSWERS if not is_right]
    assert not [name for name in JUDGED if not 5 <= wrong.count(name) <= 10] and {*wrong} <= {*JUDGED}
    notebooks = [one.notebook for one in EXERCISES.values()]
    assert notebooks == sorted(notebooks) and notebooks[0] == "01"

"""What learners answer, right and wrong, to every exercise of the series: data, and one verdict for each.

``verdicts.txt`` keeps what each answer is told, word for word, and with what each check calls an answer: a sentence
that names another place, or a case that has fallen out, is seen there. Where the new words are the better ones,
``TPLAB_VERDICTS=tests/lesson/verdicts.txt pytest tests/lesson/test_exercises.py`` (with ``-k NAME`` for one exercise)
keeps them.
"""

import os
import re
from pathlib import Path

import pytest
import torch
from helpers.answers import Right, Wrong, answers, defined
from helpers.notebooks import solutions

from course import lesson
from course.judge.attempt import Attempt
from course.judge.verdict import Setting, Verdict

pytestmark = pytest.mark.pool

ANSWERS = answers()
IDS = list(range(5, 24))
PROMPTS = {"05": [IDS[:17], IDS[3:9]]}  # what stands in the place of a notebook's own prompt
SOLUTIONS = solutions(lesson.all_exercises())
KEPT = Path(__file__).with_name("verdicts.txt")
# Behind it come words of Python's, roundings of a machine's, or what the rank says that was the first to fail.
_NOT_OURS = re.compile(r"in the engine|on (?:every rank|ranks? [\d, ]+): |\w*(?:Error|Exception|Exit)\b")


def judged(name, answer, size, capsys) -> tuple[Verdict, str]:
    prompt = PROMPTS.get(lesson.all_exercises()[name].notebook, IDS)
    verdict = lesson.judge(answer, "fable", prompt, tensor_parallel_size=size, name=name)
    return verdict, capsys.readouterr().out


def lines(printed: str) -> list[str]:
    """What was said, line by line; a long one goes on behind a deeper indent."""
    return re.sub(r"\n(?: {11}| {8})(?=\S)", " ", printed.rstrip("\n")).splitlines()


@pytest.fixture(scope="module")
def kept():
    """Called with a line that must be among those kept; with TPLAB_VERDICTS it takes its place there."""
    rows = {of(line): line for line in KEPT.read_text(encoding="utf-8").splitlines()}
    out = os.environ.get("TPLAB_VERDICTS")

    def keep(line):
        assert out or rows.get(of(line)) == line, f"{KEPT.name} has: {rows.get(of(line))}\nnow it is: {line}"
        rows[of(line)] = line

    yield keep
    if out:
        Path(out).write_text("".join(f"{line}\n" for line in rows.values()), encoding="utf-8")


def of(line: str) -> str:
    """Whose line of those kept it is: ``my_mask 3 on 2:`` or ``my_mask is called with``."""
    return " ".join(line.split()[:4])


class Watched(Setting):
    """What an answer is tried with; ``asked``: whether a check has looked at the number of ranks."""

    asked = False

    def __getattribute__(self, name):
        if name == "tensor_parallel_size":
            Watched.asked = True
        return super().__getattribute__(name)


@pytest.mark.parametrize("name, number", [(name, number) for name, given in ANSWERS.items()
                                          for number in range(len(given))])
def test_an_answer_gets_its_verdict(name, number, capsys, kept, monkeypatch):
    """On one to three ranks; where nobody has asked how many there are, the others would bring nothing new."""
    monkeypatch.setattr("course.judge.verdict.Setting", Watched)
    answer, Watched.asked = ANSWERS[name][number], False
    for size in answer.sizes:
        said = re.sub(r"<answer \d+>", "a cell", " / ".join(lines(told(name, answer, size, capsys))))
        said = " ".join(_NOT_OURS.split(said.partition(f"{name}: ")[2])[0].split())
        kept(f"{name} {number} on {size}: {said}".rstrip())
        if not Watched.asked:
            break


def told(name, answer, size, capsys) -> str:
    verdict, printed = judged(name, defined(answer.code, name), size, capsys)
    if isinstance(answer, Right):
        assert verdict.passed and printed.startswith(f"PASS  {name}: ") and len(lines(printed)) == 1, printed
        return printed
    assert not verdict.passed and printed.startswith(f"NOT YET  {name}: "), printed
    assert " ".join(answer.words.split()) in " ".join(printed.split()), printed
    assert len(lines(printed)) <= 3, printed
    assert "Traceback" not in printed and "site-packages" not in printed and "tplab/" not in printed, printed
    assert "It is computed" not in printed, "where the engine computes it is no hint to a learner"
    assert max(map(len, lines(printed))) <= 300
    assert all(len(line) <= 100 or len(line.split()) == 1 for line in printed.splitlines()), printed
    return printed


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", lesson.all_exercises())
def test_the_solution_of_the_notebook_passes(name, size, capsys, kept, monkeypatch):
    calls, call = set(), Attempt.__call__
    monkeypatch.setattr(Attempt, "__call__", lambda attempt, *args: calls.add(shown(args)) or call(attempt, *args))
    verdict, printed = judged(name, defined(SOLUTIONS[name], name), size, capsys)
    assert verdict.passed, printed
    kept(f"{name} solution on {size}: {' '.join(printed.split())}")
    if size == 2 and calls:
        kept(f"{name} is called with {'; '.join(sorted(calls)[:99])}")


def shown(value) -> str:
    """An argument in a few characters."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype)[6:]} {value.double().cos().sum():.3f}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, int) and abs(value) > 1e9:
        return "a hash"  # another one in every process
    return str(value) if isinstance(value, int | float | str | range) else type(value).__name__


@pytest.mark.parametrize("name, options", [
    ("my_rope", {"dtype": "float64"}), ("my_attend", {"dtype": "float64"}), ("my_spread", {"prompt": ""}),
    ("my_full_width_norm", {"dtype": "float64"}), ("my_moe", {"dtype": "bfloat16", "model": "fable-moe"})])
def test_a_solution_passes_with_other_parameters_of_the_notebook(name, options):
    """In float64 Hugging Face takes its tables and its softmax in float32, which no learner is asked to know."""
    assert lesson.judge(defined(SOLUTIONS[name], name), **{"prompt": IDS, **options}, name=name).passed


def test_every_exercise_has_six_wrong_answers_and_they_come_in_the_order_of_the_series():
    few = {name: sum(isinstance(one, Wrong) for one in ANSWERS.get(name, ())) for name in lesson.all_exercises()}
    assert not {name: count for name, count in few.items() if count < 6}
    assert set(ANSWERS) <= set(few)
    notebooks = [one.notebook for one in lesson.all_exercises().values()]
    assert notebooks == sorted(notebooks) and notebooks[0] == "01"


def test_no_verdict_is_kept_of_an_answer_that_is_gone():
    there = {f"{name} {number}" for name, given in ANSWERS.items() for number in range(len(given))}
    told = {" ".join(line.split()[:2]) for line in KEPT.read_text(encoding="utf-8").splitlines()}
    assert told - there <= {f"{name} {what}" for name in lesson.all_exercises() for what in ("is", "solution")}

"""What learners answer, right and wrong, to every exercise of the series: data, and one verdict for each."""

import os
import re
from pathlib import Path

import pytest
from helpers.answers import Right, Wrong, answers, defined
from helpers.notebooks import solutions

from tplab import lesson
from tplab.lesson.verdict import Verdict

ANSWERS = answers()
IDS = list(range(5, 24))
PROMPTS = {"05": [IDS[:17], IDS[3:9]]}  # what stands in the place of a notebook's own prompt


def judged(name, answer, size, capsys) -> tuple[Verdict, str]:
    prompt = PROMPTS.get(lesson.all_exercises()[name].notebook, IDS)
    verdict = lesson.judge(answer, "fable", prompt, tensor_parallel_size=size, name=name)
    return verdict, capsys.readouterr().out


def lines(printed: str) -> list[str]:
    """What was said, line by line; a long one goes on behind a deeper indent."""
    return re.sub(r"\n(?: {11}| {8})(?=\S)", " ", printed.rstrip("\n")).splitlines()


SOLUTIONS = solutions(lesson.all_exercises())


@pytest.fixture(scope="module")
def table():
    """``{(exercise, its code, verdict): numbers of ranks}``; TPLAB_VERDICTS=FILE writes it, for a person to read."""
    rows = {}
    yield rows
    if out := os.environ.get("TPLAB_VERDICTS"):
        Path(out).write_text("\n".join(
            f"## {name}, ranks {', '.join(map(str, sizes))}\n```python\n{code.strip()}\n```\n"
            f"```\n{printed.rstrip()}\n```\n" for (name, code, printed), sizes in rows.items()))


@pytest.mark.parametrize("size, name, number", [
    (size, name, number) for size in (1, 2, 3) for name, given in ANSWERS.items()
    for number, answer in enumerate(given) if size in answer.sizes])
def test_an_answer_gets_its_verdict(size, name, number, capsys, table):
    answer = ANSWERS[name][number]
    verdict, printed = judged(name, defined(answer.code, name), size, capsys)
    table.setdefault((name, answer.code, printed), []).append(size)
    if isinstance(answer, Right):
        assert verdict.passed and printed.startswith(f"PASS  {name}: ") and len(lines(printed)) == 1, printed
        return
    assert not verdict.passed and printed.startswith(f"NOT YET  {name}: "), printed
    assert " ".join(answer.words.split()) in " ".join(printed.split()), printed
    assert len(lines(printed)) <= 3, printed
    assert "Traceback" not in printed and "site-packages" not in printed and "tplab/" not in printed, printed
    assert max(map(len, lines(printed))) <= 300
    assert all(len(line) <= 100 or len(line.split()) == 1 for line in printed.splitlines()), printed


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", lesson.all_exercises())
def test_the_solution_of_the_notebook_passes(name, size, capsys):
    verdict, printed = judged(name, defined(SOLUTIONS[name], name), size, capsys)
    assert verdict.passed, printed


def test_every_exercise_has_six_wrong_answers():
    few = {name: sum(isinstance(one, Wrong) for one in ANSWERS.get(name, ())) for name in lesson.all_exercises()}
    assert not {name: count for name, count in few.items() if count < 6}
    assert set(ANSWERS) <= set(lesson.all_exercises())

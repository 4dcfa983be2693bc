"""The exercises of the notebooks as data, one file a notebook; a new file, or record, needs no change elsewhere."""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from course.judge.exercise import Exercise
from course.judge.setting import Setting
from course.judge.verdict import Verdict
from course.judge.verdict import judge as judge_answer
from tplab.checkpoint import Checkpoint
from tplab.checks import quoted
from tplab.errors import TplabError


class ExerciseError(TplabError):
    """There is no such exercise; the message says which there are."""


@cache
def all_exercises() -> dict[str, Exercise]:
    """All exercises by name, in the order of the series."""
    files = sorted(file.name for file in iter_modules(__path__) if file.name.startswith("nb"))
    return {exercise.name: exercise for file in files for exercise in import_module(f"{__name__}.{file}").EXERCISES}


def judge(answer: Callable, model: str | Checkpoint = "fable", prompt: str | Sequence[int] = "", *,
          tensor_parallel_size: int = 2, dtype: str = "float32", name: str | None = None,
          engine: Callable | None = None) -> Verdict:
    """Judge a learner's answer on small examples, then in the real model on the ranks, and print the verdict.

    ``name``: the exercise, if the function has another name. Raises `ExerciseError` if there is no such exercise.
    """
    known, names = all_exercises(), sys._getframe(1).f_globals
    called = getattr(answer, "__name__", quoted(answer))  # a lambda and a list have no name of their own
    name = name or (called if called in known else next((n for n in known if names.get(n) is answer), called))
    if name not in known:
        raise ExerciseError(f"there is no exercise {name!r}; there are {', '.join(known)}. "
                            "An answer of another name is judged with name=…")
    return judge_answer(known[name], answer, Setting(model, prompt, tensor_parallel_size, dtype, engine))

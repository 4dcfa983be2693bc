"""The verdict on an answer: right on every example and in the engine, or the mistake that gives just what it gives."""

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from course.judge import progress_file
from course.judge.differ import alike, call_in_words, kind, relation
from course.judge.exercise import Example, Exercise
from course.judge.limit import limited
from course.judge.observe import COLLECTIVES, Outcome, outcome
from course.judge.setting import Setting
from course.judge.words import CALLED, NotYet, in_words
from tplab.checks import counted
from tplab.errors import TplabError
from tplab.show.phrases import in_width

KEEPS = "called again with other numbers, or the same ones, it is wrong: what is kept between calls?"


@dataclass(frozen=True)
class Verdict:
    """What :func:`judge` found."""

    exercise: str
    sentence: str  # what is wrong; the empty string if nothing is
    report: object = field(default=None, repr=False)  # the AlignReport of the answer in the engine, if it got there
    function: Callable | None = field(default=None, repr=False)  # the answer if it passed, else the reference

    @property
    def passed(self) -> bool:
        return not self.sentence

    def _ipython_display_(self) -> None:
        """Shows nothing: what there is to read has been printed."""


def judge(exercise: Exercise, answer, setting: Setting) -> Verdict:
    """Judge an answer: the examples first, then the real model on the ranks. Prints ``PASS`` and what is true of it, or
    ``NOT YET`` and what is wrong in at most three lines; whatever the learner's code does, *Run All* goes on."""
    sentence, name = "", exercise.name
    try:
        remark = examine(exercise, answer, setting)
    except NotYet as wrong:
        sentence = str(wrong)
    except TplabError:  # of what the notebook gave, not of the answer
        raise
    except Exception as error:
        sentence = f"what comes back cannot be judged: {in_words(error).splitlines()[0]}"
    if sentence:
        first, *rest = sentence.splitlines()
        for line in [f"NOT YET  {name}: {first}", *(f"         {line}" for line in rest[:2])]:
            print(in_width(line, " " * 11))
    else:
        ranks = counted(setting.tensor_parallel_size, "rank")
        says = exercise.agreed.format(ranks=ranks) + (f"; {remark}" if remark else "")
        print(in_width(f"PASS  {name}: {says}", " " * 8))
        progress_file.note(name, answer)
    return Verdict(name, sentence, setting.report, exercise.reference if sentence else answer)


def examine(exercise: Exercise, answer, setting: Setting) -> str | None:
    """NotYet at what is wrong, or a remark on what is right."""
    fits_signature(exercise, answer)
    examples, right = right_ones(exercise)
    outcomes: list[Outcome] = []
    for example, must in zip(examples, right):
        outcomes.append(outcome(exercise, answer, example, must))
        if outcomes[-1].kind == "running":  # it would take its time in each of them
            break
    wrong = [n for n, seen in enumerate(outcomes) if not seen.is_right()]
    if not wrong:
        if keeps(exercise, answer):
            raise NotYet(KEEPS)
        for example in exercise.more(setting):
            mine = outcome(exercise, answer, example, outcome(exercise, exercise.reference, example))
            if not mine.is_right():
                raise NotYet("\n".join(described(mine, example)))
        setting.patches = exercise.patches(answer)
        remark = limited(exercise.engine, setting, answer)
        return remark or (exercise.alone if setting.tensor_parallel_size == 1 else None)
    lines = [mistake(exercise, outcomes), *described(outcomes[wrong[0]], examples[wrong[0]])]
    raise NotYet("\n".join(filter(None, lines)))


@cache
def right_ones(exercise: Exercise) -> tuple[list[Example], list[Outcome]]:
    """The examples of an exercise, and what is seen of its reference on each."""
    examples = list(exercise.examples())
    return examples, [outcome(exercise, exercise.reference, example) for example in examples]


@cache
def outcomes_of(exercise: Exercise, sentence: str) -> list[list[Outcome]]:
    """Of each edit of a mistake what is seen of it on each example."""
    examples, right = right_ones(exercise)
    return [[outcome(exercise, variant, *pair) for pair in zip(examples, right)]
            for variant in exercise.variants(sentence)]


def keeps(exercise: Exercise, answer: Callable) -> bool:
    """Whether an answer that was right is wrong when it is called again, or with other contents of the same shapes."""
    for example, must in zip(*right_ones(exercise)):
        turned = Example(*(arg.flip([*range(arg.dim())]) if isinstance(arg, torch.Tensor) else arg for arg in example),
                         ranks=example.ranks)
        for again, wanted in ((example, must), (turned, outcome(exercise, exercise.reference, turned))):
            if not wanted.kind and not outcome(exercise, answer, again, wanted).is_right():
                return True
    return False


def mistake(exercise: Exercise, outcomes: Sequence[Outcome]) -> str:
    """The sentence of the known mistake that gives what a wrong answer gives, wherever that mistake shows."""
    partly, n = "", next(n for n, seen in enumerate(outcomes) if not seen.is_right())
    if outcomes[n].kind.startswith("raised "):
        return ""
    for sentence in exercise.mistakes:
        for ways in outcomes_of(exercise, sentence):
            pairs = list(zip(outcomes, ways))
            if all(mine.same(its) for mine, its in pairs):
                return sentence
            if not ways[n].is_right() and all(mine.same(its) for mine, its in pairs if not its.is_right()):
                partly = partly or sentence
    return partly


def described(mine: Outcome, example: Example) -> list[str]:
    """What is wrong with an example: the error and its line, or what differs first."""
    called_with = call_in_words(mine.exercise.takes, example)
    if mine.kind:
        lines = mine.error.splitlines()
        return lines + [f"It was called with {called_with}"] * (CALLED not in mine.error and len(lines) < 3)
    wrong = sorted(mine.wrong, key=lambda rank: rank[1].what == COLLECTIVES)
    _, seen, says = wrong[0]
    ranks = ranks_in_words([r for r, other, theirs in wrong if other.what == seen.what and theirs == says],
                           example.ranks)
    on = f"on {ranks}{f' of {example.ranks}' * (ranks != 'every rank')}, " if example.ranks > 1 else ""
    on *= ranks != "every rank" or not re.search(r"\brank \d", seen.what)  # it says itself of which rank it speaks
    says = f"the result is right; {says}" if seen.what == COLLECTIVES else says
    same = [name for name, arg in zip(mine.exercise.argument_names, example) if isinstance(arg, torch.Tensor)
            and name in mine.exercise.takes
            and arg.dim() and seen.what.endswith("it returns") and alike(seen.value, arg, 1e-6)]
    says += f". That is {same[0]} as it went in" if same else relation(seen.value, seen.must, mine.exercise.dims)
    return [f"With {called_with}: {on}{says}"]


def ranks_in_words(ranks: Sequence[int], size: int) -> str:
    """``"rank 1"``, ``"ranks 1 and 2"``, ``"every rank"``."""
    if len(ranks) == size > 1:
        return "every rank"
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def fits_signature(exercise: Exercise, answer) -> None:
    takes = ", ".join(exercise.takes)
    if not callable(answer):
        raise NotYet(f"it is {kind(answer)}; define a function that takes ({takes})")
    try:
        inspect.signature(answer).bind(*exercise.takes)
    except TypeError:
        raise NotYet(f"it must take ({takes}); yours takes {inspect.signature(answer)}") from None
    except ValueError:
        pass  # a builtin without a signature: the call will tell

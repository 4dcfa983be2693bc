"""What an answer does on an example: called with copies, on logical ranks, for a limited time."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from course.judge.differ import alike, differs
from course.judge.exercise import Example, Exercise
from course.judge.words import NotYet, in_words
from course.judge.work import unchanged
from tplab.ranks import logical_ranks, op_log, rank
from tplab.ranks.errors import CollectiveMismatch, RankError

LIMIT = 5  # seconds
REFERENCE_LIMIT = 300  # it comes first, and what it needs may still have to be imported, or read
COLLECTIVES = "the number of collectives is"
_ASKS = {"running": "What ends it?", "waiting": "Do all ranks come to the collective, equally often?"}
_ALIKE = ("All ranks must make the same call, with tensors of the same dtype and, where no sizes=[…] are given, of the "
          "same shape")
_NOTHING = "nothing of the kind"


@dataclass
class Seen:
    """One thing that was seen of an answer: ``what`` it is, its value, and what it must be."""

    what: str
    value: object
    must: object
    shown: bool = True  # by the reference too; else the observer has said what it must be


@dataclass
class Outcome:
    """Of each rank what was seen; or the error in the learner's words, and its ``kind``."""

    seen: list[list[Seen]]
    exercise: Exercise
    error: str = ""
    kind: str = ""  # "raised ValueError", "waiting", "running"; of NotYet its words; the empty string without an error

    @cached_property  # every known mistake is compared with it
    def wrong(self) -> list[tuple[int, Seen, str]]:
        """Of each rank the first thing seen that is not as it must be: the rank, that, and how it differs. What was
        seen earliest comes first: the rest may follow from it."""
        wrong = []
        for r, mine in enumerate(self.seen):
            differing = ((n, r, seen, says) for n, seen in enumerate(mine) if (says := differs(
                seen.value, seen.must, self.exercise.within, self.exercise.dims, seen.what)))
            if first := next(differing, None):
                wrong.append(first)
        return [(r, seen, says) for _, r, seen, says in sorted(wrong, key=lambda first: first[:2])]

    def is_right(self) -> bool:
        return not self.kind and not self.wrong

    def same(self, other: "Outcome") -> bool:
        """Whether the first thing that is wrong is the same one of two answers, on every rank."""
        mine, theirs = self.wrong, other.wrong
        return self.kind == other.kind and len(mine) == len(theirs) and all(
            r == s and a.what == b.what and alike(a.value, b.value, self.exercise.within)
            for (r, a, _), (s, b, _) in zip(mine, theirs))


def outcome(exercise: Exercise, answer: Callable, example: Example, right: Outcome | None = None) -> Outcome:
    """What is seen of ``answer`` on each rank, and last how many collectives it took part in; ``right``: what was seen
    of the reference."""
    seen: list[list[Seen]] = [[] for _ in range(example.ranks)]

    def look() -> None:
        known = {thing.what: thing.value for thing in right.seen[rank()] if thing.shown} if right is not None else {}
        _look(exercise, answer, example, seen[rank()], known, is_reference=right is None)

    try:
        with as_it_was():
            logical_ranks(example.ranks, look, timeout=LIMIT if right is not None else REFERENCE_LIMIT)
    except RankError as error:
        return Outcome(seen, exercise, *_told(error, example.ranks == 1))
    return Outcome(seen, exercise)


def _look(exercise: Exercise, answer: Callable, example: Example, seen: list[Seen], known: dict, is_reference: bool):
    """On a rank: what the exercise's observer says of the answer, up to what nothing is known behind."""
    before = max((record.seq for record in op_log()), default=0)
    args, kept = (copy.deepcopy(tuple(example)) for _ in range(2))
    for what, value, *must in exercise.observe(answer, *args):
        is_known = is_reference or bool(must) or what in known
        wanted = must[0] if must else value if is_reference else known.get(what, _NOTHING)
        seen.append(Seen(what, copied(value), copied(wanted), not must))
        if not is_known or must and differs(value, wanted, exercise.within):
            return
    for name, arg, after in zip(exercise.argument_names, kept, args):
        if name != exercise.writes:
            unchanged(name, not differs(after, arg, 0), returns=not (seen and seen[0].value is None))
    if exercise.counted:
        count = sum(record.seq > before for record in op_log())
        seen.append(Seen(COLLECTIVES, count, known.get(COLLECTIVES, count)))
    missing = [what for what in known if what not in {thing.what for thing in seen}]
    seen += [Seen(what, None, known[what]) for what in missing]


def copied(value):
    """A copy of what an answer gives; a generator is refused, which runs no line before it is asked."""
    if inspect.isgenerator(value) or inspect.iscoroutine(value):
        value.close()  # or Python warns that it was never awaited
        raise NotYet(f"it returns a {type(value).__name__}: use def with return, and [… for …], not (… for …)")
    try:
        return copy.deepcopy(value)
    except Exception:  # some objects cannot be copied; they are not what is asked for
        return value


def _told(error: RankError, is_alone: bool) -> tuple[str, str]:
    """The error of a call in at most three lines, and its kind."""
    cause, raised = error.first, error.first.exception
    words = in_words(raised if raised is not None and is_alone else error)
    if isinstance(raised, NotYet):
        return words, str(raised)
    lines = (words.replace("rank 0 is", "it is") if is_alone else words).splitlines()
    is_mismatch = isinstance(error, CollectiveMismatch) and "has returned" not in words
    asks = _ALIKE if is_mismatch else _ASKS.get("waiting" if "has returned" in words else cause.kind, "")
    kind = f"raised {type(raised).__name__}" if cause.kind == "raised" else cause.kind
    return "\n".join([*lines[:2], *[asks] * bool(asks)]), kind


@contextmanager
def as_it_was() -> Iterator[None]:
    """What a learner's code has set for all of torch is put back: the default dtype, the number of threads."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

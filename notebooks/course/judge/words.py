"""What went wrong in a learner's code, in at most three lines: what, at which line, and what the call was given."""

import functools
import linecache
import os
import re
from collections.abc import Sequence

from tplab.ranks.errors import Cause, Frame, RankError, describe, learner_stack, location
from tplab.ranks.oplog import is_machinery

_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
CALLED = " was called with "  # is in the note that says what a call was given
_LONGEST = 240  # characters of one line of a verdict
_IN_A_CHECK = re.compile(r"rank (\d+) calls [^;]* at \S*course/exercises/\S+ line \d+")
CELL = re.compile(r"cell In\[\d+\], ")  # JupyterLab counts cells and nbval does not: stored text cannot have them


class NotYet(Exception):
    """What is wrong with an answer, in the learner's terms: at most three lines."""


def first_cause(error: BaseException) -> BaseException:
    """What an engine's error began with: what the ranks said, or else what was raised first."""
    while not isinstance(error, RankError) and (before := error.__cause__ or error.__context__) is not None:
        error = before
    return error


def in_words(error: BaseException) -> str:
    """An exception of the learner's code in at most three lines: what, and the learner's own line."""
    if isinstance(error, NotYet):
        return str(error)
    if isinstance(error, RankError) and error.first is not None:
        return _of_ranks(error)
    return _lines(describe(error), [frame for frame in learner_stack(error) if is_learners(frame.file)])


def _of_ranks(error: RankError) -> str:
    first: Cause = error.first
    alike = [cause.rank for cause in error.causes.values()
             if cause.kind == first.kind and _short(cause.text) == _short(first.text)]
    who = "on every rank" if len(alike) == len(error.causes) > 1 else f"on rank {', '.join(map(str, sorted(alike)))}"
    frames = [frame for frame in first.frames if is_learners(frame.file)]
    if first.kind == "raised":
        text = first.text.removeprefix("raised ")
        words = text.removeprefix(f"{NotYet.__name__}: ")
        return f"{who}: {words}" if words != text else _lines(f"{who}: {text}", frames)
    summary = error.summary
    for cause in error.causes.values():
        if cause.kind == "running":
            lines = [frame for frame in cause.frames if is_learners(frame.file)]
            summary = summary.replace(f"rank {cause.rank} {cause.text}", f"rank {cause.rank} is still at your line "
                                      f"{lines[-1].line}" if lines else f"rank {cause.rank} is still running")
    said = _IN_A_CHECK.sub(r"rank \1 has returned", CELL.sub("", summary))
    return _lines(said.removeprefix("the ranks meet in different collectives: ") if "has returned" in said else said,
                  frames)


def _lines(what: str, frames: Sequence[Frame]) -> str:
    called_with, lines = next((line for line in what.splitlines() if CALLED in line), ""), [_short(what)]
    if frames:
        source = linecache.getline(frames[-1].file, frames[-1].line).strip()
        lines.append(f"at your line {frames[-1].line}" + (f": {_short(source)}" if source else
                                                         f" ({location(frames[-1].file, frames[-1].line)})"))
    if called_with:
        lines.append(_short(called_with))
    return "\n".join(lines)


def _short(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= _LONGEST else line[:_LONGEST] + " …"


@functools.cache
def is_learners(file: str) -> bool:
    """Whether it is a learner's source, and not a library's."""
    import course
    import tplab

    houses = tuple(house.__file__.rpartition("__init__")[0] for house in (tplab, course))
    return not (is_machinery(file) or file.startswith((*houses, _STANDARD_LIBRARY, "<frozen"))
                or "site-packages" in file)

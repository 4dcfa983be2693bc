"""Checks of what a user gives: numbers (also numpy's and ``Fraction``'s) and texts.

Nothing is converted silently: True is not a number, 2.0 is not a whole number, NaN and infinity are not numbers.
"""

import math
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import groupby
from numbers import Integral, Real

LARGEST = 2**63 - 1  # what fits into a tensor and into a pipe to the ranks


def whole_number(value, low: int = -LARGEST, high: int = LARGEST) -> int | None:
    """``value`` as an int if it is a whole number from ``low`` to ``high``; else None."""
    good = isinstance(value, Integral) and not isinstance(value, bool) and low <= value <= high
    return int(value) if good else None


def number(value, low: float, high: float) -> float | None:
    """``value`` as a float if it is a number from ``low`` to ``high``; else None."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        real = float(value)
    except OverflowError:
        return None
    return real if math.isfinite(real) and low <= real <= high else None


def positive_int(name: str, value, error: type[Exception]) -> int:
    """A size as an int. Raises ``error``, with the same sentence for every size."""
    size = whole_number(value, 1)
    if size is None:
        raise error(f"{name} must be a whole number from 1 up, not {quoted(value)}")
    return size


def quoted(value) -> str:
    """``repr`` for an error message: never longer than a line, and never an error itself."""
    try:
        text = repr(value)
    except Exception:  # an int of more than 4300 digits, or a user's own __repr__
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:150]}…{text[-20:]}"


def counted(count: int, what: str) -> str:
    """``"1 rank"``, ``"2 ranks"``."""
    return f"{count} {what}{'s' * (count != 1)}"


def did_you_mean(name, known: Iterable[str], most: int = 3) -> str:
    """``"; did you mean 'smollm2'?"`` if something like ``name`` is known, else ``""``; ``most``: how many it names."""
    near = get_close_matches(str(name), list(known), most)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def spans(numbers: Iterable[int]) -> list[str]:
    """Whole numbers as texts, one for each run of consecutive numbers: ``["0–5", "7"]``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return [f"{run[0]}–{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]


def span(numbers: Iterable[int]) -> str:
    """The same as one text; long lists are cut: ``"0–5, 7"``, ``"none"``."""
    texts = spans(numbers)
    return ", ".join(texts if len(texts) <= 8 else [*texts[:6], "…", texts[-1]]) or "none"


def readable(text: str, error: type[Exception]) -> str:
    """``text`` itself. Raises ``error`` if no tokenizer can read it.

    Python keeps bytes that are not UTF-8 (on a command line, in a file name) as lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as wrong:
        raise error(f"the text cannot be read: character {wrong.start} is {text[wrong.start]!r}, half of a character "
                    f"(bytes that are not UTF-8 become such); give valid Unicode") from None
    return text

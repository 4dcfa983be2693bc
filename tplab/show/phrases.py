"""Differences as text that is the same on every machine: orders of magnitude, and what left the floor where."""

import math
import re
from collections.abc import Mapping
from textwrap import TextWrapper

from tplab.errors import TplabError


def magnitude(value: float, floor: float = 1e-4) -> str:
    """``3.7`` → ``"4"``, ``0.0123`` → ``"0.01"``: one digit near 1, further away the nearest power of ten.

    Up to the ``floor`` a difference can be rounding, and how large that is, or whether it is 0, depends on the
    processor. So it is only said to be below the next power of ten: ``"less than 1e-4"``, which holds for float32.
    ``floor``: a point's own (``report["logits"].floor``), or 0 for what is not rounding; then 0 is ``"exactly 0"``.
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite"
    if floor and value < (above := 10.0 ** math.ceil(math.log10(floor))):
        return f"less than {above:.0e}".replace("e-0", "e-").replace("e+00", "")
    if value == 0:
        return "exactly 0"
    if 0.0095 <= value < 95:
        return f"{value:.1g}" if value < 9.5 else f"{round(value, -1):.0f}"
    return f"1e{round(math.log10(value)):+d}"


def distance(point) -> float:
    """The difference of a :class:`tplab.align.PointDiff` from Hugging Face, relative to the largest value there.

    A difference between the ranks counts, too. NaN where any rank has NaN or infinity.
    """
    if point.nan or point.inf or not math.isfinite(point.max_abs + point.spread):
        return math.nan
    if point.spread <= point.max_abs:
        return point.relative
    scale = point.max_abs / point.relative if point.relative else 1.0
    return point.spread / scale


def row_distances(report, point: str, label: str = "the report") -> list[float]:
    """Per computed token, in the order of prompt and position, its :func:`distance` at a point of the evidence."""
    if point not in report.evidence:
        raise TplabError(f"{label}: {point!r} is not in its evidence, which has {', '.join(report.evidence)}")
    ours, reference = (values.double() for values in report.evidence[point][:2])
    return ((ours - reference).flatten(1).abs().amax(1) / reference.abs().max()).tolist()


def describe_point(point) -> str:
    """One trace point: ``"inside the floor"``, ``"36 % NaN"`` or ``"1e-2"`` (relative to Hugging Face's values)."""
    if point.inside:
        return "inside the floor"
    for count, what in ((point.nan, "NaN"), (point.inf, "infinite")):
        if count:
            return f"{max(1, round(100 * count / point.size))} % {what}"
    return magnitude(distance(point), floor=0)


def dtype_name(report) -> str:
    """``"float32"``, ``"float64"`` or ``"bfloat16"``."""
    return str(report.dtype).removeprefix("torch.")


def describe_report(report) -> str:
    """What one report says about its model, in one sentence without an end."""
    first = report.first_divergence
    if first is None:
        return f"inside the {dtype_name(report)} floor at every point"
    ends = [f"; logits: {describe_point(point)}" for point in report.points if point.name == "logits"]
    return f"first outside the floor at {first.name} ({describe_point(first)})" + "".join(ends)


def describe(shown) -> str:
    """The text alternative of a figure or drawing; an ``AlignReport``, or ``{label: AlignReport}``, in a sentence.

    The same numbers always give the same text, on any machine: nothing inside the floor is given a number.

        >>> print(show.describe(show.diff_figure({"broken": broken, "fixed": fixed})))
        Figure: largest difference from Hugging Face … broken: first outside the floor at layers.0.attn (36 % NaN) …
    """
    if hasattr(shown, "alt_text"):
        return shown.alt_text
    if isinstance(shown, Mapping):
        return "; ".join(f"{label}: {describe(report)}" for label, report in shown.items())
    if hasattr(shown, "first_divergence"):
        return describe_report(shown)
    raise TplabError(f"there is nothing to describe in {type(shown).__name__}; give a figure of tplab.show or a report")


WIDE = 100  # characters of a printed line: what a notebook's page shows without breaking it inside a word


class _Lines(TextWrapper):
    """Between words, and between special tokens: what a broken model repeats has no spaces."""

    def _split(self, text: str) -> list[str]:
        return [part for part in re.split(r"(\s+|(?<=\|>)(?=<\|))", text) if part]


def in_width(line: str, indent: str = "  ") -> str:
    """A long line as several of at most ``WIDE`` characters, those after the first with ``indent``."""
    return _Lines(WIDE, subsequent_indent=indent, break_long_words=False).fill(line)


def say(*words, sep: str = " ") -> None:
    """``print`` for long lines: no line is wider than a notebook's page, which would break it inside a word.

        >>> show.say("answer:", llm.generate(prompt)[0].outputs[0].text)
    """
    for line in sep.join(map(str, words)).splitlines() or [""]:
        # What is set in columns, or indented, is left as it is.
        print(line if len(line) <= WIDE or line[:1].isspace() else in_width(line))

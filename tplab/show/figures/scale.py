"""The vertical axis of all difference figures: powers of ten, a lane for NaN above, one for exact zero below."""

import math
from collections.abc import Sequence
from itertools import groupby

from tplab.show.figures.style import FAINT, FLOOR, INK, NOTHING, Look

LANE = 1.0  # height of the lanes of NaN and of exact zero, in decades


class DifferenceAxis:
    """Draws lines of relative differences on one matplotlib axes.

    ``lines``: ``{label: values}``; NaN is drawn in the upper lane, called ``lost``, 0 in the lower one; None is not
    drawn. ``floors``: ``{dtype name: relative floor}``, drawn as bands. Everything is drawn at ``log10`` of its value,
    on a linear axis whose ticks are written as powers of ten.
    """

    def __init__(self, ax, lines: dict[str, Sequence[float]], floors: dict[str, float], lost: str = "NaN"):
        self.ax, self.lines = ax, lines
        there = {label: [v for v in values if v is not None] for label, values in lines.items()}
        finite = [v for values in there.values() for v in values if v > 0]
        self.bottom = math.floor(math.log10(min([*finite, *(floor / 10 for floor in floors.values())])) - 0.3)
        self.top = max(1, math.ceil(math.log10(max([*finite, 1.0])) + 0.2))
        self.with_nan = any(math.isnan(v) for values in there.values() for v in values)
        self.with_zero = any(0 in values for values in there.values())
        self._bands(floors)
        self._ticks(lost)

    def _bands(self, floors):
        for name, floor in sorted(floors.items(), key=lambda item: -item[1]):
            self.ax.axhspan(self.bottom, math.log10(floor), color=FLOOR, zorder=0)
            self.ax.axhline(math.log10(floor), color=FAINT, lw=0.8, zorder=1)
            # Beside the axes, where no line is.
            self.ax.annotate(f"{name}:\nrounding\nfloor {floor:.0e}".replace("e-0", "e-"), (1, math.log10(floor)),
                             xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
                             va="center", fontsize=9.5, color=INK)

    def _ticks(self, lost):
        step = max(1, math.ceil((self.top - self.bottom) / 9))
        ticks = {float(y): "1" if y == 0 else f"$10^{{{y}}}$" for y in range(self.bottom, self.top + 1) if y % step == 0
                 and not (y == self.bottom and self.with_zero) and not (y == self.top and self.with_nan)}
        low, high = self.bottom - 0.1, self.top + 0.1
        if self.with_nan:
            start, high = self.top, self.top + LANE
            self.ax.axhspan(start, high, facecolor=NOTHING, edgecolor=FAINT, hatch="////", lw=0, alpha=0.5, zorder=0)
            ticks[(start + high) / 2] = lost
        if self.with_zero:
            start, low = self.bottom, self.bottom - LANE
            self.ax.axhspan(low, start, facecolor="white", lw=0, zorder=0)
            self.ax.axhline(start, color=FAINT, lw=0.8, ls=":", zorder=1)
            ticks[(start + low) / 2] = "exactly 0"
        self.ax.set_ylim(low, high)
        self.ax.set_yticks(sorted(ticks), [ticks[y] for y in sorted(ticks)])

    def height(self, value: float) -> float:
        """Where a value is drawn."""
        if math.isnan(value):
            return self.top + LANE / 2
        if value == 0:
            return self.bottom - LANE / 2
        return math.log10(value)

    def draw(self, looks: dict[str, Look], legend: dict | None = None, joined: bool = True, apart: float = 0.0) -> None:
        """Draw the lines of ``looks``, the first at the bottom and with the largest marks, so that it shows below the
        others.

        A line is broken where it changes lanes. ``legend``: what it says of each line, its label by default.
        ``joined``: whether neighbouring points are connected. ``apart``: sideways distance between the lines' marks.
        """
        lines = {label: values for label, values in self.lines.items() if label in looks}
        last = len(lines) - 1
        wider = min(1.5, 4.5 / max(last, 1)) * joined
        for depth, (label, values) in enumerate(lines.items()):
            look = looks[label]
            style = dict(color=look.color, lw=1.7 * joined + wider * (last - depth), marker=look.marker,
                         ms=8 + wider * (last - depth), zorder=3 + depth / 10, mec="white", mew=0.8)
            for start, stop in _runs([_lane(v) for v in values]):
                if values[start] is not None:
                    at = [x + apart * (depth - last / 2) for x in range(start, stop)]
                    self.ax.plot(at, [self.height(v) for v in values[start:stop]], **style)
            self.ax.plot([], [], label=legend[label] if legend else label, **{**style, "ms": 8, "lw": 1.7 * joined})


def _lane(value: float | None) -> str:
    return "absent" if value is None else "nan" if math.isnan(value) else "zero" if value == 0 else "number"


def _runs(kinds):
    """Stretches of equal neighbours, as ``(start, stop)``."""
    for _, run in groupby(range(len(kinds)), kinds.__getitem__):
        start, *rest = run
        yield start, start + 1 + len(rest)

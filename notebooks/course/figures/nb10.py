"""The roofline: how fast a step is, and what memory and arithmetic allow at its operations per byte."""

from collections.abc import Mapping

import numpy as np

from tplab.errors import TplabError
from tplab.show.figures.style import FAINT, Picture, looks, picture, styled


@styled
def roofline_figure(points: Mapping[str, tuple[float, float]], roofs: Mapping[str, tuple[float, float]],
                    title: str | None = None) -> Picture:
    """Operations per second against operations per byte, both on log axes.

    ``points``: ``{what: (operations per byte, operations per second)}``. ``roofs``: ``{whose: (bytes per second,
    operations per second)}``; below its slope memory is the limit, below its ceiling arithmetic. The text alternative
    names what is drawn and no measured number.

        >>> figures.roofline_figure({"decode": (0.5, 4e9)}, {"2 ranks": (2e10, 2e11)})
    """
    numbers = [number for pair in (*points.values(), *roofs.values()) for number in pair]
    if not points or not roofs or not all(number > 0 for number in numbers):
        raise TplabError("roofline_figure takes {what: (operations per byte, operations per second)} and {whose: "
                         "(bytes per second, operations per second)}, all above 0")
    figure, ax = picture(9.0, 4.6)
    drawn = [one[0] for one in points.values()] + [peak / bandwidth for bandwidth, peak in roofs.values()]
    x = np.geomspace(min(drawn) / 3, max(drawn) * 3, 200)
    for (label, (bandwidth, peak)), style in zip(roofs.items(), ("-", "--", ":", "-.")):
        ax.plot(x, np.minimum(bandwidth * x, peak), color=FAINT, ls=style, lw=2,
                label=f"{label}: {bandwidth / 1e9:,.0f} GB/s, {peak / 1e9:,.0f} Gflop/s")
    for (label, (intensity, speed)), look in zip(points.items(), looks(points).values()):
        ax.plot(intensity, speed, color=look.color, marker=look.marker, ms=11, mec="white", ls="", label=label)
    ax.set(xscale="log", yscale="log", xlabel="operations per byte that must be read", ylabel="operations per second")
    ax.grid()
    return figure.finished(title or "What memory and arithmetic allow", (
        "operations per second against operations per byte, on log axes. Points: "
        f"{', '.join(points)}. Roofs, a slope for memory and a ceiling for arithmetic: "
        f"{', '.join(roofs)}. The numbers are those of this machine, and only in the picture."), columns=2)

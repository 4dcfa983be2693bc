"""How decoding grows, as lines on log axes: what was measured, and the limit above it."""

from collections.abc import Mapping

from matplotlib.ticker import LogLocator

from tplab.show.figures.style import Picture, looks, picture, styled
from tplab.show.phrases import ShowError


@styled
def curves_figure(found: Mapping, title: str | None = None) -> Picture:
    """What ``python -m tplab bench curves --json`` has written, or :func:`course.cost.bench` has returned.

    ``found``: ``{"sequences": {ranks: {how many: (tokens per second, limit)}}, "context": the same}``. Solid lines are
    measured, dashed ones the limit.
    """
    axes = [axis for axis in ("sequences", "context") if any(found.get(axis, {}).values())]
    if not axes:
        raise ShowError('curves_figure takes {"sequences": {ranks: {how many: (tokens per second, limit)}}, …}')
    figure, panels = picture(9.0, 4.6, ncols=len(axes), squeeze=False)
    for axis, ax in zip(axes, panels[0]):
        for (ranks, line), look in zip(found[axis].items(), looks(map(str, found[axis])).values()):
            x = [int(at) for at in line]
            ax.plot(x, [pair[0] for pair in line.values()], color=look.color, marker=look.marker, ms=8, mec="white",
                    label=f"{ranks} rank{'s' * (int(ranks) > 1)}" if ax is panels[0][0] else None)
            ax.plot(x, [pair[1] for pair in line.values()], color=look.color, ls="--", lw=1.2)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(x, [str(at) for at in x])
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # a panel need not hold a power of ten
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.set_xlabel({"sequences": "sequences that decode together", "context": "tokens of context"}[axis])
        ax.grid(axis="y")
    panels[0][0].set_ylabel("tokens per second")
    ranks = ", ".join(map(str, found[axes[0]]))
    return figure.finished(title or "Decoding; dashed: what products and attention alone would allow", (
        f"tokens per second while decoding against {' and '.join(axes)}, on log axes, for "
        f"{ranks} ranks; solid: measured, dashed: the limit. The numbers belong to the machine."), columns=4)

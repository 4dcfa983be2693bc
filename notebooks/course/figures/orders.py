"""One sum in many orders: what comes out, and how often."""

from collections import Counter
from collections.abc import Mapping, Sequence

from matplotlib.ticker import MaxNLocator

from tplab.checks import counted
from tplab.show.figures.style import INK, Picture, looks, picture, styled


@styled
def orders_figure(sums: Mapping[str, tuple[Sequence[float], float]], title: str) -> Picture:
    """A panel for each dtype: every result of a sum in some orders, as high as it came out often.

    ``sums``: ``{dtype: (results, the exact sum)}``; the exact one is a dashed line.

        >>> figures.orders_figure({"bfloat16": (results, 12.5)}, "Every order rounds in another way")
    """
    figure, axes = picture(9.0, 3.4, ncols=len(sums), squeeze=False)
    for ax, (name, look) in zip(axes[0], looks(sums).items()):
        some, exact = sums[name]
        often = Counter(some)
        values = sorted(often)
        ax.vlines(values, 0, [often[value] for value in values], color=look.color, lw=3)
        ax.axvline(exact, color=INK, lw=1.2, ls="--")
        ax.set_title(f"{name}: {counted(len(often), 'result')}\nlargest − smallest: {values[-1] - values[0]:.1g}",
                     fontsize=10.5)
        ax.set_ylim(bottom=0)
        ax.ticklabel_format(useOffset=False)
        ax.xaxis.set_major_locator(MaxNLocator(3))
        ax.tick_params(axis="x", labelsize=9)
        ax.margins(x=0.1)
        ax.set_xlabel("the sum; dashed: exact")
    axes[0][0].set_ylabel("orders")
    counts = "; ".join(f"{name}: {len(set(some))} different in {len(some)} orders"
                       for name, (some, _) in sums.items())
    return figure.finished(title, f"what a sum of the same numbers is in many orders. {counts}.")

"""Bars for measurements on this machine. Their lengths are never stored as text."""

from collections.abc import Mapping

from tplab.errors import TplabError
from tplab.show.figures.style import Picture, looks, picture, styled


@styled
def bars_figure(groups: Mapping[str, Mapping[str, float]], unit: str, title: str, drawn: str, here: str = ""
                ) -> Picture:
    """Horizontal bars of ``{group: {label: value}}``, each with its number and ``unit``.

    ``title``: the finding, true on any machine. ``drawn``: what is drawn, for the text alternative, which has no
    measured number, because those change from run to run. ``here``: a sentence that is true on this machine, drawn and
    not in the text alternative.

        >>> bars_figure({"rank 0": {"full copy": 12.1, "slices": 6.2}}, "MB", "Slices hold half", "private memory")
    """
    if not groups or not all(groups.values()):
        raise TplabError("there is nothing to draw: give {group: {label: value}}")
    labels = dict.fromkeys(label for group in groups.values() for label in group)
    colours = looks(labels)
    count = sum(map(len, groups.values()))
    figure, ax = picture(9.0, 1.5 + 0.36 * count + 0.2 * len(groups))
    y, ticks, longest = 0.0, {}, max(value for group in groups.values() for value in group.values()) or 1
    for name, group in groups.items():
        first = y
        for label, value in group.items():
            ax.barh(y, value, height=0.8, color=colours[label].color)
            number = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
            whose = f" ({label})" * (not value and len(group) > 1)  # a bar of no length has no colour
            ax.annotate(f"{number} {unit}{whose}", (value, y), xytext=(5, 0), textcoords="offset points", va="center",
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 2})  # over a line of the caller's
            y += 1
        ticks[(first + y - 1) / 2] = name
        y += 0.7
    for label in labels:
        ax.barh(0, 0, color=colours[label].color, label=label)
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.set_xlim(0, longest * 1.22)
    ax.xaxis.get_major_locator().set_params(integer=longest >= 5)
    ax.set_xlabel(unit)
    ax.set_title(here, fontsize=10.5, fontweight="normal")
    ax.invert_yaxis()
    return figure.finished(title, f"{drawn}: {', '.join(groups)}; bars for {', '.join(labels)}.",
                           columns=3 * (len(labels) > 1))

"""Seconds until failures were reported, and their bounds."""

from collections.abc import Mapping

from tplab.show.figures.style import GREEN, INK, RED, Picture, picture, styled

_LEFT = 1e-3  # where the axis of seconds begins


@styled
def incidents_figure(happened: Mapping, title: str | None = None) -> Picture:
    """``happened``: by name, each with ``seconds``, ``within``, ``in_time``."""
    first = next(iter(happened.values()))
    figure, ax = picture(9.0, 1.5 + 0.36 * len(happened))
    for y, incident in enumerate(happened.values()):
        color = GREEN if incident.in_time else RED
        ax.plot([_LEFT, incident.seconds], [y, y], color=color, lw=2, zorder=1)
        ax.plot(incident.seconds, y, "o" if incident.in_time else "X", color=color, ms=9, mec="white", zorder=3)
        ax.plot([incident.within] * 2, [y - 0.32, y + 0.32], color=INK, lw=2.5, zorder=2)
        ax.annotate(_seconds(incident.seconds), (max(incident.seconds, 2 * _LEFT), y), (-4, 6),
                    textcoords="offset points", fontsize=9, ha="center", va="bottom")
    ax.annotate("bound", (first.within, -0.36), (0, 2), textcoords="offset points", ha="center",
                va="bottom", fontsize=9.5)
    ax.set_xscale("log")
    ax.set_xlim(_LEFT, 4 * max(incident.within for incident in happened.values()))
    ax.set_ylim(len(happened) - 0.4, -0.95)
    ax.set_yticks(range(len(happened)), list(happened))
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel("seconds from the call until the error")
    late = [name for name, incident in happened.items() if not incident.in_time]
    verdict = "each one came within its bound" if not late else f"too late: {', '.join(late)}"
    bounds = ", ".join(f"{name} ({incident.within:g} s)" for name, incident in happened.items())
    return figure.finished(title or "How long it took to be reported", (
        f"seconds until each failure was reported, and its bound: {bounds}; {verdict}."))


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"

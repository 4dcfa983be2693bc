"""The time of a collective against the size of its message, and the effect of too many threads."""

from collections.abc import Mapping, Sequence

import numpy as np

from tplab.checks import counted
from tplab.show.figures.style import BLUE, FAINT, GREEN, INK, RED, Look, Picture, looks, picture, styled
from tplab.show.phrases import ShowError

_UNITS = ((1 << 20, "MB"), (1 << 10, "KB"), (1, "B"))


@styled
def collective_cost_figure(measured: Mapping[str, Mapping[int, Sequence[float]]],
                           messages: Mapping[str, int] | None = None, title: str | None = None) -> Picture:
    """Seconds per collective against bytes per message: median, and a band that holds the middle half.

    ``measured``: ``{label: {bytes: seconds of each repetition}}``, as the slowest rank saw them. ``messages``: ``{what:
    bytes}`` of a model, drawn as lines. The text alternative has no times: they depend on the machine.

        >>> figures.collective_cost_figure({"all_reduce": {4: seconds, 4096: more}}, {"one token": 512})
    """
    if not measured or not all(len(line) > 1 for line in measured.values()):
        raise ShowError("collective_cost_figure takes {label: {bytes: seconds}} with at least two sizes")
    figure, ax = picture(9.0, 4.6)
    for (label, line), look in zip(measured.items(), looks(measured).values()):
        _line(ax, label, line, look)
    sizes = sorted({size for line in measured.values() for size in line})
    for what, size in (messages or {}).items():
        ax.axvline(size, color=FAINT, lw=1.2, ls="--", zorder=0)
        ax.annotate(f"{what}\n{format_bytes(size)}", (size, 1), (4, -3), xycoords=("data", "axes fraction"),
                    textcoords="offset points", va="top", fontsize=9.5, color="#555555")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylim(top=4 * ax.get_ylim()[1])
    ax.set_xticks(sizes[::2], [format_bytes(size) for size in sizes[::2]])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda value, _: f"{1e6 * value:,.0f} µs" if value < 1e-3
                                 else f"{1e3 * value:g} ms")
    ax.set(xlabel="size of the message on each rank", ylabel="time of one collective")
    ax.grid(axis="y")
    drawn = "; ".join(f"{what}: {format_bytes(size)}" for what, size in (messages or {}).items())
    marked = f"Marked: {drawn}. " if drawn else ""
    return figure.finished(title or "The cost of a collective", (
        "time of one collective (median, and the middle half of the repetitions) for messages "
        f"of {format_bytes(sizes[0])} to {format_bytes(sizes[-1])}, on log axes. Lines: "
        f"{', '.join(measured)}. {marked}The times are those of this machine, and only in the picture."), columns=2)


def latency_and_bandwidth(line: Mapping[int, Sequence[float]]) -> tuple[float, float]:
    """Latency in seconds (the smallest of the medians) and bandwidth in bytes per second (at the largest message)."""
    medians = {size: float(np.median(seconds)) for size, seconds in line.items()}
    latency, large = min(medians.values()), max(medians)
    return latency, large / max(medians[large] - latency, 1e-9)


def _line(ax, label, line, look: Look) -> None:
    sizes = sorted(line)
    low, middle, high = (np.array([np.quantile(line[size], q) for size in sizes]) for q in (0.25, 0.5, 0.75))
    latency, bandwidth = latency_and_bandwidth(line)
    text = f"{label}: {1e6 * latency:,.0f} µs for small messages, then {bandwidth / 1e9:.1f} GB/s"
    ax.fill_between(sizes, low, high, color=look.color, alpha=0.12, lw=0)
    ax.plot(sizes, middle, color=look.color, marker=look.marker, ms=7, mec="white", label=text)


def format_bytes(count: int) -> str:
    """``4 B``, ``512 B``, ``1.5 KB``, ``4 MB``."""
    unit, name = next((unit, name) for unit, name in _UNITS if count >= unit or unit == 1)
    return f"{count / unit:.3g} {name}"


@styled
def threads_figure(measured: Mapping[int, Sequence[float]], ranks: int, cores: int, title: str | None = None
                   ) -> Picture:
    """How many times as long a step takes with more threads per rank: every repetition, the middle half, the median.

    ``measured``: ``{threads per rank: seconds of each repetition}``; the first one is the yardstick. ``ranks`` worked
    at once, on so many ``cores``.

        >>> figures.threads_figure({1: with_one, 2: with_two}, ranks=2, cores=2)
    """
    if len(measured) < 2:
        raise ShowError("threads_figure compares at least two numbers of threads")
    yardstick = float(np.median(next(iter(measured.values()))))
    figure, ax = picture(9.0, 1.4 + 0.75 * len(measured))
    ax.axvline(1, color=INK, lw=1.2, ls="--", zorder=0)
    for y, (threads, seconds) in enumerate(measured.items()):
        ratio = np.array(seconds) / yardstick
        low, middle, high = np.quantile(ratio, [0.25, 0.5, 0.75])
        crowded = ranks * threads > cores
        color = (RED if crowded else GREEN) if y else BLUE
        scatter = y + 0.16 * np.linspace(-1, 1, len(ratio))
        ax.plot(ratio, scatter, "o", color=FAINT, ms=3.5, alpha=0.6, zorder=1)
        ax.barh(y, high - low, left=low, height=0.5, color=color, alpha=0.3, zorder=2)
        ax.plot([middle] * 2, [y - 0.3, y + 0.3], color=color, lw=3, zorder=3)
        if y:
            ax.annotate(f"× {middle:.2g}", (middle, y - 0.3), (0, 2), textcoords="offset points", ha="center",
                        va="bottom", fontweight="bold", color=color)
    ax.set_yticks(range(len(measured)),
                  [f"{ranks} ranks × {counted(threads, 'thread')}" for threads in measured])
    ax.tick_params(axis="y", length=0)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"× {value:g}")
    ax.xaxis.set_minor_formatter(lambda value, _: f"× {value:g}" if f"{value:.0e}"[0] in "235" else "")
    ax.set_ylim(len(measured) - 0.4, -0.75)
    ax.set_xlabel(f"time of one step, relative to one thread per rank (this machine has {cores} free "
                  f"core{'s' * (cores > 1)})")
    return figure.finished(title or "Threads of ranks that share the cores", (
        f"time of one step on {ranks} ranks with one thread each, and with more, relative to "
        "the median with one: every repetition, the middle half and the median. The times, and the "
        "numbers of cores and threads, are those of this machine, and only in the picture."))

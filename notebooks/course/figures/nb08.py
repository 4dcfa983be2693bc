"""Figures of notebook 08: op logs of a failed run, seconds until failures were reported, the cost of a collective."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.patches import ConnectionPatch, FancyBboxPatch

from tplab.checks import counted
from tplab.errors import TplabError
from tplab.show.figures.style import BLUE, FAINT, GREEN, INK, ORANGE, RED, Look, Picture, looks, picture, styled

_AGREES, _BAND = "#eef3f0", "#fbe3d6"
_LANES = 6  # side by side on one line of panels
_BEFORE = 2  # rows that are shown above the first difference
_ENDS = {"raised": (RED, "✗"), "died": (RED, "✗"), "returned": (FAINT, "✓"), "running": (BLUE, "↻"),
         "waiting": (ORANGE, "…"), "stopped": (FAINT, "■")}


@dataclass
class _FailedRun:
    """One failed run: {row: record} and a last word for each rank, and the first row in which the ranks differ."""

    columns: list[dict]
    ends: list[tuple[int, str, str]] = field(default_factory=list)  # per rank: row, kind and text of what came last
    differs: int | None = None

    @property
    def cannot_meet(self) -> bool:
        """All ranks have come to the row in which they differ, each to something else."""
        return self.differs is not None and all(self.differs in column for column in self.columns)

    @property
    def rows(self) -> range:
        numbers = {row for column in self.columns for row in column} | {row for row, *_ in self.ends}
        last = max(numbers) if self.differs is None else self.differs
        return range(max(min(numbers), last - _BEFORE), last + 1)


@styled
def op_logs(errors, title: str | None = None) -> Picture:
    """What each rank did before a run failed: its collectives downwards, the first difference on a tint, and arrows
    from the ranks that wait.

    ``errors``: a ``RankError`` (or an error that one caused), or ``{title: error}``, one panel each.

        >>> figures.op_logs(show.caught(pool.run, broken))
    """
    errors = errors if isinstance(errors, Mapping) else {"": errors}
    runs = {name: _failed_run(_rank_error(error)) for name, error in errors.items()}
    if not runs:
        raise TplabError("op_logs takes a RankError or {title: RankError}, and at least one of them")
    ranks = max(len(run.columns) for run in runs.values())
    across = min(max(1, _LANES // ranks), len(runs))
    lines = [list(runs.items())[at : at + across] for at in range(0, len(runs), across)]
    tall = [max(len(run.rows) for _, run in line) for line in lines]
    figure, axes = picture(max(7.0, 1.75 * ranks * across + 0.6), sum(0.64 * rows + 0.72 for rows in tall) + 0.75,
                           nrows=len(lines), ncols=across, squeeze=False, height_ratios=[rows + 1.05 for rows in tall])
    for ax in axes.flat:
        ax.set_axis_off()
    for line, rows, places in zip(lines, tall, axes):
        for ax, (name, run) in zip(places, line):
            _draw(ax, name, run, rows, ranks)
    apart = {run.cannot_meet for run in runs.values()}
    key = ["green: done together", *["orange, hatched: waits (→ for which rank)"] * (False in apart),
           *["dark orange: calls that differ"] * (True in apart), "≠: the first difference"]
    figure.supxlabel("   ".join(key), fontsize=9, x=0.01, ha="left", color="#555555")
    details = ". ".join(f"{name}: {_describe(run)}".removeprefix(": ") for name, run in runs.items())
    return figure.finished(title or "Collectives in order, and where the ranks part", (
        f"the collectives of each rank, in order. {details}."))


def _rank_error(error):
    while error is not None and not hasattr(error, "causes"):
        error = error.__cause__
    if error is None or not error.logs:
        raise TplabError("there are no op logs to show: this is not the error of a run on ranks")
    return error


def _failed_run(error) -> _FailedRun:
    columns = [{record.seq: record for record in log} for log in error.logs]
    first = min((seq for column in columns for seq in column), default=1)
    run = _FailedRun(columns)
    for r, column in enumerate(columns):
        cause = error.causes.get(r)
        waits = column and not column[max(column)].left
        if cause is not None and not waits:
            run.ends.append((max(column, default=first - 1) + 1, cause.kind, _short(cause)))
        else:
            run.ends.append((max(column, default=first), "", ""))
    for row in run.rows:
        records = [column.get(row) for column in columns]
        if any(records) and (None in records or len({str(record) for record in records}) > 1):
            run.differs = row
            break
    return run


def _short(cause) -> str:
    """The cause without its line number, which changes with every edit of the notebook."""
    known = re.match(r"died \([^)]*\)|raised [\w.]+|waits in [\w.]+|is still running|returned|stopped", cause.text)
    return known.group() if known else cause.kind


def _describe(run: _FailedRun) -> str:
    begin, row = min(run.rows), run.differs
    here = row if row is not None else max(run.rows)
    details = []
    for r, column in enumerate(run.columns):
        record, (end, _, text) = column.get(here), run.ends[r]
        if record is not None:
            details.append(f"rank {r} {'calls' if run.cannot_meet or record.left else 'waits in'} {record}")
        elif text and end <= here:
            details.append(f"rank {r} {text}")
    agreed = sum(all(n in column for column in run.columns) for n in range(begin, here)) if row is not None else 0
    before = "" if not agreed else f"{agreed} {'agrees' if agreed == 1 else 'agree'}, then "
    return before + "; ".join(details)


def _draw(ax, name, run: _FailedRun, tall: int, ranks: int) -> None:
    rows = run.rows
    ax.set_xlim(-0.86, ranks - 0.44)
    ax.set_ylim(tall - 0.45, -0.95)
    ax.set_title(name, fontsize=11, pad=3)
    for r in range(len(run.columns)):
        ax.text(r, -0.72, f"rank {r}", ha="center", va="center", fontsize=10, fontweight="bold")
        ax.plot([r, r], [-0.5, len(rows) - 1], color="#d5d5d5", lw=1.2, zorder=0)
    for y, row in enumerate(rows):
        if row == run.differs:
            ax.axhspan(y - 0.49, y + 0.49, color=_BAND, zorder=-1, lw=0)
        ax.text(-0.5, y, f"≠ #{row}" if row == run.differs else f"#{row}", ha="right", va="center", fontsize=9,
                color=INK, fontweight="bold" if row == run.differs else "normal", clip_on=False)
        for r, column in enumerate(run.columns):
            if row in column:
                _box(ax, r, y, column[row], row == run.differs, run.cannot_meet)
            elif run.ends[r][0] == row and run.ends[r][1]:
                _end(ax, r, y, *run.ends[r][1:])
    _arrows(ax, run)


def _box(ax, x, y, record, differs: bool, cannot_meet: bool) -> None:
    waits = not record.left and not cannot_meet
    color = RED if differs and cannot_meet else ORANGE if waits else GREEN
    ax.add_patch(_rounded(x, y, facecolor="white" if differs else _AGREES, edgecolor=color, lw=2 if differs else 1.2,
                          hatch="////" if waits else None))
    back = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if waits else None
    detail = str(record).removeprefix(record.op).strip()
    in_a_file = record.file.endswith(".py") and "ipykernel" not in record.file
    where = f"{os.path.basename(record.file)}, line {record.line}" if in_a_file else f"line {record.line}"
    text = "\n".join(filter(None, [record.op, detail, where]))
    ax.text(x, y, text, ha="center", va="center", fontsize=8.2, linespacing=1.15, bbox=back)


def _end(ax, x, y, kind, text) -> None:
    color, mark = _ENDS.get(kind, (FAINT, "?"))
    ax.add_patch(_rounded(x, y, facecolor="white", edgecolor=color, lw=1.4, linestyle=(0, (3, 2))))
    wrapped = re.sub(r"(torch\.distributed\.|raised |died )", r"\1\n", text).replace(" \n", "\n")
    ax.text(x, y, f"{mark} {wrapped}", ha="center", va="center", fontsize=8.2, color=INK, fontweight="bold",
            linespacing=1.2)


def _rounded(x, y, **look):
    return FancyBboxPatch((x - 0.43, y - 0.36), 0.86, 0.72, boxstyle="round,pad=0,rounding_size=0.08", **look)


def _arrows(ax, run: _FailedRun) -> None:
    """From each rank that waits to the nearest one that does not come."""
    if run.differs is None:
        return
    y = run.differs - min(run.rows)
    absent = [r for r, column in enumerate(run.columns) if run.differs not in column]
    for r, column in enumerate(run.columns):
        record = column.get(run.differs)
        if record is not None and not record.left and absent:
            to = min(absent, key=lambda other: abs(other - r))
            side = 0.43 if to > r else -0.43
            ax.add_patch(ConnectionPatch((r + side, y), (to - side, y), "data", "data", arrowstyle="-|>", color=ORANGE,
                                         lw=2, mutation_scale=13, zorder=4))


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
        raise TplabError("collective_cost_figure takes {label: {bytes: seconds}} with at least two sizes")
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
        raise TplabError("threads_figure compares at least two numbers of threads")
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

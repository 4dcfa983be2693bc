"""The op logs of a failed run as a picture: the collectives of each rank, in order, and which rank waits for which."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from matplotlib.patches import ConnectionPatch, FancyBboxPatch

from tplab.show.figures.style import BLUE, FAINT, GREEN, INK, ORANGE, RED, Picture, picture, styled
from tplab.show.phrases import ShowError

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
        raise ShowError("op_logs takes a RankError or {title: RankError}, and at least one of them")
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
        raise ShowError("there are no op logs to show: this is not the error of a run on ranks")
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

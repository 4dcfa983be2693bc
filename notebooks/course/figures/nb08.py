"""The figure of notebook 08: op logs of a failed run."""

import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from matplotlib.patches import Rectangle

from tplab.errors import TplabError
from tplab.show.figures.style import GREEN, INK, ORANGE, RED, Picture, picture, styled

_LANES = 6  # side by side on one line of panels
_BEFORE = 2  # rows that are shown above the first difference
_KEY = {"done": "green: done together", "waits": "orange, hatched: waits",
        "differs": "dark orange: calls that differ, and wait", "absent": "dashed: never came"}
_COLOURS = {"done": GREEN, "waits": ORANGE, "differs": RED}


class _Row(NamedTuple):
    """The collectives of one number: each rank's record, or what happened to the rank instead."""

    number: int
    records: list
    ends: list[str]


class _OpLog(NamedTuple):
    """The op log of a failed run, row by row to the first one in which the ranks differ, if there is one."""

    rows: list[_Row]
    differs: bool

    @property
    def cannot_meet(self) -> bool:
        """All ranks have come to the row in which they differ, each to something else."""
        return self.differs and all(self.rows[-1].records)


@styled
def op_logs(errors, title: str | None = None) -> Picture:
    """What each rank did before a run failed: its collectives downwards, to the first row in which the ranks differ.

    ``errors``: a ``RankError`` (or an error that one caused), or ``{title: error}``, one panel each.

        >>> figures.op_logs(show.caught(pool.run, broken))
    """
    errors = errors if isinstance(errors, Mapping) else {"": errors}
    logs = {name: _op_log(_rank_error(error)) for name, error in errors.items()}
    if not logs:
        raise TplabError("op_logs takes a RankError or {title: RankError}, and at least one of them")
    ranks = max(len(log.rows[0].records) for log in logs.values())
    tall = min(1 + _BEFORE, max(len(log.rows) for log in logs.values()))
    across = min(max(1, _LANES // ranks), len(logs))
    down = -(-len(logs) // across)
    figure, axes = picture(max(7.0, 1.75 * ranks * across + 0.6), down * (0.64 * tall + 0.72) + 0.75, nrows=down,
                           ncols=across, squeeze=False)
    for ax in axes.flat:
        ax.set_axis_off()
        ax.set(xlim=(-0.9, ranks - 0.44), ylim=(tall - 0.45, -0.95))
    for ax, (name, log) in zip(axes.flat, logs.items()):
        ax.set_title(name, fontsize=11, pad=3)
        _draw(ax, log)
    kinds = {_kind(log, row, *rank) for log in logs.values() for row in log.rows for rank in zip(row.records, row.ends)}
    key = ";  ".join([says for kind, says in _KEY.items() if kind in kinds] + ["≠: the first difference"])
    figure.supxlabel(fill(key, round(14 * figure.get_figwidth())), fontsize=9, x=0.01, ha="left", color="#555555")
    details = ". ".join(f"{name}: {_describe(log)}".removeprefix(": ") for name, log in logs.items())
    return figure.finished(title or "Collectives in order, and where the ranks part", (
        f"the collectives of each rank, in order. {details}."))


def _kind(log: _OpLog, row: _Row, record, end: str) -> str:
    """What a rank did in a row: a key of ``_KEY``; the empty string if there is nothing to draw."""
    if record is None:
        return "absent" if end else ""
    if log.cannot_meet and row is log.rows[-1]:
        return "differs"
    return "done" if record.left or log.cannot_meet else "waits"


def _rank_error(error):
    while error is not None and not hasattr(error, "causes"):
        error = error.__cause__
    if error is None or not error.logs:
        raise TplabError("there are no op logs to show: this is not the error of a run on ranks")
    return error


def _op_log(error) -> _OpLog:
    logs = [{record.seq: record for record in log} for log in error.logs]
    numbers, rows = {number for log in logs for number in log}, []
    for number in range(min(numbers, default=1), max(numbers, default=0) + 2):
        records = [log.get(number) for log in logs]
        ends = ["" if record or rank not in error.causes or log and not log[max(log)].left
                else _short(error.causes[rank]) for rank, (record, log) in enumerate(zip(records, logs))]
        if any(records) or any(ends):
            rows.append(_Row(number, records, ends))
        if any(records) and len(set(map(str, records))) > 1:
            return _OpLog(rows, True)
    return _OpLog(rows, False)


def _short(cause) -> str:
    """The cause without its line number, which changes with every edit of the notebook."""
    known = re.match(r"died \([^)]*\)|raised [\w.]+|waits in [\w.]+|is still running|returned|stopped", cause.text)
    return known.group() if known else cause.kind


def _describe(log: _OpLog) -> str:
    last, agreed = log.rows[-1], (len(log.rows) - 1) * log.differs
    details = [f"rank {rank} {'calls' if log.cannot_meet or record.left else 'waits in'} {record}" if record
               else f"rank {rank} {end}" for rank, (record, end) in enumerate(zip(last.records, last.ends))
               if record or end]
    return f"{agreed} agree{'s' * (agreed == 1)}, then " * bool(agreed) + "; ".join(details)


def _draw(ax, log: _OpLog) -> None:
    rows = log.rows[-1 - _BEFORE:]
    for rank in range(len(rows[0].records)):
        ax.text(rank, -0.72, f"rank {rank}", ha="center", va="center", fontsize=10, fontweight="bold")
    for y, row in enumerate(rows):
        differs = log.differs and row is rows[-1]
        ax.text(-0.53, y, f"≠ #{row.number}" if differs else f"#{row.number}", ha="right", va="center", fontsize=9,
                fontweight="bold" if differs else "normal")
        for rank, (record, end) in enumerate(zip(row.records, row.ends)):
            kind = _kind(log, row, record, end)
            if record:
                look = {"edgecolor": _COLOURS[kind], "hatch": "////" if kind == "waits" else None}
                in_a_file = record.file.endswith(".py") and "ipykernel" not in record.file
                text = "\n".join(filter(None, [record.op, str(record).removeprefix(record.op).strip(), (
                    ("/".join(Path(record.file).parts[-2:]) + ", ") * in_a_file + f"line {record.line}")]))
            elif kind:
                look, text = {"edgecolor": INK, "linestyle": "--"}, end.replace(" ", "\n", 1)
            else:
                continue
            ax.add_patch(Rectangle((rank - 0.44, y - 0.38), 0.88, 0.76, facecolor="white", lw=1.5, **look))
            ax.text(rank, y, text, ha="center", va="center", fontsize=8.2, linespacing=1.15,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0})

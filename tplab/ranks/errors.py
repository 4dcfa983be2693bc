"""What a learner reads when ranks fail: one error for all ranks, with the first cause on top."""

import linecache
import math
import os
import sys
import traceback
from dataclasses import dataclass, field, replace

from tplab.checks import number, quoted
from tplab.errors import TplabError
from tplab.ranks.oplog import RANKS_BEGINNING, is_machinery


def seconds(timeout) -> float:
    """A timeout as a float; infinity means no timeout. Raises `RankError` unless it is a number of seconds above 0."""
    time = math.inf if isinstance(timeout, float) and timeout == math.inf else number(timeout, 0, math.inf)
    if not time:
        raise RankError(f"timeout is a number of seconds above 0, not {quoted(timeout)}")
    return time


class Abandoned(BaseException):
    """Raised inside a rank to end a run that has already failed elsewhere.

    It is no `Exception`, so a learner's ``except Exception`` does not catch it.
    """

    def __str__(self) -> str:
        return "the run has ended on another rank"


@dataclass(frozen=True)
class Frame:
    """One line of a rank's call stack; `function` is empty where only the line is known."""

    file: str
    line: int
    function: str

    def __str__(self):
        return location(self.file, self.line)


@dataclass
class Cause:
    """What happened to one rank. `kind`: raised, died, waiting, running, returned, stopped or lost."""

    rank: int
    kind: str
    text: str
    frames: list[Frame] = field(default_factory=list)
    exception: BaseException | None = None
    at: int = 0  # time.monotonic_ns on that rank, 0 if unknown
    consequence: bool = False


class RankError(TplabError):
    """A run on the ranks failed, or was refused.

    ``causes`` maps each rank to its `Cause`; ``first`` is the earliest one (None for a refusal); ``logs`` holds the op
    log of each rank (lists of `OpRecord`, numbered from 1 within the run); ``summary`` is the first line of the
    message.
    """

    def __init__(self, summary: str, causes=(), logs=(), notes=()):
        self.summary = summary
        self.causes = {cause.rank: cause for cause in causes}
        self.first = next(iter(causes), None)
        self.logs = list(logs)
        self.notes = list(notes)
        super().__init__(render(self))

    def __reduce__(self):
        # Exceptions of learners' code may not be picklable; their text is in the causes.
        causes = [replace(cause, exception=None) for cause in self.causes.values()]
        return type(self), (self.summary, causes, self.logs, self.notes)

    def _render_traceback_(self):
        # IPython shows this in place of a traceback through the pool's code, where the fault is not.
        return [f"{type(self).__name__}: {line}" if i == 0 else line for i, line in enumerate(str(self).split("\n"))]


class CollectiveMismatch(RankError):
    """The ranks called different collectives, or the same one with different shapes or dtypes."""

    @classmethod
    def of(cls, records, why="the ranks meet in different collectives"):
        """From each rank's `OpRecord` of the same number."""
        records = list(records)
        causes = [waiting(r, record, f"calls {record}") for r, record in enumerate(records)]
        error = cls(why + ": " + "; ".join(f"rank {c.rank} {c.text}" for c in causes), causes)
        error._made_of = records, why
        return error

    def __reduce__(self):
        # Rendered again in the parent: a rank does not know the number of the cell that a line is in.
        return (type(self).of, self._made_of) if hasattr(self, "_made_of") else super().__reduce__()


def waiting(rank: int, record, text: str = "", consequence: bool = False) -> Cause:
    """The cause of a rank that is in the collective of this `OpRecord`."""
    text = f"{text or f'waits in {record.op}'} at {location(record.file, record.line)}"
    return Cause(rank, "waiting", text, [Frame(record.file, record.line, "")], consequence=consequence)


def learner_stack(error: BaseException) -> list[Frame]:
    """The learner's lines that led to an exception, innermost last; its own ``frames`` where a `RankError` has them."""
    if isinstance(error, RankError) and hasattr(error, "frames"):
        return error.frames
    stack = traceback.extract_tb(error.__traceback__)
    return learner_frames([Frame(f.filename, f.lineno or 0, f.name) for f in stack])


def render(error: RankError) -> str:
    """The whole message: headline, the first cause with its lines, the other ranks, the op logs side by side."""
    lines = [error.summary, *(source_lines(error.first.frames) if error.first is not None else ())]
    for cause in error.causes.values():
        if cause is error.first:
            continue
        lines.append(f"rank {cause.rank} {cause.text}" + (" (a consequence)" if cause.consequence else ""))
        if not cause.consequence and cause.kind in ("raised", "died", "running"):
            lines += source_lines(cause.frames)
    if any(error.logs):
        lines += ["", *side_by_side(error.logs, error.causes)]
    return "\n".join(lines + error.notes)


def describe(error: BaseException, most: int = 4000) -> str:
    """``ValueError: bad shape``: class, message and notes of an exception, cut at `most` characters."""
    try:
        message = str(error)
    except Exception as broken:
        message = f"(its message cannot be shown: {type(broken).__name__})"
    lines = [f"{type(error).__name__}: {message}" if message else type(error).__name__]
    text = "\n".join([*lines, *getattr(error, "__notes__", ())])
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def source_lines(frames) -> list[str]:
    lines = []
    for frame in frames:
        lines.append(f"  {frame}" + (f", in {frame.function}" if frame.function else ""))
        linecache.checkcache(frame.file)  # the file may have been edited meanwhile
        if source := linecache.getline(frame.file, frame.line).strip():
            lines.append(f"    {source}")
    return lines


def location(file: str, line: int) -> str:
    """How messages name a line: ``cell In[3], line 7`` or ``tplab/model/attention.py, line 88``."""
    return f"{file_label(file)}, line {line}" if file else f"line {line}"


def file_label(file: str) -> str:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = shell.compile.format_code_name(file) if shell is not None else None
    if named:
        return "cell " + named[1] if named[0] == "Cell" else f"{named[0]} {named[1]}"
    if file.startswith("<%%ranks "):
        return "cell " + file[len("<%%ranks ") : -1]
    if file.startswith("<"):
        return file
    if "site-packages" + os.sep in file:
        return file.rsplit("site-packages" + os.sep, 1)[1]
    for root in (os.getcwd(), os.path.dirname(os.__file__), _REPOSITORY):
        if file.startswith(root + os.sep):
            return os.path.relpath(file, root)
    return os.path.basename(file)


_REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def side_by_side(logs, causes, keep: int = 6) -> list[str]:
    """The op logs as columns, one row per collective, ``≠`` before the first row in which the ranks differ."""
    columns = [{record.seq: record for record in log} for log in logs]
    last = max((max(column, default=0) for column in columns), default=0)
    first = max((min(column) for column in columns if column), default=1)  # a ring holds only the newest
    differs = next((seq for seq in range(first, last + 1) if _differ(columns, seq)), None)
    end = last if differs is None else min(last, differs + keep // 2)
    rows = [["", *(f"rank {r}" for r in range(len(logs)))]]
    begin = max(first, end - keep + 1)
    for seq in range(begin, end + 1):
        cells = [_cell(columns[r].get(seq), causes.get(r)) for r in range(len(logs))]
        rows.append([("≠ " if seq == differs else "  ") + f"#{seq}", *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    skipped = f" ({begin - first} earlier ones look alike)" if begin > first else ""
    verdict = "≠ marks the first difference" if differs else "the same operations on all ranks"
    head = f"collectives of this run{skipped}, {verdict}:"
    return [head, *("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)]


def _differ(columns, seq: int) -> bool:
    records = [column.get(seq) for column in columns]
    return any(record is None for record in records) or len({str(record) for record in records}) > 1


def _cell(record, cause) -> str:
    if record is None:
        return "returned" if cause is not None and cause.kind == "returned" else "-"
    waits = "" if record.left else " (waits)"
    return f"{record} @ {location(record.file, record.line)}{waits}"


def learner_frames(frames) -> list[Frame]:
    """The stack without frames of machinery, outermost first; if nothing is left, its innermost line."""
    begun = max((at for at, frame in enumerate(frames) if frame.file == RANKS_BEGINNING), default=-1)
    shown = [frame for frame in frames[begun + 1:] if not is_machinery(frame.file)]
    return shown[-12:] or list(frames[-1:])

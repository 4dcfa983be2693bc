"""Failures on purpose: made to happen on real ranks, shown as they are, and timed against the promised bound."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from course.judge.words import CELL, in_words
from tplab.errors import TplabError
from tplab.pool import RankPool
from tplab.ranks import RankError, rank
from tplab.ranks.errors import location, side_by_side
from tplab.show.phrases import in_width, say
from tplab.show.tables import Table


def caught(function: Callable, *args, **kwargs) -> Exception | None:
    """Call a function that is expected to fail, and return its exception; None if it did not fail."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error


def error_text(error: Exception) -> str:
    """An error's class and text in lines of a page's width, without the numbers of cells: stored text has none."""
    text, below = str(error), []
    if getattr(error, "logs", None):
        # Laid out anew: the columns are as wide as what stands in them.
        logs = [[replace(record, file="") if CELL.match(location(record.file, 1)) else record
                 for record in log] for log in error.logs]
        text, below = str(RankError(error.summary, error.causes.values())), ["", *side_by_side(logs, error.causes)]
        below += error.notes
    head = CELL.sub("", f"{type(error).__name__}: {text}").splitlines()
    return "\n".join([*(line if line[:1].isspace() else in_width(line) for line in head),
                      *(CELL.sub("", line) for line in below)])


@contextmanager
def shown_error(brief: bool = False) -> Iterator[None]:
    """Run a block that is expected to fail and print its error, so that *Run All* and papermill go on; ``brief``: in at
    most three lines, with the line of the cell, as a verdict has them."""
    try:
        yield
    except Exception as error:
        say(in_words(error) if brief else f"{type(error).__name__}: {error}")
    else:
        print("No error was raised.")


@dataclass(frozen=True)
class Incident:
    """One failure: the error, after how many seconds it was there, and how many it may have taken."""

    error: RankError
    seconds: float
    within: float

    @property
    def in_time(self) -> bool:
        return self.seconds <= self.within


class Incidents:
    """A list of failures that happened on one pool."""

    def __init__(self, pool: RankPool):
        self.pool, self._before = pool, _belongings(pool)
        self.happened: dict[str, Incident] = {}

    @property
    def errors(self) -> dict[str, RankError]:
        return {name: incident.error for name, incident in self.happened.items()}

    def provoke(self, name: str, fn: Callable, within: float, timeout: float | None = None) -> None:
        """Run ``fn`` on the ranks, print the error, and note how long it took to come; ``within``: seconds that it may.

        ``name`` says what happens. Raises `TplabError` if nothing fails on the ranks.
        """
        self.pool.run(rank)  # ranks that the last incident has ended are started now, not on this one's time
        begin = time.perf_counter()
        error = caught(self.pool.run, fn, timeout=timeout)
        seconds = time.perf_counter() - begin
        if not isinstance(error, RankError):
            raise TplabError(f"{name}: this was to fail on the ranks, and what came was {error!r}")
        self.happened[name] = Incident(error, seconds, within)
        print(error_text(error))

    def left_behind(self) -> Table:
        """What these ranks have on the machine, before the first incident and now; a line that grew is marked."""
        import pandas as pd

        now = _belongings(self.pool)
        before = "before the failures"
        frame = pd.DataFrame({before: self._before, "now": now})
        return Table(frame, pd.DataFrame({before: False, "now": frame["now"] > frame[before]}))


def _belongings(pool: RankPool) -> dict[str, int]:
    """What stands on this machine because of this process and its pools, counted."""
    import psutil

    processes = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    folders = list(Path(pool._folder).parent.glob(f"tplab-{os.getpid()}-*"))
    return {"processes (ranks, and what starts them)": len(processes), "private folders of pools": len(folders),
            "files in them": sum(len(list(folder.iterdir())) for folder in folders)}

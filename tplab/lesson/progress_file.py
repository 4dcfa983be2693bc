"""What a learner has solved: kept in the user's own folder, so that neither an update nor a new clone loses it."""

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from tplab.errors import TplabError
from tplab.files import write_file
from tplab.show.tables import Table, table

SOLVED: dict[str, Callable] = {}  # the answers that passed in this process, the latest of each exercise


class ProgressError(TplabError):
    """The file that keeps the progress cannot be read."""


def path() -> Path:
    """``$TPLAB_PROGRESS`` if set, else ``tplab/progress.json`` in ``$XDG_DATA_HOME`` or ``~/.local/share``."""
    if own := os.environ.get("TPLAB_PROGRESS"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share", "tplab", "progress.json")


def load() -> dict[str, dict]:
    """``{exercise: {"answers": [hashes], "solved": "2026-11-22 09:30", "tries": 3}}``; the last two once it is solved.

    Raises `ProgressError` if the file is none of ours.
    """
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not all(isinstance(one, dict) and isinstance(one.get("answers"), list)
                                                  for one in found.values()):
            raise ValueError("no table of exercises")
        return found
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise ProgressError(f"{path()} cannot be read ({error}); remove it to begin anew") from error


def note(name: str, answer: Callable, passed: bool) -> None:
    """Keep that an answer was judged. The same answer again is no new try, and nothing counts once it is solved.

    Where nothing can be written a line says so, and the verdict stands all the same.
    """
    if passed:
        SOLVED[name] = answer
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path()}.lock", timeout=10):
            kept = load()
            one = kept.setdefault(name, {"answers": []})
            if "solved" in one:
                return
            if (key := _key(answer)) not in one["answers"]:
                one["answers"].append(key)
            if passed:
                one |= {"solved": time.strftime("%Y-%m-%d %H:%M"), "tries": len(one["answers"])}
            write_file(path(), lambda new: new.write_text(json.dumps(kept, indent=1), encoding="utf-8"))
    except (TplabError, OSError, TimeoutError) as error:
        print(f"(progress is not kept: {error})")


def progress() -> Table:
    """Every exercise of the series with what became of it: a table, and how many are solved in its caption.

        >>> lesson.progress()
    """
    from tplab.lesson.verdict import all_exercises

    kept = load()
    rows = [{"notebook": one.notebook, "exercise": name, "solved": kept.get(name, {}).get("solved", ""),
             "tries": kept.get(name, {}).get("tries", len(kept.get(name, {}).get("answers", ())) or "")}
            for name, one in all_exercises().items()]
    return table(rows, index="notebook")


def clear_progress() -> None:
    """Forget what was solved, and when."""
    path().unlink(missing_ok=True)
    SOLVED.clear()


def _key(answer: Callable) -> str:
    """The answer's code, so that judging it twice is one try."""
    code = getattr(answer, "__code__", None)
    parts = [code] if code else [one.__code__ for one in vars(answer).values() if hasattr(one, "__code__")] \
        if isinstance(answer, type) else []
    text = repr([(one.co_code, one.co_names, [c for c in one.co_consts if isinstance(c, str | int | float | tuple)])
                 for one in parts])
    return hashlib.sha256(text.encode()).hexdigest()[:12]

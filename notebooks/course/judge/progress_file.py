"""What a learner has solved: kept in the user's own folder, so that neither an update nor a new clone loses it."""

import inspect
import json
import linecache
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

from tplab.errors import TplabError

SOLVED: dict[str, Callable] = {}  # the answers that passed in this process, the latest of each exercise


def path() -> Path:
    """``$TPLAB_PROGRESS`` if set, else ``tplab/progress.json`` in ``$XDG_DATA_HOME`` or ``~/.local/share``."""
    if named := os.environ.get("TPLAB_PROGRESS"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share", "tplab", "progress.json")


def is_kept() -> bool:
    """Whether what happens now is a person's work: ``$TPLAB_PROGRESS`` names a file, or a person runs the cell. A batch
    (papermill, nbconvert, nbval) says to the kernel that no person is there to answer."""
    if os.environ.get("TPLAB_PROGRESS"):
        return True
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return not hasattr(shell, "kernel") or bool(shell.get_parent().get("content", {}).get("allow_stdin", True))


def load() -> dict[str, dict]:
    """``{exercise: {"solved": "2026-11-22 09:30", "code": its cell}}``. Empty in a batch. Raises `TplabError` if the
    file is none of ours."""
    if not is_kept():
        return {}
    try:
        kept = json.loads(path().read_text(encoding="utf-8"))
        return {name: entry for name, entry in kept.items() if "solved" in entry}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError, OSError) as error:
        raise TplabError(f"{path()} cannot be read ({error!r}); remove it to begin anew") from error


def note(name: str, answer: Callable) -> None:
    """Keep that an exercise was solved: when it was the first time, and the cell of the latest answer that passed."""
    SOLVED[name] = answer
    if not is_kept():
        return
    try:
        path().parent.mkdir(parents=True, exist_ok=True)
        kept = load()
        kept[name] = {"solved": time.strftime("%Y-%m-%d %H:%M"), **kept.get(name, {}), "code": source(answer)}
        draft = path().with_suffix(".draft")
        draft.write_text(json.dumps(kept, indent=1), encoding="utf-8")
        draft.replace(path())  # whole or not at all
    except (TplabError, OSError) as error:
        print(f"(progress is not kept: {error})")


def clear_progress() -> None:
    path().unlink(missing_ok=True)
    SOLVED.clear()


def source(answer: Callable) -> str | None:
    """The whole cell that defines ``answer``, or its own lines where that is a file's; None if they are not known."""
    codes = [part.__code__ for part in (vars(answer).values() if isinstance(answer, type) else [answer])
             if hasattr(part, "__code__")]
    if not codes:
        return None
    file = codes[0].co_filename
    return dedent(inspect.getsource(answer)) if os.path.exists(file) else "".join(linecache.getlines(file)) or None

"""What a command writes: a file is written whole or not at all; and the terminal."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tplab.errors import TplabError


def check_working_folder() -> None:
    """Raises `TplabError` if the current folder was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise TplabError("the current folder no longer exists; cd to one that does") from None


def check_writable(path: str | Path) -> None:
    """Raises `TplabError` if :func:`write_file` could not write this file; to be called before minutes of work."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
        raise TplabError(f"{path} is not a regular file; give the name of a file")  # a rename would replace /dev/null
    if not os.path.basename(path) or not os.path.isdir(folder):
        raise TplabError(f"{str(path)!r} cannot be written: there is no folder {folder}, or no name of a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise TplabError(f"{path} cannot be written: no permission to make files in {folder}")


def write_file(path: str | Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a new file beside ``path``, then rename it. A full disk does not destroy the earlier file.

    Raises `TplabError` for any `OSError`; an earlier file at ``path`` is then unchanged.
    """
    check_writable(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".tplab-", dir=os.path.dirname(os.path.abspath(path))) as draft:
            new = Path(draft, "new")
            write(new)
            if os.path.exists(path):
                shutil.copymode(path, new)
            os.replace(new, path)
    except OSError as error:
        raise TplabError(f"{path} could not be written: {error.strerror or error}") from error


def replace_unprintable() -> None:
    """Have standard output write ``?`` for characters that the terminal's encoding (latin-1, ASCII) does not have.

    Other streams, such as a notebook's, have no encoding that can be set.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")

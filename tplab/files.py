"""What a command writes. A file is checked before the work, and is written whole or not at all; and the terminal."""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tplab.errors import TplabError

KINDS = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket",
         stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


class FileError(TplabError):
    """A file cannot be written, or must not be; the message names it."""


def check_working_folder() -> None:
    """Raises `FileError` if the current folder was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise FileError("the current folder no longer exists; cd to one that does") from None


def check_writable(path: str | Path) -> None:
    """Raises `FileError` if :func:`write_file` could not write this file; to be called before minutes of work."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.basename(path):
        raise FileError(f"{str(path)!r} is not the name of a file")
    try:
        mode = os.lstat(path).st_mode
        # A rename would replace whatever has this name, even /dev/null.
        if not stat.S_ISREG(mode):
            raise FileError(f"{path} is {KINDS.get(stat.S_IFMT(mode), 'no file')}; give the name of a file")
        if not os.access(path, os.W_OK):
            raise FileError(f"{path} cannot be written: no permission")
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.isdir(folder):
            raise FileError(f"{path} cannot be written: there is no folder {folder}") from None
    except OSError as error:  # a name too long, a folder without permission to read
        raise FileError(f"{path} cannot be written: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"{path} cannot be written: no permission to make files in {folder}")


def write_file(path: str | Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a new file beside ``path``, then rename it. A full disk does not destroy the earlier file.

    Raises `FileError` for any `OSError`; an earlier file at ``path`` is then unchanged.
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
        raise FileError(f"{path} could not be written: {error.strerror or error}") from error


def replace_unprintable() -> None:
    """Have standard output write ``?`` for characters that the terminal's encoding (latin-1, ASCII) does not have.

    Other streams, such as a notebook's, have no encoding that can be set.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")

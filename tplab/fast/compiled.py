"""Functions that numba compiles for this processor, and keeps in the user's cache folder.

To compile a step takes a process some ten seconds and a few hundred megabytes. So one process of a machine does it, in
a child process, and the others load what it left there.
"""

import hashlib
import pickle
import subprocess
import sys
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path

import llvmlite
import numba
from filelock import FileLock
from numba import njit
from numba.core import caching, config

from tplab.checkpoint.names import cache_dir
from tplab.fast import cpu
from tplab.pool import control_block
from tplab.ranks import oplog

# Sums may be added up in another order, so that loops become vectors; NaN and infinity mean what they always do.
_MATH = {"reassoc", "contract", "arcp", "nsz"}
# Without reference counts (_nrt): the caller of an entry holds its arrays, and a count of each slice costs more than a
# row of numbers does.
inner = njit(fastmath=_MATH, error_model="numpy", nogil=True, _nrt=False)
in_order = njit(error_model="numpy", nogil=True, _nrt=False)  # sums are added up as they are written


@cache
def _folder() -> Path:
    """A folder per version of all that the compiled code depends on: numba itself looks at one file's date only."""
    version = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {cpu.form()} {config.CPU_NAME} "
                             f"{config.CPU_FEATURES} {__file__}".encode())
    for source in [*sorted(Path(__file__).parent.glob("*.py")), control_block.__file__, oplog.__file__]:
        version.update(Path(source).read_bytes())
    return cache_dir() / "numba" / version.hexdigest()[:16]


class _Cache(caching.FunctionCache):
    """numba's cache on disk, of which nothing may be there: it is quicker with it, and right without."""

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged file: pickle, LLVM and numba each raise errors of their own
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig, data):
        with suppress(OSError):  # a full or read-only disk
            super().save_overload(sig, data)


def entry(function, compiled=inner):
    """A compiled function that Python calls. What it calls in turn is ``compiled``, too, and becomes a part of it."""
    made = compiled(function)
    with suppress(OSError, RuntimeError):  # nowhere to write: compiled anew in each process
        _folder().mkdir(parents=True, exist_ok=True)
        config.CACHE_DIR = str(_folder())
        made._cache = _Cache(function)
    return made


def compile_ahead(function, *arguments) -> None:
    """Compile an ``entry`` for arguments of these types before it is called, or load what is in the cache folder.

    Raises:
        RuntimeError: numba does not get it compiled on this machine; with the end of what it said.
    """
    signature = tuple(map(numba.typeof, arguments))
    done = _folder() / f"{function.__name__}-{hashlib.sha256(str(signature).encode()).hexdigest()[:16]}.done"
    with _lock():
        if not done.exists() and _is_writable():
            _compile_in_child(function.__module__, function.__name__, signature)
            done.touch()
    function.compile(signature)  # from the folder; where nothing can be kept there, in this process


def _lock():
    return FileLock(_folder() / "lock") if _is_writable() else nullcontext()


def _is_writable() -> bool:
    try:
        (_folder() / "lock").touch()
    except OSError:
        return False
    return True


def _compile_in_child(module: str, name: str, signature: tuple) -> None:
    code = ("import importlib, pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
            "module, name, signature = pickle.load(sys.stdin.buffer); "
            "getattr(importlib.import_module(module), name).compile(signature)")
    given = pickle.dumps(sys.path) + pickle.dumps((module, name, signature))
    found = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True)
    if found.returncode:
        said = found.stderr.decode(errors="replace").strip()[-2000:]
        raise RuntimeError(f"the fast path could not be compiled on this machine (exit code {found.returncode}); "
                           f"TPLAB_FAST=0 in the environment does without it\n{said}")

"""Functions that numba compiles for this processor, kept in the user's cache folder.

To compile a step takes about ten seconds and a few hundred megabytes. So one process of a machine does it, in a child
process, and the others load the result.
"""

import hashlib
import pickle
import subprocess
import sys
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path

import llvmlite
import numba
from filelock import FileLock
from numba import njit
from numba.core import caching, config

from tplab.checkpoint.names import cache_dir
from tplab.fast import cpu, to_its_end
from tplab.pool import control_block
from tplab.ranks import oplog

# The compiler may reorder sums, so that loops become vectors; NaN and infinity keep their meaning.
_MATH = {"reassoc", "contract", "arcp", "nsz"}
# Without reference counts (_nrt): the caller of an entry holds its arrays, and counting each slice costs more than
# computing a row.
inner = njit(fastmath=_MATH, error_model="numpy", nogil=True, _nrt=False)


@cache
def _folder() -> Path:
    """A folder for each version of the sources and each place of them: numba compares only the function's own file, not
    its imports."""
    version = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {cpu.form()} {config.CPU_NAME} "
                             f"{config.CPU_FEATURES} {__file__}".encode())
    for source in [*sorted(Path(__file__).parent.glob("*.py")), control_block.__file__, oplog.__file__]:
        version.update(Path(source).read_bytes())
    return cache_dir() / "numba" / version.hexdigest()[:16]


class _Cache(caching.FunctionCache):
    """numba's cache on disk. It only saves time: a file that is missing or damaged is compiled again.

    An index says which file holds the code for which types. Without a lock around it, two processes that save at the
    same time can both take one file name, and then one of them runs code that was made for other types.
    """

    def load_overload(self, sig, target_context):
        try:
            with _lock("index"):
                return super().load_overload(sig, target_context)
        except Exception:  # a damaged file: pickle, LLVM and numba each raise errors of their own
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig, data):
        with suppress(OSError), _lock("index"):  # OSError: a full or read-only disk
            super().save_overload(sig, data)


def entry(function):
    """A compiled function that only Python calls. The functions that it calls are compiled into it."""
    made = inner(function)
    made.compile = partial(to_its_end, made.compile)
    with suppress(OSError, RuntimeError):  # no folder to write to: each process compiles
        _folder().mkdir(parents=True, exist_ok=True)
        config.CACHE_DIR = str(_folder())
        made._cache = _Cache(function)
    return made


def is_compiled(dtype: str) -> bool:
    """Whether the cache folder has the code of models of this dtype."""
    return any(_folder().glob(f"{dtype}-*.done"))


def compile_ahead(dtype: str, function, *arguments) -> None:
    """Compile an ``entry`` for arguments of these types before it is called, or load what is in the cache folder.

    Raises:
        RuntimeError: numba cannot compile it on this machine; with the end of numba's message.
    """
    signature = tuple(map(numba.typeof, arguments))
    named = hashlib.sha256(f"{function.__name__} {signature}".encode()).hexdigest()[:16]
    done = _folder() / f"{dtype}-{named}.done"
    with _lock("compile"):
        if not done.exists() and _is_writable():
            _compile_in_child(function.__module__, function.__name__, signature)
            done.touch()
    function.compile(signature)  # loads from the folder; compiles in this process if nothing can be kept there


def _lock(name: str):
    return FileLock(_folder() / f"{name}.lock") if _is_writable() else nullcontext()


def _is_writable() -> bool:
    try:
        (_folder() / "compile.lock").touch()
    except OSError:
        return False
    return True


def _compile_in_child(module: str, name: str, signature: tuple) -> None:
    code = ("import importlib, pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
            "module, name, signature = pickle.load(sys.stdin.buffer); "
            "getattr(importlib.import_module(module), name).compile(signature)")
    data = pickle.dumps(sys.path) + pickle.dumps((module, name, signature))
    child = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True)
    if child.returncode:
        message = child.stderr.decode(errors="replace").strip()[-2000:]
        raise RuntimeError(f"the fast path could not be compiled on this machine (exit code {child.returncode}); "
                           f"TPLAB_FAST=0 in the environment does without it\n{message}")

"""``compiled``: a function that numba compiles for this processor, and keeps in the user's cache folder."""

import hashlib
from functools import cache
from pathlib import Path

import llvmlite
import numba
from numba import njit
from numba.core import caching, config

from tplab.checkpoint.names import cache_dir
from tplab.fast import cpu

# Sums may be added up in another order, so that loops become vectors; NaN and infinity mean what they always do.
_MATH = {"reassoc", "contract", "arcp", "nsz"}
inner = njit(fastmath=_MATH, error_model="numpy", nogil=True)


@cache
def _folder() -> Path:
    """A folder per version of all that the compiled code depends on: numba itself looks at one file's date only."""
    version = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {cpu.form()} {config.CPU_NAME} "
                             f"{config.CPU_FEATURES}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        version.update(source.read_bytes())
    return cache_dir() / "numba" / version.hexdigest()[:16]


class _Cache(caching.FunctionCache):
    """numba's cache on disk, of which nothing may be there: it is quicker with it, and right without."""

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # a damaged file: pickle, LLVM and numba each raise errors of their own
            return None

    def save_overload(self, sig, data):
        try:
            super().save_overload(sig, data)
        except OSError:  # a full or read-only disk
            pass


def entry(function):
    """A compiled function that Python calls. What it calls in turn is ``inner``, and becomes a part of it."""
    made = inner(function)
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        config.CACHE_DIR = str(_folder())
        made._cache = _Cache(function)
    except (OSError, RuntimeError):  # nowhere to write: compiled anew in each process
        pass
    return made

"""What the tests of failing ranks share."""

import glob
import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tplab.ranks import RankError, state

SOON = 50  # seconds: nobody waits for the pool's 60. On a quiet machine it is one, which `test_how_soon` measures


def fails(pool, fn, *patterns, **options):
    """Run `fn`; it must raise a RankError before the pool's timeout whose text has all patterns.

    A `timeout` of the run itself has to leave time for `fn` to begin: where it did not, there is another with more.
    """
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(fn, **options)
    took = time.monotonic() - begin
    text = str(caught.value)
    if "in code that does not say where" in text and (options.get("timeout") or SOON) < 10:
        return fails(pool, fn, *patterns, **options | {"timeout": 10})
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"
    assert took < SOON, f"took {took:.2f} s:\n{text}"
    return caught.value


def kept(pool):
    """Which ranks still have what they were told before the failure."""
    return pool.run(lambda: "kept" in state)


def light_path(folder) -> str:
    """A PYTHONPATH under which a fork server is up in half of the time: transformers' modules are empty there.

    For scripts whose ranks load no model; each has a fork server of its own, which imports transformers in advance.
    """
    for model in "llama", "qwen2":
        place = Path(folder) / "light" / "transformers" / "models" / model
        place.mkdir(parents=True, exist_ok=True)
        for package in place, *place.parents[:2]:
            (package / "__init__.py").touch()  # or Python would go on to the real one
        (place / f"modeling_{model}.py").touch()
    return os.pathsep.join([str(Path(folder) / "light"), str(Path(__file__).resolve().parents[2])])


def own_files():
    """What this process has in the folder for temporary files, and no other one: its pools' private folders."""
    return glob.glob(os.path.join(tempfile.gettempdir(), f"tplab-{os.getpid()}-*"))


def descriptors():
    """How many this process has open, without zmq's: other tests' kernels left those, and its threads exchange them."""
    count = 0
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        with suppress(OSError):  # one of these threads has closed it
            count += "[eventfd]" not in os.readlink(f"/proc/self/fd/{name}")
    return count

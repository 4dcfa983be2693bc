"""Where compiled code is kept: shared by processes, found damaged, full or read-only, from another version."""

import os
import subprocess
import sys
import textwrap

import pytest
from filelock import FileLock, Timeout
from numba.core import caching

from tplab.fast import compiled

MODULE = """
    from tplab.fast.compiled import entry, inner

    @inner
    def twice(x):
        return x + x

    @entry
    def double(x):
        return twice(x)
"""
USE = """
    import sys
    from mine import double
    from tplab.fast.compiled import compile_ahead
    compile_ahead(double, 1)
    print(double(21), sum(double.stats.cache_hits.values()), sum(double.stats.cache_misses.values()))
"""


@pytest.fixture
def start(tmp_path):
    """Start a process that compiles, or loads, ``double``; it prints 42, cache hits and cache misses."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "use.py").write_text(textwrap.dedent(USE))

    def start(**environment):
        return subprocess.Popen([sys.executable, tmp_path / "use.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, env={**os.environ, "TPLAB_CACHE": str(tmp_path / "cache"), **environment})
    return start


def said(process) -> str:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.strip()


def files(folder, ending):
    return sorted((folder / "cache" / "numba").rglob(f"*{ending}"))


@pytest.mark.slow
def test_one_process_compiles_and_all_load(start, tmp_path):
    """Five that start at once: a child of the first one compiles; no one else does, then or later."""
    assert [said(process) for process in [start() for _ in range(5)]] == ["42 1 0"] * 5
    assert len(files(tmp_path, ".nbc")) == 1
    assert said(start()) == "42 1 0"


@pytest.mark.slow
def test_damaged_files_are_compiled_anew(start, tmp_path):
    said(start())
    for ending in (".nbc", ".nbi"):
        for damage in (lambda whole: b"", lambda whole: b"no such thing", lambda whole: whole[:len(whole) // 2]):
            (file,) = files(tmp_path, ending)
            file.write_bytes(damage(file.read_bytes()))
            assert said(start()) == "42 0 1"
    assert said(start()) == "42 1 0"  # and they are whole again


def test_processes_write_the_index_one_after_the_other(monkeypatch):
    """Two that save code for different types at the same time must not take the same file for it."""
    def is_alone(*_):
        with pytest.raises(Timeout), FileLock(compiled._folder() / "index.lock", timeout=0):
            pass
        seen.append(1)

    seen, cache = [], compiled.entry(lambda x: x)._cache
    for name in ("load_overload", "save_overload"):
        monkeypatch.setattr(caching.FunctionCache, name, is_alone)
        getattr(cache, name)("types", "code")
    assert len(seen) == 2


@pytest.mark.slow
def test_code_of_another_processor_is_not_used(start, tmp_path):
    """NUMBA_CPU_FEATURES stands for another processor: the cache has a folder for each."""
    said(start())
    assert said(start(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")) == "42 1 0"
    assert len(files(tmp_path, ".nbc")) == 2


def test_where_nothing_can_be_kept_each_process_compiles(start, tmp_path):
    """A file stands where the folder would: what root may write too, a read-only folder would not stop."""
    (tmp_path / "cache").write_text("in the way")
    assert said(start()) == "42 0 1"


@pytest.mark.slow
def test_a_full_disk(start, tmp_path):
    """No byte can be written (RLIMIT_FSIZE is 0 and SIGXFSZ ignored, so each write fails): compiled, and not kept."""
    limited = tmp_path / "limited.py"
    limited.write_text("import resource, runpy, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
                       "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
                       f"runpy.run_path({str(tmp_path / 'use.py')!r}, run_name='__main__')\n")
    environment = {**os.environ, "TPLAB_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(
        [str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    found = subprocess.run([sys.executable, limited], env=environment, capture_output=True)
    assert found.stdout.decode().startswith("42 "), found.stderr.decode()


@pytest.mark.slow
def test_what_cannot_be_compiled_is_said(tmp_path, start):
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODULE).replace("x + x", "x + object()"))
    process = start()
    _, err = process.communicate()
    assert "RuntimeError: the fast path could not be compiled on this machine" in err
    assert "TPLAB_FAST=0" in err


@pytest.mark.slow
def test_a_rank_alone_imports_numba():
    """Importing tplab or making an engine does not import the compiler."""
    code = ("import sys, tplab; tplab.LLM('fable').close(); print('numba' in sys.modules, 'llvmlite' in sys.modules)")
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "False False\n", found.stderr

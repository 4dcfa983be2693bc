"""Where compiled code is kept: shared by processes, found damaged, full or read-only, from another version."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

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
    import importlib, os, sys
    import mine
    from pathlib import Path
    from tplab.fast import compiled

    def use():
        module = importlib.reload(mine)
        compiled.compile_ahead("int", module.double, 1)
        stats = module.double.stats
        print(module.double(21), sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), flush=True)

    use()
"""


@pytest.fixture
def start(tmp_path):
    """Start a process that compiles, or loads, ``double``, and then runs ``more``, which can do it again: ``use()``. It
    prints 42, cache hits and cache misses each time."""
    (tmp_path / "mine.py").write_text(textwrap.dedent(MODULE))

    def start(more=""):
        (tmp_path / "use.py").write_text(textwrap.dedent(USE) + textwrap.dedent(more))
        return subprocess.Popen([sys.executable, tmp_path / "use.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True, cwd=tmp_path, env={**os.environ, "TPLAB_CACHE": str(tmp_path / "cache")})
    return start


def said(process) -> list[str]:
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out.splitlines()


def test_one_process_compiles_and_all_load(start, tmp_path):
    """Two that start at once: a child of the first one compiles; no other process does, then or later."""
    assert [said(process) for process in [start(), start()]] == [["42 1 0"]] * 2
    assert len(list((tmp_path / "cache" / "numba").rglob("*.nbc"))) == 1
    assert said(start()) == ["42 1 0"]


def test_damaged_files_are_compiled_anew_and_what_cannot_be_compiled_is_said(start):
    process = start("""
        for ending in ("nbc", "nbi"):
            for damage in (lambda whole: b"", lambda whole: b"no such thing", lambda whole: whole[:len(whole) // 2]):
                (file,) = compiled._folder().rglob(f"*.{ending}")
                file.write_bytes(damage(file.read_bytes()))
                use()
        use()  # the files are whole again
        source = Path("mine.py")
        source.write_text(source.read_text().replace("x + x", "x + object()"))
        for done in compiled._folder().glob("*.done"):
            done.unlink()
        try:
            use()
        except RuntimeError as error:
            print(error)
    """)
    first, *damaged, whole, error, _ = [line for line in said(process) if line][:10]
    assert (first, damaged, whole) == ("42 1 0", ["42 0 1"] * 6, "42 1 0")
    assert error.startswith("the fast path could not be compiled on this machine") and "TPLAB_FAST=0" in error


def test_another_version_processor_or_source_has_another_folder(monkeypatch, tmp_path):
    """numba itself looks at the date of one file only."""
    folder, folders = compiled._folder.__wrapped__, set()
    (tmp_path / "other.py").write_bytes(Path(compiled.oplog.__file__).read_bytes() + b"\n")
    changes = [(compiled.numba, "__version__", "0"), (compiled.llvmlite, "__version__", "0"),
               (compiled.cpu, "form", lambda: "AVX2"), (compiled.config, "CPU_NAME", "generic"),
               (compiled.config, "CPU_FEATURES", "+none"), (compiled.oplog, "__file__", str(tmp_path / "other.py"))]
    for change in changes:
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            folders.add(folder())
    assert len(folders | {folder()}) == len(changes) + 1 and folder() == folder()


def test_where_nothing_can_be_kept_each_process_compiles(start, tmp_path):
    """A file stands where the folder would be: what root may write too, a read-only folder would not stop. Then no byte
    can be written (RLIMIT_FSIZE is 0 and SIGXFSZ ignored, so each write fails)."""
    (tmp_path / "cache").write_text("in the way")
    *said_first, said_last = said(start("""
        import resource, signal
        os.environ["TPLAB_CACHE"] = os.path.abspath("full")
        compiled._folder.cache_clear()
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        use()
    """))
    assert said_first == ["42 0 1"] and said_last.startswith("42 ")
    assert not list((tmp_path / "full").rglob("*.nbc"))


def test_a_rank_alone_imports_numba():
    """Importing tplab or making an engine does not import the compiler."""
    code = "import sys, tplab; tplab.LLM('fable', 1).close(); print('numba' in sys.modules, 'llvmlite' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "False False\n", found.stderr

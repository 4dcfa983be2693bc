"""Where compiled code is kept: shared by processes, found damaged, from another version."""

import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tplab import fast
from tplab.checkpoint import open_checkpoint
from tplab.engine.config import EngineConfig
from tplab.faults import fault
from tplab.patch import applied
from tplab.shard import ShardPlan

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
    def start(more=""):
        if not (tmp_path / "mine.py").exists():
            (tmp_path / "mine.py").write_text(textwrap.dedent(MODULE))
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


@pytest.mark.parametrize("is_compiled", [False, True])
def test_the_first_load_says_that_it_compiles(monkeypatch, capsys, is_compiled):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.delenv(fast.SWITCH, raising=False)
    ckpt, pool = open_checkpoint("fable"), SimpleNamespace(run=lambda *call, timeout: [True, is_compiled])
    plan = ShardPlan.from_config(ckpt.config, 2)
    config = EngineConfig.for_model(ckpt.config, plan, torch.float32, num_blocks=4)
    with fast.announced(pool, ckpt, plan, config):
        begun = capsys.readouterr().err
    end = capsys.readouterr().err
    words = "compiling float32 code for this processor, once … "
    assert begun == "" == end if is_compiled else (begun == words and " s\n" in end)
    for patches, changed in [((), {"enforce_eager": True}), ((fault("rope_missing"),), {})]:
        with applied(*patches), fast.announced(pool, ckpt, plan, replace(config, **changed)):
            assert capsys.readouterr() == ("", "")


def test_damaged_files_are_compiled_anew_and_what_cannot_be_compiled_is_said(start):
    process = start("""
        for ending, damage in (("nbc", lambda whole: b""), ("nbi", lambda whole: b"no such thing"),
                               ("nbc", lambda whole: whole[:len(whole) // 2])):
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
    first, *damaged, whole, error, _ = [line for line in said(process) if line][:7]
    assert (first, damaged, whole) == ("42 1 0", ["42 0 1"] * 3, "42 1 0")
    assert error.startswith("the fast path could not be compiled on this machine") and "TPLAB_FAST=0" in error

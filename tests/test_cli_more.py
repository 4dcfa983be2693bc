"""The command line's check, bench and plan: what is handed on, and what is said of words that do not fit."""

import io
import os
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest

from tplab import __version__, cli


def run(line, capsys):
    code = cli.main(line.split())
    return code, *capsys.readouterr()


def test_alone_it_says_what_there_is(capsys):
    alone = run("", capsys)
    for option, said in (("--help", alone[1]), ("--version", f"tplab {__version__}\n")):
        with pytest.raises(SystemExit, match="^0$"):
            cli.main([option])
        assert capsys.readouterr() == (said, "")
    assert alone[::2] == (0, "")


@pytest.mark.parametrize("verdict, code", [("clean", 0), ("bug", 1), ("cannot tell", 2)])
def test_a_recorded_engines_verdict_is_the_exit_code(verdict, code, capsys, monkeypatch, tmp_path):
    asked = []
    report = SimpleNamespace(verdict=verdict, summary=lambda: "word " * 30 + "\nlast", point_lines=lambda: "points",
                             to_json=asked.append)
    monkeypatch.setattr("tplab.align.check", lambda *given, **options: asked.append((given, options)) or report)
    line = f"check run --model m --name a.*=b c==d --layout pairs --json {tmp_path}/r.json"
    found, out, err = run(line, capsys)
    assert (found, err) == (code, "") and out.endswith("word\nlast\n\npoints\n") and "\n   word" in out
    assert asked == [(("run", "m"), {"names": {"a.*": "b", "c": "=d"}, "layout": ["pairs"]}), f"{tmp_path}/r.json"]
    run("check run --model m", capsys)
    assert asked[2:] == [(("run", "m"), {"names": {}, "layout": []})]


@pytest.mark.parametrize("said", ["lonely", "=point", "="])
def test_a_name_needs_a_pattern_and_a_point(said, capsys):
    code, out, err = run(f"check run --model m --name a=b {said}", capsys)
    assert (code, out) == (2, "") and err == (
        "tplab: --name takes PATTERN=POINT, such as blocks.{i}.mix.out=o_proj; not " + repr(said) + "\n")


def test_a_cell_of_a_notebook_can_run_a_command():
    with redirect_stdout(io.StringIO()) as cell:  # as a kernel's stream: no file, no encoding to be set
        assert not hasattr(cell, "reconfigure") and cli.main(["faults", "qkv_order"]) == 0
    assert "qkv_order" in cell.getvalue()


@pytest.mark.parametrize("ok, code", [(True, 0), (False, 1)])
def test_the_fast_paths_ends_are_an_exit_code(ok, code, capsys, monkeypatch):
    class Report(SimpleNamespace):
        def __str__(self):
            return "its table"

    asked = []
    monkeypatch.setattr("tplab.align.align_fast", lambda *given, **options: asked.append(options) or Report(ok=ok))
    assert run("align fable --ids 1,2,3 --tp 3 --dtype bfloat16 --fast", capsys) == (code, "its table\n", "")
    assert asked == [{"tensor_parallel_size": 3, "dtype": "bfloat16"}]


@pytest.mark.parametrize("more, words", [("--fault nan_mask", "leave out --fault"),
                                         ("--json x.json", "leave out --json"), ("", "three tokens or more")])
def test_what_does_not_fit_the_fast_path_is_said(more, words, capsys):
    code, out, err = run(f"align fable --ids 1,2 --fast {more}", capsys)
    assert (code, out) == (2, "") and words in err


def test_the_installed_command_is_the_same(root):
    script = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]["tplab"]
    assert script == f"{cli.main.__module__}:{cli.main.__name__}"


def test_a_reader_that_leaves_early_is_no_crash():
    done = subprocess.run([f"{sys.executable} -m tplab faults | head -1"], shell=True, capture_output=True, text=True)
    assert done.stdout == "01_mask_nan\n" and done.stderr == ""


def test_a_closed_pipe_is_no_error(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        assert cli.main(["faults"]) == 0

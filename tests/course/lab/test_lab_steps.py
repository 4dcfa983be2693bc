"""The steps of the batch and of the doctor, one by one and without a kernel."""

import json
import shutil
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import papermill
import psutil
import pytest
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course.lab import batch, doctor, environment, report
from course.lab.batch import BatchError, Outcome
from course.lab.doctor import Finding
from tplab.checkpoint import CheckpointError


def notebook_at(path, *cells, **metadata):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(new_notebook(cells=list(cells), metadata=metadata)))
    return path


def test_a_notebook_in_this_folder_is_one_wherever_the_run_goes_on(tmp_path, monkeypatch):
    notebook_at(tmp_path / "own.ipynb")
    (tmp_path / "folder.ipynb").mkdir()
    monkeypatch.chdir(tmp_path)
    assert batch.choose(["own.ipynb"], tmp_path / "none") == [tmp_path / "own.ipynb"]
    for name in ("folder.ipynb", "own"):
        with pytest.raises(BatchError, match=f"no notebook '{name}'; there are: none"):
            batch.choose([name], tmp_path / "none")
    with pytest.raises(BatchError, match="there is no notebook in"):
        batch.choose([], tmp_path / "none")


def test_parameters_are_those_of_the_first_cell_that_is_tagged(tmp_path):
    tagged = {"tags": ["x", "parameters"]}
    book = notebook_at(tmp_path / "own.ipynb", new_code_cell("other = 1"), new_code_cell("a = 1", metadata=tagged),
                       new_code_cell("b = 2", metadata=tagged))
    assert batch.declared_parameters(book) == {"a": 1}
    for text, words in (("True", "a is int"), ("1.0", "a is int"), ("x", "a is int")):
        with pytest.raises(BatchError, match=words):
            batch.assign([book], [["a", text]])
    assert batch.assign([book], [["a", "1"], ["a", "7"]]) == ({book: {"a": 7}}, {}), "the last one counts"


def test_what_is_no_utf8_is_seen_at_both_ends():
    assert [batch._is_utf8(text) for text in ("\ud7ff\ue000", "\ud800", "a\udfff")] == [True, False, False]


def test_only_what_this_run_will_write_is_cleared_away(tmp_path):
    out = tmp_path / "out"
    (out / "deep").mkdir(parents=True)
    for name in ("index.html", "own.html", "other.html"):
        (out / name).write_text(report.MARK)
    for name in ("own.ipynb", "other.ipynb"):
        notebook_at(out / name, papermill={})
    assert batch.results_folder(str(out), [notebook_at(tmp_path / "own.ipynb")], ["own"]) == out
    assert sorted(path.name for path in out.iterdir()) == ["deep", "other.html", "other.ipynb"]
    assert batch.results_folder(str(out / "a/b"), [], []).is_dir()


@pytest.mark.parametrize("error, words", [
    (papermill.PapermillExecutionError(3, 7, "", "ValueError", "one\ntwo", []), "cell [7]: ValueError: one"),
    (papermill.PapermillExecutionError(3, 7, "", "KeyboardInterrupt", "", []), "cell [7]: KeyboardInterrupt"),
    (TimeoutError(" \nA cell timed out\nafter"), "TimeoutError: A cell timed out"), (RuntimeError(), "RuntimeError: "),
    (None, None)])
def test_what_papermill_is_asked_and_what_it_says(error, words, tmp_path, monkeypatch):
    def execute(*given, **options):
        asked.append((given, options))
        if error:
            raise error

    asked = []
    monkeypatch.setattr(papermill, "execute_notebook", execute)
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True))
    out = tmp_path / "results/out.ipynb"
    outcome = batch.run_notebook(tmp_path / "own.ipynb", {"a": 1}, out)
    assert asked == [((tmp_path / "own.ipynb", out), {
        "parameters": {"a": 1}, "cwd": tmp_path, "execution_timeout": batch.SECONDS_PER_CELL, "progress_bar": True,
        "extra_arguments": batch.QUIET_KERNEL})]
    assert (outcome.notebook, outcome.name, outcome.page) == (tmp_path / "own.ipynb", "out", out.with_suffix(".html"))
    assert 0 <= outcome.seconds < 60
    assert outcome.failure == words if error is None or words[-1] != " " else outcome.failure.startswith(words)


@pytest.mark.parametrize("name, text, ours", [
    ("a.ipynb", '{"metadata": {"papermill": {}}}', True), ("a.ipynb", '{"metadata": {}, "x": ["papermill"]}', False),
    ("a.ipynb", "[1]", False), ("a.ipynb", '{"metadata": 3}', False), ("a.ipynb", "{}", False), ("a.ipynb", "{", False),
    ("a.html", f"<html><head>{report.MARK}", True), ("a.html", "<html>papermill", False)])
def test_what_an_earlier_run_has_written(name, text, ours, tmp_path):
    (tmp_path / name).write_text(text)
    assert batch._is_result(tmp_path / name) == ours
    (tmp_path / name).write_bytes(b"\xff" + text.encode())
    assert not batch._is_result(tmp_path / name)


def test_each_notebook_is_announced_and_the_table_is_aligned(tmp_path, monkeypatch, capsys):
    took = {"a_long_name_of_its_own": (1.25, None), "b": (200.0, "cell [1]: ValueError: x")}
    for name in took:
        notebook_at(tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(batch, "FOLDER", tmp_path)
    monkeypatch.setattr(batch, "run_notebook", lambda notebook, parameters, target: Outcome(notebook, target,
                                                                                            *took[target.stem]))
    assert batch.main([json.dumps({"notebooks": [], "parameters": [], "out": str(tmp_path / "out")})]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "[1/2] a_long_name_of_its_own ...", "      passed, 1.2 s",
        "[2/2] b ...", "      cell [1]: ValueError: x, 200.0 s", "",
        "notebook                result  seconds",
        "a_long_name_of_its_own  passed      1.2",
        "b                       FAILED    200.0  cell [1]: ValueError: x", "",
        f"report: {tmp_path}/out/index.html"]


def test_the_table_is_as_wide_as_its_title():
    assert batch.table([Outcome(Path("b.ipynb"), Path("b.ipynb"), 0.04, None)]).splitlines() == [
        "notebook  result  seconds", "b         passed      0.0"]


def test_an_interrupted_batch_reports_what_had_run(tmp_path, monkeypatch, capsys):
    def execute(notebook, target, **options):
        if notebook.stem == "b":
            raise KeyboardInterrupt

    for name in "abc":
        notebook_at(tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(batch, "FOLDER", tmp_path)
    monkeypatch.setattr(papermill, "execute_notebook", execute)
    assert batch.main([json.dumps({"notebooks": [], "parameters": [], "out": str(tmp_path / "out")})]) == 130
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-4:-2]] == [["a", "passed"], ["b", "FAILED"]]
    page = (tmp_path / "out/index.html").read_text()
    assert "stopped by Ctrl-C" in page and "<td>c</td>" not in page and "<td>b</td>" in page


def test_the_real_model_is_fetched_before_it_is_opened(monkeypatch, tmp_path):
    steps = []
    monkeypatch.setattr("tplab.checkpoint.fetch", lambda name: steps.append(("fetch", name)))
    monkeypatch.setattr("tplab.checkpoint.open_checkpoint",
                        lambda name: steps.append(("open", name)) or SimpleNamespace(folder=tmp_path))
    assert batch._model_at_hand("smollm2") == "smollm2" and batch._model_at_hand("fable") == "fable"
    assert steps == [("fetch", "smollm2"), ("open", "smollm2"), ("open", "fable")]


def test_pages_hold_pictures_instead_of_live_views_and_no_half_letters(tmp_path):
    view = "application/vnd.jupyter.widget-view+json"
    shown = new_output("display_data", data={view: {"model_id": "x"}, "image/png": "iVBOR"})
    printed = new_output("stream", text="half a letter: \ud83d")
    inner = new_output("display_data", data={"text/html": "<head></head>"})  # a page within the page
    cell = new_code_cell("", outputs=[shown, printed, inner])
    book = notebook_at(tmp_path / "own.ipynb", new_markdown_cell("# Own"), cell,
                       widgets={"state": {}})
    read = report._read(book)
    assert set(read.cells[1].outputs[0].data) == {"image/png"} and "widgets" not in read.metadata
    report.write_report([Outcome(book, book, 1.0, None)], {}, tmp_path)
    page = (tmp_path / "own.html").read_text()
    assert "half a letter: ?" in page and page.count(report.MARK) == 1 and "<head></head>" in page
    assert "<title>own</title>" in page
    assert report._read(tmp_path / "none.ipynb") is None
    (tmp_path / "part.ipynb").write_text('{"cells": [')
    assert report._read(tmp_path / "part.ipynb") is None


# ---- the doctor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory, disk", [(3e9, 1e9), (1e9, 3e9)])
def test_little_memory_or_disk_is_a_note(memory, disk, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory, total=9e9))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=disk, total=9e9))
    python, *found = map(str, doctor.machine())
    assert python.startswith("[ok  ] Python 3.")
    assert [line.split("\n")[0] for line in found] == [
        f"[{'ok  ' if memory > 2e9 else 'note'}] {memory / 1e9:.1f} GB of memory free",
        f"[{'ok  ' if disk > 2e9 else 'note'}] {disk / 1e9:.1f} GB of disk free"]


def test_packages_are_those_of_this_machine_and_a_build_of_a_version_is_that_version(monkeypatch):
    assert list(doctor.packages(["no-such; python_version < '3'", "no-such; sys_platform == 'none'"])) == []
    (absent,) = doctor.packages(["no-such>=3; python_version > '3'"])
    assert str(absent).startswith("[FAIL] no-such is not installed (required: >=3)\n       -> ")
    assert "pip install" in absent.remedy
    monkeypatch.setattr(metadata, "version", lambda name: {"torch": "2.13.0+cpu", "new": "3.0rc1"}[name])
    assert [bool(found.remedy) for found in doctor.packages(["torch==2.13.0", "new>=2", "new>=3", "torch"])] == [
        False, False, True, False]
    (found,) = doctor.packages(["new>=4; extra == 'test'", "gone; extra == 'browser'"])
    assert str(found).startswith("[note] new 3.0rc1 (required: >=4, for launch test)\n       -> ")
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch==1"] if name == "tplab" else [])
    (found,) = doctor.packages()
    assert str(found).startswith("[FAIL] torch 2.13.0+cpu (required: ==1)\n       -> ")


@pytest.mark.parametrize("program, ours", [("python", True), ("python3", True), (sys.executable, True),
                                           (f"{sys.executable}-of-this-folder", True),
                                           ("/elsewhere/bin/python", False)])
def test_the_kernel_is_this_python_or_another(program, ours, monkeypatch):
    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda self, name: SimpleNamespace(argv=[program, "-m"]))
    (found,) = doctor.kernel()
    assert found.what == f"Jupyter kernel 'python3' runs {'this Python' if ours else program}"
    assert bool(found.remedy) != ours


def test_a_user_without_a_home_folder_is_told(monkeypatch):
    def nobody(number):
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    (found,) = doctor.kernel()
    assert "Could not determine home directory" in found.what and "HOME" in found.remedy and found.essential


def test_no_kernel_broken_models_and_ranks_that_cannot_meet_have_a_remedy(monkeypatch):
    def missing(self, name):
        raise NoSuchKernel(name)

    def refused(*given):
        raise CheckpointError("it is gone")

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", missing)
    monkeypatch.setattr("tplab.checkpoint.open_checkpoint", refused)
    monkeypatch.setattr("tplab.pool.RankPool", refused)
    found = [*doctor.kernel(), *doctor.models(), *doctor.ranks()]
    assert [(one.what, one.essential) for one in found] == [
        ("Jupyter has no kernel 'python3'", True), ("model fable: it is gone", True),
        ("model fable-moe: it is gone", False), ("model smollm2: it is gone", False),
        ("two ranks cannot work together: it is gone", True)]
    for one, words in zip(found, ("ipykernel install", "git checkout", "git checkout", "-m tplab fetch smollm2",
                                  "is_gloo_available")):
        assert words in one.remedy


def test_a_machine_is_ready_whatever_it_could_have_besides(monkeypatch):
    monkeypatch.setattr(doctor, "packages", lambda: [Finding("a"), Finding("no b", "get b"), Finding("no c", "get it")])
    monkeypatch.setattr(doctor, "kernel", lambda: [Finding("a kernel")])
    monkeypatch.setattr(doctor, "models", lambda: [Finding("fable"), Finding("no s", "fetch it", essential=False)])
    shown = environment()
    assert list(shown.frame["state"]) == ["no b → get b; no c → get it", "ok", "ok"] and str(shown).count("✗") == 1

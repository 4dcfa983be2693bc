"""``launch run``: the batch, what it refuses, what it never overwrites, its report, and how a notebook is stored."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course.__main__ import main
from course.lab import batch, report, store

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
PARAMETERS = 'model = "fable"\ntensor_parallel_size = 2\nprompt = "Once"\nscale = 1.0\nfast = True'


def write_notebook(path, *sources, parameters=PARAMETERS, kernel=KERNEL):
    """``parameters``: the source of the cell; None for a notebook without one, which links to good.ipynb."""
    cells = ([new_markdown_cell("# None, see [next](good.ipynb) and [other](other.ipynb)")] if parameters is None
             else [new_code_cell(parameters, metadata={"tags": ["parameters"]})])
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells + [new_code_cell(source) for source in sources],
                                metadata={"kernelspec": kernel}), path)
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One batch of three: one raises, one prints its parameters, one is no notebook. ``(folder, exit code)``."""
    place = tmp_path_factory.mktemp("batch")
    bad = write_notebook(place / "bad.ipynb", "raise ValueError('no <head>\\nmore')", parameters=None)
    good = write_notebook(place / "good.ipynb", "print(tensor_parallel_size, prompt, scale, fast)")
    (place / "none.ipynb").write_text("hello")
    return place, main(["run", str(bad), str(good), str(place / "none.ipynb"), "--out", str(place / "out"),
                        "-p", "tensor_parallel_size", "3", "-p", "prompt", "7", "-p", "scale", "2",
                        "-p", "fast", "False"])


def test_one_failure_does_not_stop_the_rest_and_every_notebook_is_reported(done):
    place, code = done
    assert code == 1 and sorted(os.listdir(place / "out")) == [
        "bad.html", "bad.ipynb", "good.html", "good.ipynb", "index.html"]
    printed = [output.text for cell in nbformat.read(place / "out/good.ipynb", as_version=4).cells
               for output in cell.get("outputs", ()) if output.output_type == "stream"]
    assert printed == ["3 7 2 False\n"], "values are read by the type of the parameter that they replace"
    index = (place / "out/index.html").read_text()
    assert "2 of 3 failed" in index and "cell [1]: ValueError: no &lt;head&gt;" in index
    assert "failed: not a notebook: " in index and 'href="good.html"' in index and 'href="none.html"' not in index


def test_after_ctrl_c_what_has_begun_is_reported_and_nothing_else_begins(tmp_path):
    notebooks = [write_notebook(tmp_path / f"{name}.ipynb", f"open('began-{name}', 'w').close()", "import time",
                                "time.sleep(600)") for name in "abc"]
    batch_run = subprocess.Popen([sys.executable, "-m", "course", "run", *notebooks, "--out", tmp_path / "out"],
                                 stdout=subprocess.PIPE, text=True)
    assert {batch_run.stdout.readline(), batch_run.stdout.readline()} == {"[1/3] a ...\n", "[2/3] b ...\n"}
    while not all((tmp_path / f"began-{name}").exists() for name in "ab"):
        assert batch_run.poll() is None
        time.sleep(0.05)
    batch_run.send_signal(signal.SIGINT)
    said = batch_run.communicate(timeout=60)[0]
    assert batch_run.returncode == 130 and said.count(batch.STOPPED) == 2 and "[3/3]" not in said
    assert sorted(os.listdir(tmp_path / "out")) == ["a.html", "a.ipynb", "b.html", "b.ipynb", "index.html"]


def test_a_page_needs_no_network_and_links_only_to_pages_that_are_there(done):
    page = (done[0] / "out/bad.html").read_text()
    assert '<a href="good.html">next</a>' in page and " and other" in page.replace("\n", " ")
    assert not re.search(r"""src=["']https?://""", page) and "<title>bad" in page


def test_the_report_of_a_folder_says_the_same(done, capsys):
    out = done[0] / "out"
    assert main(["report", str(out)]) == 1
    assert capsys.readouterr().out == f"report: {out}/index.html\n"
    index = (out / "index.html").read_text()
    assert "1 of 2 failed" in index and "ValueError: no &lt;" in index
    (out / "empty").mkdir()
    assert main(["report", str(out / "empty")]) == 2 and "no notebook in" in capsys.readouterr().err


def test_what_a_notebook_prints_cannot_write_into_the_page_or_break_it(tmp_path):
    view = "application/vnd.jupyter.widget-view+json"
    shown = new_output("display_data", data={view: {"model_id": "x"}, "image/png": "iVBOR"})
    cell = new_code_cell("", outputs=[shown, new_output("stream", text="half a letter: \ud83d")])
    (tmp_path / "own.ipynb").write_text(json.dumps(new_notebook(cells=[cell])))
    (tmp_path / "part.ipynb").write_text('{"cells": [')
    outcomes = [report.Outcome(tmp_path / f"{name}.ipynb", tmp_path / f"{name}.ipynb", 1.5, None)
                for name in ("own", "part")]
    index = report.write_report(outcomes, {"prompt": "<i>Once</i>"}, tmp_path).read_text()
    assert "prompt = &lt;i&gt;Once&lt;/i&gt; · 3.0 s" in index and "all 2 passed" in index and "part.html" not in index
    page = (tmp_path / "own.html").read_text()
    assert "half a letter: ?" in page and "data:image/png;base64,iVBOR" in page


@pytest.mark.parametrize("words, said", [
    ("nowhere", "no notebook 'nowhere'; there are: 00_one, 01_two"), ("a" * 300 + ".ipynb", "no notebook 'aaa"),
    ("-p tp 3", "no notebook has a parameter 'tp'; there are: fast, model, prompt, scale, tensor_parallel_size"),
    ("-p tensor_parallel_size two", "parameter tensor_parallel_size is int (default 2), not 'two'"),
    ("-p tensor_parallel_size 2.5", "parameter tensor_parallel_size is int (default 2), not '2.5'"),
    ("-p fast 1", "parameter fast is bool"), ("-p model no-such-model", "no-such-model"),
    ("00 00_one", "two notebooks would both write 00_one.html"), ("00 --out {place}/file", "File exists; --out names"),
    ("00 --out {place}/file/below", "Not a directory"), ("00 --out " + "a" * 300, "File name too long")])
def test_what_cannot_be_run_is_refused_in_one_line_before_anything_runs(words, said, tmp_path, monkeypatch, capsys):
    for name in ("00_one", "01_two"):
        write_notebook(tmp_path / "notebooks" / f"{name}.ipynb")
    (tmp_path / "file").write_text("kept")
    monkeypatch.setattr(batch, "FOLDER", tmp_path / "notebooks")
    assert main(["run", *words.format(place=tmp_path).split()]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and (tmp_path / "file").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["file", "notebooks"]


@pytest.mark.parametrize("name", ["own.ipynb", "own.html", "index.html"])
def test_a_result_never_overwrites_a_file(name, tmp_path, capsys):
    own, kept = write_notebook(tmp_path / "own.ipynb"), write_notebook(tmp_path / "work" / name)
    before = kept.read_bytes()
    assert main(["run", str(own), "--out", str(kept.parent)]) == 2
    assert f"{kept} is there already" in capsys.readouterr().err
    assert kept.read_bytes() == before and len(os.listdir(kept.parent)) == 1


def test_notebooks_are_named_by_stem_number_or_path_and_get_the_parameters_that_they_declare(tmp_path):
    first, second = (write_notebook(tmp_path / f"{name}.ipynb", parameters=cell) for name, cell in (
        ("00_one", "a = 2 * 3\nb = 'x'  # words\nscale = 0.5"), ("01_two", None)))
    for name in ("00", "00_one", "00_one.ipynb", "notebooks/00_one.ipynb", str(first)):
        assert batch.choose([name], tmp_path) == [first]
    assert batch.choose([], tmp_path) == [first, second]
    assert batch.declared_parameters(first) == {"a": None, "b": "x", "scale": 0.5}
    pairs = [["scale", "2"], ["scale", "0.25"], ["a", "7"], ["b", "7"]]
    assert batch.assign([first, second], pairs) == ({first: {"scale": 0.25, "a": 7, "b": "7"}, second: {}}, {})


def test_a_notebook_is_stored_executed_without_times_or_a_learners_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TPLAB_PROGRESS", "/mine")
    path = write_notebook(tmp_path / "own.ipynb", "import os; print(os.getcwd(), os.environ['TPLAB_PROGRESS'])",
                          parameters="seed = 0")
    store.main([str(path)])
    assert capsys.readouterr().out == f"stored {path}\n"
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.execution_count for cell in cells] == [1, 2] and "execution" not in cells[1].metadata
    folder, progress = cells[1].outputs[0].text.split()
    assert folder == str(tmp_path) and progress != "/mine" and not os.path.exists(progress)
    with pytest.raises(SystemExit, match="there is no notebook .*none.ipynb"):
        store.main([str(tmp_path / "none.ipynb")])

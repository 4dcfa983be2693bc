"""What ``launch run`` hands over to: the batch and its report."""

import ast
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import nbformat
import papermill
import pytest
from helpers.checkpoints import make_checkpoint
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course.lab import batch

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
PARAMETERS = 'model = "fable"\ntensor_parallel_size = 2\nprompt = "Once"\nscale = 1.0\nfast = True'
PLOT = """import matplotlib.pyplot as plt
from IPython.display import SVG, display
plt.plot([1, 2]); plt.show()
print("Figure: a line that rises & rises")
display(SVG('<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'))
print("Figure: nothing at all")"""


def write_notebook(path, *sources, parameters=PARAMETERS, kernel=KERNEL):
    """``parameters``: the source of the cell; None for a notebook without one, which links to good.ipynb."""
    if parameters is None:
        cells = [new_markdown_cell("# None, see [next](good.ipynb)")]
    else:
        cells = [new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    cells += [new_code_cell(source) for source in sources]
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


def run(notebooks, out, *parameters):
    """The batch's exit code."""
    asked = {"notebooks": list(map(str, notebooks)), "parameters": parameters, "out": None if out is None else str(out)}
    return batch.main([json.dumps(asked)])


@pytest.fixture
def no_kernel(monkeypatch):
    """Papermill prepares and writes what it does, and no kernel is started: ``print('words')`` has printed."""
    def execute(notebook, target, **options):
        book = papermill_itself(notebook, target, **options, prepare_only=True)
        for cell in book.cells:
            if cell.source.startswith("print("):
                cell.outputs = [new_output("stream", text=ast.literal_eval(cell.source[6:-1]))]
        nbformat.write(book, target)

    papermill_itself = papermill.execute_notebook
    monkeypatch.setattr(papermill, "execute_notebook", execute)


def links(page):
    return re.findall(r'<td><a href="([^"]+)"', page.read_text())


def test_batch_goes_on_after_a_failure_and_reports_every_notebook(tmp_path, capsys):
    notebooks = [
        write_notebook(tmp_path / "bad.ipynb", "def f():\n    raise ValueError('no <head>\\nmore')\nf()",
                       parameters=None),
        write_notebook(tmp_path / "good.ipynb", "print(tensor_parallel_size, prompt, scale, fast)", PLOT),
    ]
    asked = {"notebooks": list(map(str, notebooks)), "out": str(tmp_path / "out"),
             "parameters": [["tensor_parallel_size", "3"], ["prompt", "7"], ["scale", "2"],
                            ["fast", "False"]]}  # fmt: skip
    assert batch.main([json.dumps(asked)]) == 1

    said = capsys.readouterr().out
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith(("bad", "good"))}
    assert "FAILED" in rows["bad"] and "cell [1]: ValueError: no <head>" in rows["bad"]
    assert "passed" in rows["good"]

    good = nbformat.read(tmp_path / "out/good.ipynb", as_version=4)
    printed = [output.text
               for cell in good.cells for output in cell.get("outputs", []) if output.output_type == "stream"]
    assert printed[0] == "3 7 2 False\n", "values are read by the type of the parameter they replace"
    assert "ValueError" in (tmp_path / "out/bad.ipynb").read_text()

    index = (tmp_path / "out/index.html").read_text()
    assert "1 of 2 failed" in index and "no &lt;head&gt;" in index
    assert 'alt="Figure: a line that rises &amp; rises"' in index and "data:image/png;base64,iVBOR" in index
    assert re.search('data:image/svg[+]xml;base64,[^"]+" alt="Figure: nothing at all"', index)
    assert 'href="good.html"' in (tmp_path / "out/bad.html").read_text()
    for name in ("bad", "good"):
        assert f'href="{name}.html"' in index
        assert "<html" in (tmp_path / f"out/{name}.html").read_text()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"notebooks": ["nowhere"]}, "no notebook 'nowhere'; there are: 00_one, 01_two"),
        ({"parameters": [["tp", "3"]]},
         "no notebook has a parameter 'tp'; there are: fast, model, prompt, scale, tensor_parallel_size"),
        ({"parameters": [["tensor_parallel_size", "two"]]},
         "parameter tensor_parallel_size is int (default 2), not 'two'"),
        ({"parameters": [["tensor_parallel_size", "2.5"]]},
         "parameter tensor_parallel_size is int (default 2), not '2.5'"),
        ({"parameters": [["fast", "1"]]}, "parameter fast is bool"),
        ({"parameters": [["model", "no-such-model"]]}, "no-such-model"),
    ],
)
def test_batch_refuses_what_does_not_exist_before_anything_runs(tmp_path, monkeypatch, capsys, change, words):
    for name in ("00_one", "01_two"):
        write_notebook(tmp_path / f"{name}.ipynb")
    monkeypatch.setattr(batch, "FOLDER", tmp_path)
    asked = {"notebooks": [], "parameters": [], "out": str(tmp_path / "out"), **change}
    assert batch.main([json.dumps(asked)]) == 2
    said = capsys.readouterr()
    assert words in said.err and len(said.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_notebooks_are_named_by_stem_number_or_path(tmp_path):
    paths = [write_notebook(tmp_path / f"{name}.ipynb") for name in ("00_one", "01_two")]
    for name in ("01", "01_two", "01_two.ipynb", "notebooks/01_two.ipynb", str(paths[1])):
        assert batch.choose([name], tmp_path) == [paths[1]]
    assert batch.choose([], tmp_path) == paths


def test_parameter_goes_only_to_the_notebooks_that_declare_it(tmp_path):
    with_it, without = write_notebook(tmp_path / "a.ipynb"), write_notebook(tmp_path / "b.ipynb", parameters=None)
    assert batch.assign([with_it, without], [["scale", "0.5"]]) == ({with_it: {"scale": 0.5}, without: {}}, {})
    assert batch.assign([without, with_it], [["scale", "0.5"]])[0][with_it] == {"scale": 0.5}


# ---- what is written where -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["its own folder", "a folder of links", "an earlier run's folder"])
def test_a_result_never_overwrites_a_notebook_that_was_asked_for(named, tmp_path, capsys):
    own = write_notebook(tmp_path / "work/own.ipynb", "print(1)")
    out = own.parent
    if named == "a folder of links":
        out = tmp_path / "out"
        out.mkdir()
        os.link(own, out / "own.ipynb")
    elif named == "an earlier run's folder":
        assert run([own], tmp_path / "out") == 0
        own, out = tmp_path / "out/own.ipynb", tmp_path / "out"
    before = own.read_bytes()
    assert run([own], out) == 2
    err = capsys.readouterr().err
    assert f"{out}/own.ipynb is one of the notebooks to run and would be overwritten" in err and err.count("\n") == 1
    assert own.read_bytes() == before


@pytest.mark.parametrize("theirs", ["own.ipynb", "own.html", "index.html"])
def test_a_result_never_overwrites_what_no_run_has_written(theirs, tmp_path, capsys):
    own = write_notebook(tmp_path / "own.ipynb")
    kept = tmp_path / "work" / theirs
    write_notebook(kept) if kept.suffix == ".ipynb" else (kept.parent.mkdir(), kept.write_text("<html>mine</html>"))
    before = kept.read_bytes()
    assert run([own], kept.parent) == 2
    assert f"{kept} was not written by an earlier run" in capsys.readouterr().err
    assert kept.read_bytes() == before and os.listdir(kept.parent) == [theirs]


def test_a_result_is_not_written_through_a_link(tmp_path, capsys):
    own, theirs = write_notebook(tmp_path / "own.ipynb"), write_notebook(tmp_path / "theirs.ipynb")
    (tmp_path / "out").mkdir()
    for target in (theirs, "nowhere"):
        (tmp_path / "out/own.ipynb").symlink_to(target)
        assert run([own], tmp_path / "out") == 2
        assert "out/own.ipynb is a link" in capsys.readouterr().err
        (tmp_path / "out/own.ipynb").unlink()


def test_results_with_one_name_have_files_of_their_own(tmp_path, capsys, no_kernel):
    """Two of one name, one that is called like the report, two whose names mean something in an address."""
    names = ["a/own", "b/own", "index", "a#b", "c%25d"]
    notebooks = [write_notebook(tmp_path / f"{name}.ipynb", f"print('this is {name}')") for name in names]
    out = tmp_path / "out"
    assert run(notebooks, out) == 0
    assert "[2/5] own-2, from " in capsys.readouterr().out
    assert links(out / "index.html") == ["own.html", "own-2.html", "index-2.html", "a%23b.html", "c%2525d.html"]
    for name, written in zip(names, ["own", "own-2", "index-2", "a#b", "c%25d"]):
        assert f"this is {name}" in (out / f"{written}.html").read_text()
        assert f"this is {name}" in (out / f"{written}.ipynb").read_text()
    assert "all 5 passed" in (out / "index.html").read_text()
    assert run(notebooks[:2], out) == 0, "an earlier run's own results may be overwritten"


def test_names_are_distinct_whatever_they_are():
    notebooks = [Path(f"{name}.ipynb") for name in ("x", "X", "x-2", "x", "index", "Index")]
    assert batch.result_names(notebooks) == ["x", "X-2", "x-2-2", "x-3", "index-2", "Index-3"]


def test_links_between_notebooks_lead_to_the_page_of_the_one_beside_them(tmp_path, no_kernel):
    first = new_notebook(cells=[new_markdown_cell("[on](next%20%232.ipynb)")], metadata={"kernelspec": KERNEL})
    notebooks = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        notebooks += [folder / "first.ipynb", write_notebook(folder / "next #2.ipynb")]
        nbformat.write(first, folder / "first.ipynb")
    assert run(notebooks, tmp_path / "out") == 0
    assert 'href="next%20%232.html"' in (tmp_path / "out/first.html").read_text()
    assert 'href="next%20%232-2.html"' in (tmp_path / "out/first-2.html").read_text()


def test_two_runs_in_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    class OneSecond:
        now = staticmethod(lambda: datetime(2030, 1, 2, 3, 4, 5))

    monkeypatch.setattr(batch, "FOLDER", tmp_path / "notebooks")
    monkeypatch.setattr(batch, "datetime", OneSecond)
    with ThreadPoolExecutor(8) as several:
        folders = set(several.map(lambda _: batch.results_folder(None, [], []), range(8)))
    expected = ["2030-01-02_03-04-05", *(f"2030-01-02_03-04-05-{count}" for count in range(2, 9))]
    assert folders == {tmp_path / "runs" / name for name in expected}


# ---- what is no notebook, and what cannot be run ---------------------------------------------------------------------


NO_NOTEBOOK = {
    "words": b"hello", "empty": b"", "bytes": b"\xff\xfe", "list": b"[1]", "object": b"{}",
    "cells": b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [1]}',
    "version": b'{"nbformat": 9, "nbformat_minor": 0, "metadata": {}, "cells": []}',
}


def test_what_is_no_notebook_fails_by_itself_in_one_line(tmp_path, capsys):
    notebooks = [tmp_path / f"{name}.ipynb" for name in NO_NOTEBOOK]
    for notebook, content in zip(notebooks, NO_NOTEBOOK.values()):
        notebook.write_bytes(content)
    notebooks += [
        write_notebook(tmp_path / "good.ipynb", "print(prompt)"),
        write_notebook(tmp_path / "kernel.ipynb", kernel={**KERNEL, "name": "no_such"}),
        write_notebook(tmp_path / "syntax.ipynb", parameters="seed = = 3"),
        write_notebook(tmp_path / os.fsdecode(b"bytes\xff.ipynb")),
    ]
    assert run(notebooks, tmp_path / "out", ("prompt", "Twice")) == 1
    said = capsys.readouterr().out
    table = {line.split()[0]: line for line in said[said.index("notebook "):].splitlines() if line.strip()}
    for name in NO_NOTEBOOK:
        assert re.search("FAILED +0.0  not a notebook: .", table[name])
    assert "No such kernel named no_such" in table["kernel"]
    assert "the parameters cell is not Python: invalid syntax" in table["syntax"]
    assert said.count("its name is not UTF-8; rename it") == 2
    assert "passed" in table["good"] and "Twice" in (tmp_path / "out/good.html").read_text()
    assert "10 of 11 failed" in (tmp_path / "out/index.html").read_text()
    assert set(links(tmp_path / "out/index.html")) == {"good.html", "kernel.html"}


def test_a_notebook_that_fails_before_it_starts_shows_no_earlier_result(tmp_path):
    own, out = write_notebook(tmp_path / "own.ipynb", "print('earlier')"), tmp_path / "out"
    assert run([own], out) == 0
    own.write_text("now broken")
    assert run([own], out) == 1
    assert os.listdir(out) == ["index.html"] and links(out / "index.html") == []


def test_a_parameters_cell_may_hold_more_than_literals(tmp_path, no_kernel):
    cell = "%matplotlib inline\n!true\na = 2 * 3\nb: str = 'x'\nc, d = 1, 2\ne = f = 0.5\nimport os\ng: int"
    notebook = write_notebook(tmp_path / "own.ipynb", parameters=cell)
    assert batch.declared_parameters(notebook) == {"a": None, "b": "x", "e": 0.5, "f": 0.5}
    assert run([notebook], tmp_path / "out", ("a", "7"), ("b", "7")) == 0
    executed = (tmp_path / "out/own.ipynb").read_text()
    assert "a = 7" in executed and 'b = \\"7\\"' in executed


@pytest.mark.parametrize("out, parameter, words", [
    ("a_file", None, "results cannot be written to .*a_file: File exists; --out names a folder"),
    ("a_file/below", None, "results cannot be written to .*below: Not a directory"),
    ("a" * 300, None, "File name too long"),
    ("\udcff", None, "the name of --out is not UTF-8"),
    ("out", ("prompt", "\udcff"), "parameter prompt is not UTF-8"),
])  # fmt: skip
def test_a_folder_or_a_value_that_cannot_be_used_is_one_line(out, parameter, words, tmp_path, capsys):
    notebook = write_notebook(tmp_path / "own.ipynb")
    (tmp_path / "a_file").write_text("kept")
    assert run([notebook], tmp_path / out, *filter(None, [parameter])) == 2
    err = capsys.readouterr().err
    assert re.search(words, err) and err.count("\n") == 1
    assert (tmp_path / "a_file").read_text() == "kept" and sorted(os.listdir(tmp_path)) == ["a_file", "own.ipynb"]


def test_a_full_disk_in_the_middle_of_a_run_is_one_line(tmp_path, capsys, monkeypatch):
    def half(notebook, target, **options):
        Path(target).write_text('{"cells": [')
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("papermill.execute_notebook", half)
    assert run([write_notebook(tmp_path / "own.ipynb")], tmp_path / "out") == 1
    assert "OSError: [Errno 28] No space left on device" in (tmp_path / "out/index.html").read_text()


def test_a_name_of_300_letters_is_no_notebook(capsys):
    assert run(["a" * 300 + ".ipynb"], None) == 2
    assert "no notebook 'aaa" in capsys.readouterr().err


def test_a_models_folder_is_handed_over_as_a_path_that_holds_anywhere(tmp_path, monkeypatch):
    handed = {}

    def seen(notebook, parameters, target):
        handed.update(parameters)
        return batch.Outcome(notebook, target, 0.0, None)

    make_checkpoint(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(batch, "run_notebook", seen)
    notebook = write_notebook(tmp_path / "own.ipynb")
    assert run([notebook], tmp_path / "out", ("model", "mine")) == 0 and handed["model"] == str(tmp_path / "mine")
    assert "model = mine" in (tmp_path / "out/index.html").read_text(), "as it was asked for"
    assert run([notebook], tmp_path / "out", ("model", "fable")) == 0 and handed["model"] == "fable"

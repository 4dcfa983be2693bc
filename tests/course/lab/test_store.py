"""``python -m course.lab.store``: what is asked of nbconvert, and what a stored notebook does not hold."""

import os
from pathlib import Path

import nbconvert.preprocessors
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course.lab import store


@pytest.fixture
def executed(monkeypatch):
    """Every run: its options, its resources, and where progress would have been kept. A cell that says ``fail`` does.
    """
    runs = []

    class Preprocessor:
        def __init__(self, **options):
            self.options = options

        def preprocess(self, notebook, resources):
            progress = os.environ["TPLAB_PROGRESS"]
            runs.append((self.options, resources, progress, Path(progress).parent.is_dir()))
            if notebook.cells[-1].source == "fail":
                raise RuntimeError("a cell failed")
            notebook.metadata.widgets = {"state": {}}
            for cell in notebook.cells:
                cell.metadata.execution = {"iopub.status.busy": "now"}
                if cell.cell_type == "code":
                    cell.outputs = [new_output("display_data", {store.VIEW: {}, "text/plain": "a panel"}),
                                    new_output("stream", text="done")]
            return notebook, resources

    monkeypatch.setattr(nbconvert.preprocessors, "ExecutePreprocessor", Preprocessor)
    monkeypatch.setenv("TPLAB_PROGRESS", "/mine/progress.json")
    return runs


def written(path, *sources):
    cells = [new_markdown_cell("# It"), *map(new_code_cell, sources)]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "P"}}), path)
    return path


def test_each_notebook_is_run_in_its_own_folder_and_stored_in_its_own_place(executed, tmp_path, monkeypatch, capsys):
    (tmp_path / "deep").mkdir()
    paths = [written(tmp_path / "a.ipynb", "1"), written(tmp_path / "deep/b.ipynb", "2")]
    monkeypatch.chdir(tmp_path)
    store.main(["a.ipynb", "deep/b.ipynb"])
    assert capsys.readouterr().out == "stored a.ipynb\nstored deep/b.ipynb\n"
    (_, _, progress, there), _ = executed
    assert progress != "/mine/progress.json" and there and not Path(progress).parent.exists()
    assert [options for options, *_ in executed] == [
        {"timeout": 1200, "kernel_name": "python3", "record_timing": False, "store_widget_state": False}] * 2
    assert [resources["metadata"]["path"] for _, resources, *_ in executed] == [str(tmp_path), str(tmp_path / "deep")]
    for path, source in zip(paths, "12"):
        book = nbformat.read(path, as_version=4)
        assert dict(book.metadata) == {"kernelspec": {"name": "python3", "display_name": "P"}}
        assert [cell.source for cell in book.cells] == ["# It", source]
        assert not [cell for cell in book.cells if cell.metadata]
        assert book.cells[1].outputs[0].data == {"text/plain": "a panel"} and book.cells[1].outputs[1].text == "done"


def test_what_fails_leaves_the_file_as_it_was_and_what_is_not_there_is_said(executed, tmp_path):
    path = written(tmp_path / "a.ipynb", "fail")
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="a cell failed"):
        store.main([str(path)])
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.ipynb"]
    with pytest.raises(SystemExit, match="there is no notebook .*none.ipynb"):
        store.main([str(tmp_path / "none.ipynb")])

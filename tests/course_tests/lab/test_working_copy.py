"""The learner's own copies: no outputs, untouched ones follow their originals, edited ones stay."""

import json
from pathlib import Path

import pytest

from course.lab import working_copy
from tplab.errors import TplabError

NOTEBOOKS = Path(__file__).resolve().parents[3] / "notebooks"


@pytest.fixture
def folders(tmp_path):
    originals, copies = tmp_path / "notebooks", tmp_path / "my_notebooks"
    for folder in ("engine", "engine/__pycache__", ".ipynb_checkpoints", "course/judge", "tplab_course.egg-info"):
        (originals / folder).mkdir(parents=True)
        (originals / folder / "code.py").write_text("x = 1\n")
    (originals / "pyproject.toml").write_text("[project]\n")
    for name in "ab":
        notebook(originals / f"{name}.ipynb", "stub()")
    return originals, copies


def notebook(path, source, output="1"):
    path.write_text(json.dumps({"cells": [
        {"cell_type": "code", "source": [source], "outputs": [output], "execution_count": 3, "metadata": {}},
        {"cell_type": "markdown", "source": "é"}], "metadata": {}}))


def test_copies_have_no_outputs_and_a_deleted_one_comes_back(folders):
    originals, copies = folders
    before = (originals / "a.ipynb").read_bytes()
    assert working_copy.refresh(*folders) == []
    names = {path.relative_to(copies).as_posix() for path in copies.rglob("*") if path.is_file()}
    assert names == {"a.ipynb", "b.ipynb", "engine/code.py", working_copy.SEEN}, "neither the course nor its project"
    code, words = json.loads((copies / "a.ipynb").read_text())["cells"]
    assert code == {"cell_type": "code", "source": ["stub()"], "outputs": [], "execution_count": None, "metadata": {}}
    assert words["source"] == "é" and (originals / "a.ipynb").read_bytes() == before, "originals keep theirs"
    notebook(copies / "a.ipynb", "mine()")
    (copies / "b.ipynb").unlink()
    assert working_copy.refresh(*folders) == []
    assert "mine()" in (copies / "a.ipynb").read_text() and (copies / "b.ipynb").exists()


def test_no_question_of_the_series_is_answered_in_its_copy(tmp_path):
    working_copy.refresh(NOTEBOOKS, tmp_path)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        original, copy = (json.loads(one.read_text(encoding="utf-8")) for one in (path, tmp_path / path.name))
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in copy["cells"]), path.name
        assert [cell["source"] for cell in copy["cells"]] == [cell["source"] for cell in original["cells"]]
    assert not (tmp_path / "course").exists() and (tmp_path / "patient_zero/model.py").exists()


def test_only_what_was_edited_is_kept_when_the_originals_change(folders):
    originals, copies = folders
    working_copy.refresh(*folders)
    notebook(copies / "a.ipynb", "stub()", "run, and saved by itself")
    notebook(copies / "b.ipynb", "mine()")
    notebook(originals / "a.ipynb", "stub()", "run anew")
    assert working_copy.refresh(*folders) == [] and "saved by itself" in (copies / "a.ipynb").read_text()
    for name in "ab":
        notebook(originals / f"{name}.ipynb", "new_stub()")
    (originals / "engine/code.py").write_text("x = 2\n")
    for _ in range(2):
        assert working_copy.refresh(*folders) == ["b.ipynb"]
        assert "new_stub()" in (copies / "a.ipynb").read_text() and "mine()" in (copies / "b.ipynb").read_text()
        assert (copies / "engine/code.py").read_text() == "x = 2\n"
    notebook(copies / "b.ipynb", "new_stub()")  # brought up to date by hand
    assert working_copy.refresh(*folders) == []


def test_a_copy_that_was_there_before_any_record_is_kept(folders):
    originals, copies = folders
    copies.mkdir()
    (copies / "a.ipynb").write_text("no notebook")
    assert working_copy.refresh(*folders) == ["a.ipynb"]
    assert (copies / "a.ipynb").read_text() == "no notebook"


def test_what_is_said(folders, monkeypatch, capsys):
    originals, copies = folders
    monkeypatch.setattr(working_copy, "ORIGINALS", originals)
    monkeypatch.setattr(working_copy, "COPIES", copies)
    assert working_copy.main() is None
    notebook(copies / "a.ipynb", "mine()")
    notebook(originals / "a.ipynb", "new_stub()")
    assert working_copy.main() is None
    assert "my_notebooks/a.ipynb is kept as you edited it" in capsys.readouterr().out
    for damaged in ("{", "[]"):
        (copies / working_copy.SEEN).write_text(damaged)
        assert "is damaged; delete it" in working_copy.main()
        with pytest.raises(TplabError):
            working_copy.refresh(*folders)
    assert "mine()" in (copies / "a.ipynb").read_text()

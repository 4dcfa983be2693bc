"""The learner's own copies of the notebooks: untouched ones follow their originals, edited ones stay."""

import json

import pytest

from course.lab import working_copy
from tplab.errors import TplabError


@pytest.fixture
def folders(tmp_path):
    originals, copies = tmp_path / "notebooks", tmp_path / "my_notebooks"
    (originals / "engine").mkdir(parents=True)
    (originals / ".ipynb_checkpoints").mkdir()
    (originals / ".ipynb_checkpoints/a.ipynb").write_text("{}")
    (originals / "engine/code.py").write_text("x = 1\n")
    for name in "ab":
        notebook(originals / f"{name}.ipynb", "stub()")
    return originals, copies


def notebook(path, source, output="1"):
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": [source], "outputs": [output]}]}))


def test_copies_are_made_once_and_a_deleted_one_comes_back(folders):
    originals, copies = folders
    assert working_copy.refresh(*folders) == []
    names = {path.relative_to(copies).as_posix() for path in copies.rglob("*") if path.is_file()}
    assert names == {"a.ipynb", "b.ipynb", "engine/code.py", working_copy.SEEN}
    notebook(copies / "a.ipynb", "mine()")
    (copies / "b.ipynb").unlink()
    assert working_copy.refresh(*folders) == []
    assert "mine()" in (copies / "a.ipynb").read_text()
    assert (copies / "b.ipynb").read_bytes() == (originals / "b.ipynb").read_bytes()


def test_only_what_was_edited_is_kept_when_the_originals_change(folders):
    originals, copies = folders
    working_copy.refresh(*folders)
    notebook(copies / "a.ipynb", "stub()", "run, and saved by itself")
    notebook(copies / "b.ipynb", "mine()")
    notebook(originals / "a.ipynb", "new_stub()")
    notebook(originals / "b.ipynb", "new_stub()")
    (originals / "engine/code.py").write_text("x = 2\n")
    for _ in range(2):
        assert working_copy.refresh(*folders) == ["b.ipynb"]
        assert "new_stub()" in (copies / "a.ipynb").read_text() and "mine()" in (copies / "b.ipynb").read_text()
        assert (copies / "engine/code.py").read_text() == "x = 2\n"


def test_a_copy_follows_its_original_again_and_again_also_one_that_was_brought_up_to_date_by_hand(folders):
    originals, copies = folders
    for source in ("stub()", "new()", "newer()", "newest()"):
        notebook(originals / "a.ipynb", source)
        if source == "newest()":
            notebook(copies / "a.ipynb", source, "by hand")
        assert working_copy.refresh(*folders) == []
        assert (copies / "a.ipynb").read_bytes() == (originals / "a.ipynb").read_bytes()
    (originals / "engine/.ipynb_checkpoints").mkdir()
    (originals / "engine/.ipynb_checkpoints/code.py").write_text("x")
    (originals / "engine/__pycache__").mkdir()
    (originals / "engine/__pycache__/code.pyc").write_text("x")
    working_copy.refresh(*folders)
    assert sorted(path.name for path in (copies / "engine").iterdir()) == ["code.py"]


def test_a_cell_of_another_kind_is_an_edit_and_one_cut_into_other_lines_is_none(folders):
    originals, copies = folders
    working_copy.refresh(*folders)
    code = json.loads((copies / "a.ipynb").read_text())
    code["cells"][0]["cell_type"] = "markdown"
    (copies / "a.ipynb").write_text(json.dumps(code))
    code["cells"][0].update(cell_type="code", source=["st", "ub()"])
    (copies / "b.ipynb").write_text(json.dumps(code))
    for name in "ab":
        notebook(originals / f"{name}.ipynb", "new_stub()")
    assert working_copy.refresh(*folders) == ["a.ipynb"]
    assert "new_stub()" in (copies / "b.ipynb").read_text()


def test_an_original_that_only_ran_anew_is_copied_anew_and_kept_files_are_called_by_their_folder(folders):
    originals, copies = folders
    working_copy.refresh(*folders)
    notebook(originals / "a.ipynb", "stub()", "another output")
    (copies / "engine/code.py").write_text("mine = 1\n")
    (originals / "engine/code.py").write_text("x = 2\n")
    assert working_copy.refresh(*folders) == ["engine/code.py"]
    assert "another output" in (copies / "a.ipynb").read_text()


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
    (copies / working_copy.SEEN).write_text("{")
    assert "cannot be kept up to date" in working_copy.main()


@pytest.mark.parametrize("damaged", ['{"a.ipynb": ["1', "[]", '{"a.ipynb": 3}', '{"a.ipynb": ["1", "2", "3"]}', "\xff"])
def test_a_damaged_record_is_named_and_nothing_is_touched(damaged, folders):
    originals, copies = folders
    working_copy.refresh(*folders)
    (copies / working_copy.SEEN).write_text(damaged, encoding="latin-1")
    notebook(originals / "a.ipynb", "new_stub()")
    with pytest.raises(TplabError, match=rf"{copies}/.originals.json is damaged; delete it"):
        working_copy.refresh(*folders)
    assert "new_stub()" not in (copies / "a.ipynb").read_text()

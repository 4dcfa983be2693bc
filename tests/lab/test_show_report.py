"""The report of a batch: what a notebook holds cannot write into the page."""

import nbformat
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tplab.lab.batch import Outcome, write_report


def test_a_pictures_data_stay_data(tmp_path):
    evil = 'iVBOR"><script>alert(1)</script><img src="'
    picture = new_output("display_data", data={"image/png": evil})
    nbformat.write(new_notebook(cells=[new_code_cell("", outputs=[picture])]), tmp_path / "own.ipynb")
    index = write_report([Outcome(tmp_path / "own.ipynb", tmp_path / "own.ipynb", 1.0, None)], {}, tmp_path)
    assert "<script>" not in index.read_text() and "iVBOR&quot;&gt;&lt;script" in index.read_text()

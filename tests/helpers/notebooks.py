"""The cells of a notebook by their tags, and the solutions of the series."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

_NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
_FENCED = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def read(path):
    """A stored notebook's cells, each with its type, source and metadata.

    Without nbformat, which takes two seconds to import: ranks read notebooks too.
    """
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    return SimpleNamespace(cells=[SimpleNamespace(cell_type=cell["cell_type"], source="".join(cell["source"]),
                                                  metadata=cell["metadata"]) for cell in cells])


def tagged(notebook, tag):
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def solution_code(cell) -> str:
    """The one block of code in a folded solution."""
    (code,) = _FENCED.findall(cell.source)
    return code


def solutions(names) -> dict[str, str]:
    """``{exercise: the code of its solution in the notebooks}`` for the exercises called ``names``; a case's repair is
    none."""
    cells = [solution_code(cell) for path in sorted(_NOTEBOOKS.glob("[0-9]*.ipynb"))
             for cell in tagged(read(path), "solution") if "case" not in cell.metadata["tags"]]
    return {name: code for name in names for code in cells
            if re.search(rf"^(?:def|class) {name}\b", code, re.MULTILINE)}

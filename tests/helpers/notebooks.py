"""The cells of a notebook by their tags."""

import re

_FENCED = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def tagged(notebook, tag):
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def solution_code(cell) -> str:
    """The one block of code in a folded solution."""
    (code,) = _FENCED.findall(cell.source)
    return code

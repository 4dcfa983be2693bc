"""``python -m course.lab.case_sections``: write the sections of notebook 11 anew from the case files.

Then store it: ``python -m course.lab.store notebooks/11_case_files.ipynb``. What stands before and behind the sections
(cells tagged ``case``) is left as it is.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable

from course.cases import CASES, NOWHERE, CaseFile
from course.lab.batch import FOLDER
from tplab.files import write_file

NOTEBOOK = FOLDER / "11_case_files.ipynb"
_STUB = '''where, what, why = "", "", ""     # or in the form above; case.choices() prints what can be said


def mine(*args):
    return None


repair = {}                       # {"Class.method": mine}'''


def sections() -> list:
    """All cells of all cases."""
    from nbformat.v4 import new_code_cell, new_markdown_cell

    cells = []
    for file in CASES.values():
        first = (f"\n\nRead notebook [{file.after[:2]}]({file.after}.ipynb) first." if file.after else "")
        opened = f"case = lesson.open_case({file.number}, ckpt, prompt, tensor_parallel_size=tensor_parallel_size)"
        for kind, source, *tags in (
                (new_markdown_cell, f"## Case {file.number}: {file.title}{first}"),
                (new_code_cell, f"{opened}\nprint(case, end=\"\\n\\n\")\ncase.show()"),
                (new_code_cell, "case.form()"), (new_code_cell, _STUB, "stub"),
                (new_code_cell, "solved = case.close(where, what, why, repair)", "check"),
                (new_markdown_cell, _solution(file), "solution")):
            cells.append(kind(source, id=f"{file.name}-{len(cells)}", metadata={"tags": ["case", *tags]}))
    return cells


def _solution(file: CaseFile) -> str:
    """The folded solution: the code, how to find the bug, and where it happened."""
    wild = "\n".join(f"- {words} [{link.split('github.com/')[1]}]({link})" for words, link in file.sources)
    return (f"<details><summary>Solution, and where it happened</summary>\n\n```python\n{solution_code(file)}\n```\n\n"
            f"**How to find it.** {file.story}\n\n**In the wild**\n\n{wild}\n</details>")


def solution_code(file: CaseFile) -> str:
    """What a learner would write in the place of the stub."""
    repairs = {bug.place: bug.right for bug in file.bugs} or {NOWHERE: file.cure}
    imports: dict[str, None] = {}
    sources: dict[str, None] = {}
    for function in repairs.values():
        _collect(function, imports, sources)
    where = [bug.place for bug in file.bugs] or [NOWHERE]
    why = next(why for why, wrong in file.why.items() if not wrong)
    said = [f"where = {_one(where)}", f"what = {_one(list(file.kinds))}", f"why = {_one([why])}"]
    mended = ", ".join(f'"{place}": {function.__name__}' for place, function in repairs.items())
    head = "\n".join(sorted(imports)) + "\n\n\n" if imports else ""
    return head + "\n\n\n".join(sources) + "\n\n\n" + "\n".join([*said, f"repair = {{{mended}}}"])


def _one(values: list[str]) -> str:
    if len(values) > 1:
        return "[" + ",\n        ".join(f'"{value}"' for value in values) + "]"
    lines = textwrap.wrap(values[0], 80, drop_whitespace=False)
    return f'"{values[0]}"' if len(lines) == 1 else "(" + "\n       ".join(f'"{line}"' for line in lines) + ")"


def _collect(function: Callable, imports: dict, sources: dict) -> None:
    """The function's source, and before it that of what it calls in its own file; what it needs to import."""
    imported = _imported(inspect.getmodule(function))
    for name in _names(function.__code__):
        used = function.__globals__.get(name)
        if name in imported:
            imports[imported[name]] = None
        elif inspect.isfunction(used):
            _collect(used, imports, sources)
    sources[inspect.getsource(function).strip()] = None


def _imported(module) -> dict[str, str]:
    """``{name: the line that imports it}`` of what a case's file imports."""
    lines = {}
    for node in ast.parse(inspect.getsource(module)).body:
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            source = f"from {node.module} import" if isinstance(node, ast.ImportFrom) else "import"
            lines[alias.asname or alias.name] = f"{source} {alias.name}" + f" as {alias.asname}" * bool(alias.asname)
    return lines


def _names(code) -> list[str]:
    """What code looks up by name, that of its comprehensions included."""
    inner = [one for one in code.co_consts if inspect.iscode(one)]
    return [*code.co_names, *(name for one in inner for name in _names(one))]


def rewritten(notebook):
    """The notebook with all sections made anew, in the place of those that stand there; code that is the same keeps its
    outputs."""
    at = next(at for at, cell in enumerate(notebook.cells) if "case" in cell.metadata.get("tags", ()))
    others = [cell for cell in notebook.cells if "case" not in cell.metadata.get("tags", ())]
    known = {(cell.id, cell.source): cell for cell in notebook.cells if cell.cell_type == "code"}
    made = [known.get((cell.id, cell.source), cell) for cell in sections()]
    notebook.cells = others[:at] + made + others[at:]
    return notebook


def main() -> None:
    """Rewrite the notebook's file."""
    import nbformat

    done = rewritten(nbformat.read(NOTEBOOK, as_version=4))
    write_file(NOTEBOOK, lambda new: nbformat.write(done, new))
    print(f"{len(CASES)} cases; now: python -m course.lab.store {NOTEBOOK.name}")


if __name__ == "__main__":
    main()

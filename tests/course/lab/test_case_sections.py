"""Notebook 11 from the case files: what stands around its sections stays, and what a solution is made of."""

from dataclasses import replace

from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course.cases import CASES
from course.lab import case_sections
from course.lab.case_sections import _names, _one, rewritten, sections, solution_code
from tplab.faults import cases


def test_sections_are_made_anew_in_their_place_and_code_that_is_the_same_keeps_its_outputs():
    made = sections()
    kept, changed, gone = made[1], made[2], new_code_cell("case = 3", metadata={"tags": ["case"]})
    kept.outputs = changed.outputs = [new_output("stream", text="stored")]
    changed.source += "\n# an older one"
    before = [new_markdown_cell("# Before"), new_code_cell("1")]
    behind = [new_markdown_cell("# Behind")]
    book = rewritten(new_notebook(cells=[*before, made[0], gone, kept, changed, *behind]))
    assert book.cells[:2] == before and book.cells[-1:] == behind
    new = book.cells[2:-1]
    assert [(cell.id, cell.source) for cell in new] == [(cell.id, cell.source) for cell in sections()]
    assert [bool(cell.get("outputs")) for cell in new[:4]] == [False, True, False, False]
    assert rewritten(book).cells == book.cells


def test_each_case_has_its_cells_and_says_its_number():
    cells = sections()
    assert len(cells) == 6 * len(CASES) and len({cell.id for cell in cells}) == len(cells)
    assert [cell.metadata["tags"][1:] for cell in cells[6:12]] == [[], [], [], ["stub"], ["check"], ["solution"]]
    assert cells[6].source == f"## Case 2: {CASES['case_02'].title}" and cells[6].id == "case_02-6"
    assert cells[90].source.endswith("\n\nRead notebook [14](14_same_prompt_other_answer.ipynb) first.")
    assert cells[7].source.startswith("case = lesson.open_case(2, ckpt, prompt, tensor_parallel_size=")


def helper(x):
    return cases.places()[x:]


def right(x):
    return [helper(one) for one in x]


def test_a_solution_brings_along_what_its_functions_call():
    bug = replace(CASES["case_01"].bugs[0], place="A.f", right=right)
    file = replace(CASES["case_01"], bugs=(bug, replace(bug, place="B.g")), why={"wrong": "no", "right": ""})
    assert solution_code(file) == f'''from tplab.faults import cases


def helper(x):
    return cases.places()[x:]


def right(x):
    return [helper(one) for one in x]


where = ["A.f",
        "B.g"]
what = "{file.kinds[0]}"
why = "right"
repair = {{"A.f": right, "B.g": right}}'''
    innocent = solution_code(replace(file, bugs=(), what="none", cure=helper))
    assert 'where = "nowhere"\nwhat = "none"' in innocent and innocent.endswith('repair = {"nowhere": helper}')
    assert "helper" in _names(right.__code__)


def test_a_long_explanation_is_broken_between_words_and_says_the_same():
    long = "word " * 30 + "end"
    assert _one(["short"]) == '"short"' and _one([long]).count("\n") == 1
    assert eval(_one([long])) == long and eval(_one(["a", long])) == ["a", long]


def test_the_notebooks_file_is_rewritten(tmp_path, monkeypatch, capsys):
    import nbformat

    monkeypatch.setattr(case_sections, "NOTEBOOK", tmp_path / "11.ipynb")
    nbformat.write(new_notebook(cells=[sections()[0], new_markdown_cell("# Behind")]), tmp_path / "11.ipynb")
    case_sections.main()
    assert len(nbformat.read(tmp_path / "11.ipynb", as_version=4).cells) == 6 * len(CASES) + 1
    assert capsys.readouterr().out == f"{len(CASES)} cases; now: python -m course.lab.store 11.ipynb\n"

"""The notebooks' contract: what every file ``notebooks/NN_name.ipynb`` promises its reader.

How a notebook is written
-------------------------
First cell (markdown): ``# Title``; then a promise (a plain line of one to three sentences); a line with
*you will be able to*; a line with *Prerequisites*; a line with *Run time* and the measured seconds; links to the
previous and the next notebook of the series (``[← …](00_start_here.ipynb)``), whichever of the two exist.

Tags of cells (``metadata.tags``):

``parameters``
    Exactly one code cell, literals only: ``model`` (default ``"fable"``, in 12 ``"fable-moe"``),
    ``tensor_parallel_size``, ``prompt``, ``dtype``, ``seed``, and whatever else the notebook lets its user choose.
``stub``
    *Your turn*: a code cell that runs as it stands and is wrong.
``solution``
    A markdown cell with ``<details>`` and exactly one fenced ``python`` block, which replaces the whole source of its
    stub. It stands anywhere after its stub and before the next one.
``check``
    The code cell that judges the stub: it prints a line that starts with ``PASS`` when the work is right and with
    ``NOT YET`` when it is not. The stored notebook holds the stub, so its stored check says ``NOT YET``.

``cure``
    In notebook 09: a cell that mends a function of patient zero; tests take its definitions from here.

``measured``
    A code cell that takes long and that no exercise needs: it times this machine, or runs the real model. Only the run
    with the solutions leaves it out.

``stub``, ``solution`` and ``check`` come in threes, in this order of stubs; every notebook but ``00`` has at least one.

Every figure (PNG or SVG output) has a text alternative: a line that starts with ``Figure:``, printed by the same cell,
one line for each figure. The figures of ``tplab.show`` print theirs.

A heading says *In the wild*, another says *Takeaway*; at least one answer is folded in ``<details>`` besides the
solutions (the *Predict* question). Median length of code cells: under 10 lines. At most eight lines of imports.

Stored state: executed once from the top (counts 1, 2, 3, …), no error output, no widget state, no timing metadata, no
path of one machine, no memory address, kernelspec ``python3``. One command stores a notebook in this state::

    python -m course.lab.store notebooks/00_start_here.ipynb

``pytest --nbval notebooks`` compares the stored text with a fresh run; the run below pastes the solutions over the
stubs, on three ranks and in a foreign working folder, and wants every check to say ``PASS``.
"""

import ast
import asyncio
import itertools
import re
import statistics
import symtable
from pathlib import Path

import nbformat
import pytest
from helpers.notebooks import solution_code, tagged
from jupyter_client import AsyncKernelManager

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SERIES = sorted(FOLDER.glob("[0-9]*.ipynb"))
PARAMETERS = {"model", "tensor_parallel_size", "prompt", "dtype", "seed"}
FIGURES = {"image/png", "image/jpeg", "image/svg+xml"}
MACHINE = re.compile(r"(?:/(?:home|Users|root|tmp|work|opt|var)/[\w.]|[A-Z]:\\\\?Users|site-packages|0x[0-9a-f]{7,})")

each_notebook = pytest.mark.parametrize("path", SERIES, ids=lambda path: path.stem)


def load(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]


def prose(notebook):
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def printed(cell):
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def says(cell, word):
    return any(line.startswith(word) for line in printed(cell).splitlines())


def paste_solutions(notebook):
    """Put each solution's code in the place of its stub."""
    for stub, solution in zip(tagged(notebook, "stub"), tagged(notebook, "solution"), strict=True):
        stub.source = solution_code(solution)


def names(cell):
    """What a code cell's own level gives (a part of it, too), and what the cell takes from others."""
    code = re.sub(r"^( *)[%!].*", r"\1pass", cell.source, flags=re.MULTILINE)
    top = symtable.symtable(code, "cell", "exec")
    gives = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            gives |= {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
    takes, tables = set(), [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        takes |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global() and symbol.is_referenced()}
    return gives, takes


def is_run_again(cell):
    """Of the cases, which are all of one form, one is enough: tests/course_tests/judge/test_case_files.py solves each,
    and runs each solution's text."""
    tags = cell.metadata.get("tags", [])
    return cell.cell_type == "code" and "measured" not in tags and (
        "case" not in tags or cell.id.startswith("case_01"))


def solving(notebook):
    """The cells of the run with the solutions: up to the last check, what uses a learner's work, and what that needs.

    nbval runs the others, too."""
    last = max(at for at, cell in enumerate(notebook.cells) if "check" in cell.metadata.get("tags", []))
    cells = [(cell, *names(cell)) for cell in notebook.cells[: last + 1] if is_run_again(cell)]
    mine, needed, run = set(), {"model", "tensor_parallel_size"}, []
    for cell, gives, takes in cells:
        if {"stub", "check"} & set(cell.metadata.get("tags", [])) or mine & takes:
            mine |= gives
            run.append(cell.id)
    for cell, gives, takes in reversed(cells):
        if cell.id in run or needed & gives:
            needed |= takes
            run.append(cell.id)
    return [cell for cell, *_ in cells if cell.id in run]


def test_the_series_has_its_notebooks():
    names = [path.stem for path in SERIES]
    assert names[:4] == ["00_start_here", "01_mask_nan", "02_dim0_sharding", "03_rope_alignment"]


def test_the_map_in_notebook_00_has_every_notebook_with_its_title_and_the_readmes_words():
    bugs = re.findall(r"^\| \[\d\d_\w+\]\([^)]*\) \| ([^|]*) \|", (FOLDER.parent / "README.md").read_text("utf-8"),
                      re.MULTILINE)
    rows = []
    for path, bug in zip(SERIES, bugs, strict=True):
        title = load(path).cells[0].source.splitlines()[0].removeprefix("# ")
        rows.append(f"| [{path.name[:2]} {title}]({path.name}) | {bug} |")
    assert "\n".join(rows) in prose(load(FOLDER / "00_start_here.ipynb"))


@each_notebook
def test_file_is_a_valid_notebook_for_the_python3_kernel(path):
    notebook = load(path)
    nbformat.validate(notebook)
    assert notebook.nbformat == 4
    assert notebook.metadata.kernelspec.name == "python3"
    # papermill refuses a notebook that names no language.
    assert notebook.metadata.kernelspec.get("language") == "python"


@each_notebook
def test_header_says_what_for_whom_how_long_and_where_next(path):
    first = load(path).cells[0]
    assert first.cell_type == "markdown"
    lines = [line.strip() for line in first.source.splitlines() if line.strip()]
    assert lines[0].startswith("# "), "the first line is the title"
    promise = lines[1].lstrip("[")  # it may begin with a link
    assert promise[0].isalnum() and promise.endswith("."), f"no sentence of promise under the title: {lines[1]!r}"
    for words in ("you will be able to", "prerequisites", "run time"):
        assert words in first.source.lower(), f"the header lacks {words!r}"
    assert re.search(r"run time\W[^\n]*\d+\s*(s\b|seconds|min)", first.source,
                     re.IGNORECASE), "the run time has no number"

    here = SERIES.index(path)
    for neighbour in SERIES[max(here - 1, 0) : here] + SERIES[here + 1 : here + 2]:
        assert f"]({neighbour.name})" in first.source, f"the header does not link to {neighbour.name}"


@each_notebook
def test_relative_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#\s]+)", prose(load(path)))
    missing = [target for target in targets if "://" not in target and not (path.parent / target).exists()]
    assert not missing


@each_notebook
def test_one_parameters_cell_of_literals(path):
    (cell,) = tagged(load(path), "parameters")
    assert cell.cell_type == "code"
    defaults = {}
    for statement in ast.parse(cell.source).body:
        assert isinstance(statement, ast.Assign) and len(statement.targets) == 1, ast.unparse(statement)
        defaults[statement.targets[0].id] = ast.literal_eval(statement.value)
    assert PARAMETERS <= set(defaults)
    assert defaults["model"] == ("fable-moe" if path.stem == "12_experts" else "fable")


@each_notebook
def test_stored_as_executed_once_from_the_top(path):
    notebook = load(path)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    counts = [(cell.execution_count, output.execution_count)
              for cell in cells for output in cell.outputs if output.output_type == "execute_result"]
    assert all(of_cell == of_output for of_cell, of_output in counts)
    assert not {"widgets", "papermill"} & set(notebook.metadata), "widget state or a papermill run is stored"
    assert not [cell for cell in notebook.cells if "execution" in cell.metadata], "timings are stored"
    assert not [cell.id for cell in cells for pair in itertools.pairwise(cell.outputs) if all(
        output.get("name") == "stdout" for output in pair)], "what is printed is in pieces"


@each_notebook
def test_no_trace_of_the_machine_it_was_written_on(path):
    text = re.sub(r'"image/png": "[^"]*"|base64,[^"\\]*', "", path.read_text(encoding="utf-8"))  # letters by chance
    assert not {match.group() for match in MACHINE.finditer(text)}


@each_notebook
def test_cells_are_short(path):
    lengths = [len(cell.source.strip().splitlines()) for cell in code_cells(load(path))]
    assert statistics.median(lengths) < 10, lengths


@each_notebook
def test_imports_are_few(path):
    lines = [line for cell in code_cells(load(path)) for line in cell.source.splitlines()]
    imports = [line for line in lines if re.match(r"\s*(?:import \w|from \S+ import )", line)]
    assert len(imports) <= 8, imports


@each_notebook
def test_no_printed_line_is_wider_than_a_page(path):
    """JupyterLab breaks it inside a word; `show.say` prints what may be long."""
    wide = [line for cell in code_cells(load(path)) for line in printed(cell).splitlines() if len(line) > 110]
    assert not wide


@each_notebook
def test_prediction_sightings_and_takeaway_are_there(path):
    notebook = load(path)
    headings = re.findall(r"^#{2,} (.+)$", prose(notebook), re.MULTILINE)
    for words in ("In the wild", "Takeaway"):
        assert [heading for heading in headings if words in heading], f"no heading says {words!r}: {headings}"
    assert prose(notebook).count("<details>") > len(tagged(notebook, "solution")), "no folded answer to a prediction"
    assert prose(notebook).count("<details>") == prose(notebook).count("</details>")


@each_notebook
def test_numbers_in_prose_stand_in_the_outputs_too(path):
    """Numbers of three digits and more, and decimals: what a text says of its measurements is held against them.

    Not looked at: what is folded, what others measured (*In the wild*), and the case files' own texts.
    """
    cells = load(path).cells
    shown = "".join(cell.source + output.get("text", "") + "".join(
        text for kind, text in output.get("data", {}).items() if kind.startswith("text/"))
        for cell in cells if cell.cell_type == "code" for output in [{}, *cell.outputs])
    shown = re.sub(r'base64,[^"]*', "", shown)
    known = {number.replace(",", "") for number in re.findall(r"\d[\d,]*(?:\.\d+)?", shown)}
    said = "\n".join(cell.source.partition("## In the wild")[0] for cell in cells[1:]
                     if cell.cell_type == "markdown" and not {"case", "solution"} & set(cell.metadata.get("tags", [])))
    said = re.sub(r"<details>.*?</details>|```.*?```|`[^`]*`|\]\([^)]*\)|\$\$.*?\$\$", " ", said, flags=re.DOTALL)
    numbers = {number.replace(",", "") for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])", said)}
    assert not {number for number in numbers if len(number) > 2} - known


@each_notebook
def test_every_figure_has_a_text_alternative(path):
    blind = []
    for cell in code_cells(load(path)):
        pictures = sum(bool(FIGURES & set(output.get("data", {}))) for output in cell.outputs)
        words = sum(line.startswith("Figure:") for line in printed(cell).splitlines())
        if words < pictures:
            blind.append(cell.source)
    assert not blind


@each_notebook
def test_stubs_solutions_and_checks_come_in_threes(path):
    notebook = load(path)
    order = [tag for cell in notebook.cells for tag in ("stub", "solution", "check") if tag in cell.metadata.get("tags",
                                                                                                                 [])]
    threes = [order[at : at + 3] for at in range(0, len(order), 3)]
    assert all(three[0] == "stub" and sorted(three) == ["check", "solution", "stub"] for three in threes), order
    assert threes or path.stem.startswith("00"), "no work for the learner"
    for solution in tagged(notebook, "solution"):
        assert solution.cell_type == "markdown" and "<details>" in solution.source
        assert solution_code(solution)
    for check in tagged(notebook, "check"):
        assert says(check, "NOT YET") and not says(check, "PASS"), printed(check)


@pytest.fixture(scope="module")
def kernel():
    """One for all solved notebooks: to start it, its imports and its ranks takes longer than most of them. nbval gives
    each notebook its own."""
    kernel = AsyncKernelManager(kernel_name="python3")
    yield kernel  # papermill starts it
    asyncio.run(kernel.shutdown_kernel(now=True))


@each_notebook
def test_solutions_turn_every_check_green_on_three_ranks(path, tmp_path, kernel):
    import papermill

    notebook = load(path)
    if not tagged(notebook, "check"):
        pytest.skip("nothing to solve in this notebook")
    paste_solutions(notebook)
    begin = nbformat.v4.new_code_cell(f"%reset -f\n%cd -q {tmp_path}")
    notebook.cells = [begin, *solving(notebook)]
    solved = tmp_path / path.name
    nbformat.write(notebook, solved)
    done = papermill.execute_notebook(solved, solved, parameters={"tensor_parallel_size": 3}, km=kernel,
                                      execution_timeout=300, progress_bar=False)
    for check in tagged(done, "check"):
        assert says(check, "PASS") and not says(check, "NOT YET"), printed(check)


def test_notebook_00_is_stored_without_progress():
    (cell,) = [cell for cell in code_cells(load(SERIES[0])) if cell.source == "lesson.progress()"]
    (output,) = cell.outputs
    assert "mask_scores" in output.data["text/plain"] and not re.search(r"\d{4}-\d\d-\d\d", str(output.data))

"""The glossary: every term's first use in prose leads to it, and its command can be run again and again."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from course.lab import glossary

FOLDER = Path(__file__).resolve().parents[3] / "notebooks"
PAGE = nbformat.read(FOLDER / glossary.PAGE, as_version=4)
TERMS = glossary.read_terms(PAGE)
SERIES = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
HERE = [glossary.Term("block table", ("block table", "table of blocks")), glossary.Term("block", ("block",)),
        glossary.Term("KV cache", ("KV cache",))]


def links(notebook):
    return set(glossary._LINK.findall("\n".join(cell.source for cell in notebook.cells)))


@pytest.mark.parametrize("path", SERIES, ids=lambda path: path.stem)
def test_every_first_use_is_linked(path):
    notebook = nbformat.read(path, as_version=4)
    before = links(notebook)
    changed = glossary.link(notebook, TERMS)
    assert not changed, f"run python -m course.lab.glossary; not linked: {links(notebook) - before or 'a first use'}"


def test_the_glossary_says_where_each_term_comes_first_and_leads_to_its_own_entries():
    series = {path.name: nbformat.read(path, as_version=4) for path in SERIES}
    assert not glossary.say_where(PAGE, series), "run python -m course.lab.glossary"
    anchors = [term.anchor for term in TERMS]
    inner = glossary.re.findall(r"\]\(#([^)]*)\)", "\n".join(cell.source for cell in PAGE.cells))
    assert len(set(anchors)) == len(anchors) > 60 and set(inner) <= set(anchors)
    assert anchors == sorted(anchors, key=str.lower) == [cell.id for cell in PAGE.cells[1:]]
    forms = [form.lower() for term in TERMS for form in term.forms]
    assert len(set(forms)) == len(forms), "a form of two terms"


def linked(*cells):
    notebook = new_notebook(cells=[new_markdown_cell(one) if isinstance(one, str) else one for one in cells])
    glossary.link(notebook, HERE)
    once = [cell.source for cell in notebook.cells]
    assert not glossary.link(notebook, HERE), "a second time changes nothing"
    assert [cell.source for cell in notebook.cells] == once
    return "\n\n".join(once)


BLOCK, TABLE, CACHE = (
    f"(glossary.ipynb#cell-id={name})" for name in ("block", "block-table", "KV-cache"))


@pytest.mark.parametrize("text, becomes", [
    ("One block, two blocks.", f"One [block]{BLOCK}, two blocks."),
    ("Blocks and *block*.", f"[Blocks]{BLOCK} and *block*."),
    ("A block table has blocks.", f"A [block table]{TABLE} has [blocks]{BLOCK}."),
    ("tables of blocks, a block-table", f"tables of [blocks]{BLOCK}, a [block-table]{TABLE}"),
    ("The KV cache, a kv cache", f"The [KV cache]{CACHE}, a kv cache"),
    ("# A block\n\n`block` ```\nblock\n``` [a block](x.md) <b title='block'>block</b> http://block.x",
     f"# A block\n\n`block` ```\nblock\n``` [a block](x.md) <b title='block'>[block]{BLOCK}</b> http://block.x"),
    ("my_block unblock block-wise", "my_block unblock block-wise"),
    ("```python\n# a block\n```\n\n<details><summary>The block</summary>\n\nA block.\n\n</details>\n\nOpen blocks.",
     "```python\n# a block\n```\n\n<details><summary>The block</summary>\n\nA block.\n\n</details>\n\n"
     f"Open [blocks]{BLOCK}."),
    ("<details>\n\nA block.\n\n</details>", f"<details>\n\nA [block]{BLOCK}.\n\n</details>"),
    (f"Later moved up: block. The [block]{BLOCK}", f"Later moved up: [block]{BLOCK}. The block"),
])
def test_what_is_linked(text, becomes):
    assert linked(text) == becomes


def test_a_term_is_linked_once_in_a_notebook_and_never_in_code():
    assert linked(new_code_cell("# a block"), "No term.", "A block.", "Blocks.") == (
        f"# a block\n\nNo term.\n\nA [block]{BLOCK}.\n\nBlocks.")


def test_the_command_mends_a_folder_once(tmp_path, capsys):
    entry = new_markdown_cell("### block\n\nMemory.\n\n*Also: page.*")
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Glossary"), entry]), tmp_path / glossary.PAGE)
    nbformat.write(new_notebook(cells=[new_markdown_cell("Pages of memory.")]), tmp_path / "05_x.ipynb")
    glossary.main(tmp_path)
    assert capsys.readouterr().out == "changed 05_x.ipynb\nchanged glossary.ipynb\n"
    written = nbformat.read(tmp_path / glossary.PAGE, as_version=4).cells[1].source
    assert nbformat.read(tmp_path / glossary.PAGE, as_version=4).cells[1].id == "block"
    assert written == "### block\n\nMemory.\n\n*Also: page. First in [05](05_x.ipynb).*"
    glossary.main(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_term_is_a_heading_of_the_third_order_with_its_other_forms():
    cells = ["# Glossary", "## A part", "### one\n\nWords.",
             "### two\n\nWords.\n\n*Also: 2, a pair. First in [00](x).*"]
    found = glossary.read_terms(new_notebook(cells=[new_markdown_cell(cell) for cell in cells]))
    assert found == [glossary.Term("one", ("one",)), glossary.Term("two", ("two", "2", "a pair"))]

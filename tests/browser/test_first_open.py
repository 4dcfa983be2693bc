"""A fresh clone, opened: JupyterLab does not trust its notebooks, and nothing has run yet."""

import json
from pathlib import Path

import pytest
from helpers import turns
from helpers.lab_window import Window, wait_for

# Every third one; with ``--all-cases`` all of them.
NOTEBOOKS = sorted(path.name for path in (Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))[
    ::1 if turns.ALL else 3]
SEEN = """cell => {
    const area = cell.querySelector('.jp-Cell-outputArea');
    return {words: area ? area.textContent : '',
            pictures: area ? [...area.querySelectorAll('img')].map(one => ({
                wide: one.naturalWidth, alt: one.alt, png: one.src.startsWith('data:image/png')})) : []};
}"""


def pictures_of(output):
    """How many pictures an output holds: as such, or in its page."""
    data = output.get("data", {})
    return "".join(data.get("text/html", "")).count("<img ") or int("image/png" in data or "image/svg+xml" in data)


@pytest.fixture(scope="module")
def opened(chromium, server):
    """One window for all of them."""
    window = Window(chromium, server)
    yield window
    window.close()


@pytest.fixture
def alone(opened):
    """That window, and nothing in it."""
    opened.errors.clear()
    yield opened
    opened.close_all()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_everything_stored_is_there_before_a_cell_runs(name, alone):
    alone.open(f"notebooks/{name}", kernel=False)
    cells = json.loads((alone.folder / "notebooks" / name).read_text(encoding="utf-8"))["cells"]
    seen = alone.page.locator(".jp-Notebook .jp-Cell").evaluate_all(f"cells => cells.map({SEEN})")
    wrong = []
    for at, (cell, shown) in enumerate(zip(cells, seen, strict=True)):
        stored = sum(map(pictures_of, cell.get("outputs", ())))
        if len(shown["pictures"]) != stored or not all(one["wide"] for one in shown["pictures"]):
            wrong.append(f"cell {at}: {stored} pictures are stored, shown {shown['pictures']}")
        # JupyterLab gives a PNG output no alternative, trusted or not: its words are the line below it.
        if not all(one["alt"] or one["png"] and "Figure: " in shown["words"] for one in shown["pictures"]):
            wrong.append(f"cell {at}: a picture without words")
        for word in ("<Drawing>", "<Picture>", "model not found", "untrusted"):
            if word in shown["words"]:
                wrong.append(f"cell {at}: {word}")
    assert not wrong
    assert not alone.errors


def test_a_word_leads_to_its_entry_in_the_glossary(alone):
    alone.open("notebooks/00_start_here.ipynb", kernel=False)
    alone.page.locator(".jp-Notebook a", has_text="staircase").first.click()
    entry = alone.page.locator(".jp-Notebook h3", has_text="staircase")
    wait_for(lambda: entry.count() and entry.evaluate("""one => {
        const {top, bottom} = one.getBoundingClientRect();
        return top > 0 && bottom < window.innerHeight;
    }"""))
    assert not alone.errors

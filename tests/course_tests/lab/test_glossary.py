"""The glossary: every word that is linked has an entry, and entries stand in the alphabet's order."""

import re
from pathlib import Path

from helpers.notebooks import read

FOLDER = Path(__file__).resolve().parents[3] / "notebooks"
ENTRIES = [cell for cell in read(FOLDER / "glossary.ipynb").cells if cell.source.startswith("### ")]
ANCHORS = [cell.source.splitlines()[0].removeprefix("### ").replace(" ", "-") for cell in ENTRIES]


def linked(pattern, text):
    return set(re.findall(pattern, text))


def test_every_linked_word_has_an_entry():
    texts = {path.name: "\n".join(cell.source for cell in read(path).cells)
             for path in sorted(FOLDER.glob("[0-9]*.ipynb"))}
    used = {name: linked(r"\]\(glossary\.ipynb#cell-id=([^)]*)\)", text) for name, text in texts.items()}
    inner = linked(r"\]\(#([^)]*)\)", "\n".join(cell.source for cell in ENTRIES))
    assert {name: missing for name, words in used.items() if (missing := words - set(ANCHORS))} == {}
    assert inner <= set(ANCHORS) and all(len(words) > 2 for words in used.values())


def test_entries_stand_in_the_alphabets_order_and_no_form_belongs_to_two():
    assert ANCHORS == sorted(set(ANCHORS), key=str.lower)
    forms = [form.lower() for cell, anchor in zip(ENTRIES, ANCHORS)
             for form in [anchor.replace("-", " "), *re.findall(r"Also: ([^.]*)", cell.source)[:1]]]
    assert len(set(forms)) == len(forms)

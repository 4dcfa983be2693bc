"""Stored text is the same on every processor: no notebook stores the size of a difference that can be rounding.

``nbval`` shows it only on the processor where it runs. What rounding makes is said as "inside the floor", or as less
than a power of ten (:func:`tplab.show.magnitude`).
"""

import json
import re
from pathlib import Path

import pytest

from tplab.align import floors

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))
ROUNDING = 1e-4  # up to here a difference in float32, the dtype of nearly all of them, can be rounding
A_LIMIT = re.compile(r"(less than|within|floor|\+) $")  # before a number: a limit or an exact step, not a measurement
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)")
FLOORS = {f"{floor:.0e}" for floor in floors.RELATIVE.values()}


def sizes_of_rounding(text: str) -> list[str]:
    """Numbers that no text may store: below the floor and not a limit, or a 0 that is called exact."""
    text = re.sub(r"\s+", " ", text)
    found = [number for number in NUMBER.finditer(text) if 0 < float(number[0]) < ROUNDING]
    return [number[0] for number in found if number[0] not in FLOORS and not A_LIMIT.search(text[:number.start()])
            ] + re.findall("exactly 0", text)


def stored_texts(path: Path):
    """Of each code cell: its id, its source, and the text of all its outputs, also what stands for a picture."""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        outputs = [[output.get("text", "")] + [
            text for kind, text in output.get("data", {}).items() if kind.startswith("text/")] + [
            kind.get("alt", "") for kind in output.get("metadata", {}).values() if isinstance(kind, dict)]
            for output in cell.get("outputs", ())]
        text = "\n".join("".join(part) for parts in outputs for part in parts)
        text = re.sub(r'base64,[^"]*|<[^>]*>', " ", text)  # letters by chance, and how a table looks
        yield cell["id"], "".join(cell["source"]), text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_stored_number_is_below_the_floor(path):
    """``floor=0`` in a cell says that its number is no rounding: what all ranks hold is the same on each."""
    cells = list(stored_texts(path))
    assert any(text for *_, text in cells) or path.stem == "glossary"
    bad = {cell: found for cell, source, text in cells
           if "floor=0" not in source and (found := sizes_of_rounding(text))}
    assert not bad


def test_what_counts_as_the_size_of_rounding():
    assert sizes_of_rounding("logits off by 1e-6, float64: 7.1e-16; mean 0.00002") == ["1e-6", "7.1e-16", "0.00002"]
    assert sizes_of_rounding("differs by exactly 0") == ["exactly 0"]
    assert not sizes_of_rounding("off by less than\n  1e-4, (float32: floor 2e-5), within 1e-7, 20 + 1.91e-06, at 0.01")
    assert not sizes_of_rounding("0 tensors differ, 1e-3 of 40, floors 2e-05 and 2e-07, 0 of 0.0")

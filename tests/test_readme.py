"""The README in two languages, and its picture; the drawing of the rooms in CONTRIBUTING.md.

Run as a script, it makes both anew: the staircase from the stored notebook 03, the rooms from what they import.
"""

import base64
import json
import re
from pathlib import Path

import pytest
from test_house import ROOMS, imported, python_files
from test_house import room as room_of

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "notebooks/images"
LANGUAGES = ("README.md", "README.zh-CN.md")
CONTRIBUTING = ".github/CONTRIBUTING.md"
LONGEST = 7168  # bytes of README: a door, not a manual
UTILITIES = {"errors", "checks", "files", "patch"}  # which many rooms need


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def cells(name):
    return json.loads(read(f"notebooks/{name}.ipynb"))["cells"]


def stored_staircase():
    """The PNG of the last staircase in the stored notebook 03."""
    outputs = [output for cell in cells("03_rope_alignment") if "show.staircase(" in "".join(cell["source"])
               for output in cell["outputs"]]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return base64.b64decode("".join(pictures[-1]))


def rooms():
    """The rooms of ``tplab/`` as a drawing: an arrow from each to those that it needs, not by way of another one."""
    needs = {room: set() for room in ROOMS if room not in UTILITIES}
    for path in python_files("tplab"):
        here = room_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if here in needs:
            needs[here] |= {there for module in imported(path) if (there := room_of(module)) in needs} - {here}

    def below(room):
        return needs[room].union(*map(below, needs[room]))

    arrows = [f"    {room} --> {other}" for room in reversed(ROOMS) if room in needs for other in sorted(needs[room])
              if not any(other in below(between) for between in needs[room] - {other})]
    return "\n".join(["```mermaid", "graph TD", *arrows, "```"])


def test_the_drawing_of_the_rooms_is_what_their_imports_say():
    assert rooms() in read(CONTRIBUTING), "other imports? python tests/test_readme.py"


def test_the_staircase_is_the_one_that_notebook_03_stores():
    assert (IMAGES / "staircase.png").read_bytes() == stored_staircase(), "stored anew? python tests/test_readme.py"


@pytest.mark.parametrize("name", LANGUAGES)
def test_links_lead_somewhere(name):
    targets = re.findall(r"\]\(([^)#\s]+)\)", read(name))
    assert targets and not [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    anchors = {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
               for heading in re.findall(r"^#+ (.+)$", read(name), re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", read(name))) <= anchors


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_notebook_is_listed_with_its_run_time_and_exercises(name):
    listed = re.findall(r"\]\(notebooks/(\d\w+)\.ipynb\).*\| ?(\d*) \| (\d+) s \|", read(name))
    expected = []
    for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb")):
        header = "".join(cells(path.stem)[0]["source"])
        stubs = sum("stub" in cell["metadata"].get("tags", ()) for cell in cells(path.stem))
        expected.append((path.stem, str(stubs or ""), re.search(r"Run time\D*(\d+)", header)[1]))
    assert listed == expected


def test_the_readme_is_a_door():
    assert len((ROOT / "README.md").read_bytes()) <= LONGEST


def outline(text):
    """What both languages share: levels of headings, blocks of code, rows of tables, folds, targets of links."""
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {"headings": [len(level) for level in re.findall(r"^(#+) ", prose, re.MULTILINE)],
            "commands": [[line.partition("#")[0].rstrip() for line in block.splitlines()] for block in blocks],
            "rows": [line.count("|") for line in prose.splitlines() if line.startswith("|")],
            "folds": prose.count("<details>"),
            "links": sorted(target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if "README" not in target
                            and not target.startswith("#"))}


def test_the_languages_have_the_same_structure_and_the_same_commands():
    one, other = map(outline, map(read, LANGUAGES))
    assert {what: (one[what], other[what]) for what in one if one[what] != other[what]} == {}
    inline = [sorted(set(re.findall(r"`((?:\./launch|python -m|conda|apt|pytest)[^`]*)`", read(name))))
              for name in LANGUAGES]
    assert inline[0] == inline[1]


if __name__ == "__main__":
    (IMAGES / "staircase.png").write_bytes(stored_staircase())
    drawn_anew = re.sub(r"(?ms)^```mermaid$.*?^```$", rooms(), read(CONTRIBUTING))
    (ROOT / CONTRIBUTING).write_text(drawn_anew, encoding="utf-8")

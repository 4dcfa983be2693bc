"""The README in two languages, and its pictures.

Run as a script, it makes the pictures anew: the staircase from the stored notebook 03, the verdict from a run of
patient zero, the rooms from what they import. The still of the panel is taken in a browser:
``TPLAB_STILLS=$PWD/notebooks/images`` before ``./launch test --browser``.
"""

import base64
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape, unescape

import pytest
from test_house import ROOMS, imported, python_files
from test_house import room as room_of

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "notebooks/images"
LANGUAGES = ("README.md", "README.zh-CN.md")
COMMAND = "python -m tplab check run/ --model fable"
UTILITIES = {"errors", "checks", "files", "patch"}  # which many rooms need
NBSP = "\u00a0"  # browsers make one space of several
INK = {"guilty": "#b3261e", "inherits": "#7a5a00", "not clean": "#b3261e", "python": "#0b57a4"}


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


def make_verdict():
    """What the command says of patient zero with a right mask and the right rows, recorded on two ranks."""
    from helpers.patient_zero import CURES, record_run

    from tplab.checkpoint import open_checkpoint
    from tplab.checkpoint.prompts import default_prompt
    from tplab.pool import shared_pool

    ckpt = open_checkpoint("fable")
    cures = {name: CURES[name] for name in ("attention.apply_causal_mask", "linear.shard_weight")}
    with tempfile.TemporaryDirectory() as folder:
        ids = ckpt.tokenizer()(default_prompt("fable")).input_ids
        shared_pool(2).run(record_run, ckpt.folder, ids, cures, f"{folder}/run")
        said = subprocess.run([sys.executable, *COMMAND.split()[1:]], cwd=folder, capture_output=True, text=True)
    assert said.returncode == 1, said.stderr
    # What it could not place is no part of the verdict.
    shown = re.sub(r"(?m)^note: .*\n(?:^(?:note: |   ).*\n)*", "…\n", said.stdout)
    return drawn([f"$ {COMMAND}", *shown.splitlines()])


def drawn(lines):
    """A terminal with these lines as an SVG page."""
    wide, high = 8.45 * max(map(len, lines)) + 32, 18 * len(lines) + 24
    texts = []
    for at, line in enumerate(lines):
        ink = next((ink for word, ink in INK.items() if word in line), "#222")
        weight = "bold" if line.startswith(("$", "not clean")) or re.match(r"\d\. ", line) else "normal"
        texts.append(f'<text x="16" y="{26 + 18 * at}" fill="{ink}" font-weight="{weight}">'
                     f'{escape(line).replace(" ", NBSP)}</text>')
    size = f'width="{wide:.0f}" height="{high}" viewBox="0 0 {wide:.0f} {high}"'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14">'
            f'<rect width="100%" height="100%" rx="6" fill="#fff" stroke="#b8b8b8"/>{"".join(texts)}</svg>\n')


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


@pytest.mark.parametrize("name", LANGUAGES)
def test_the_drawing_of_the_rooms_is_what_their_imports_say(name):
    assert rooms() in read(name), "other imports? python tests/test_readme.py"


def test_the_staircase_is_the_one_that_notebook_03_stores():
    assert (IMAGES / "staircase.png").read_bytes() == stored_staircase(), "stored anew? python tests/test_readme.py"


def test_the_verdict_says_what_notebook_09_stores():
    lines = list(map(unescape, re.findall(r"<text[^>]*>([^<]*)<", read("notebooks/images/verdict.svg"))))
    stored = next("".join(output["text"]) for cell in cells("09_your_own_engine") for output in cell.get("outputs", ())
                  if "verdict(half := examine())" in "".join(cell["source"]) and "text" in output)
    assert " ".join(stored.split()) in " ".join(" ".join(lines).split()), "changed? python tests/test_readme.py"
    assert lines[0].replace(NBSP, " ") == f"$ {COMMAND}"


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
    (IMAGES / "verdict.svg").write_text(make_verdict(), encoding="utf-8")
    for page in LANGUAGES:
        drawn_anew = re.sub(r"(?ms)^```mermaid$.*?^```$", rooms(), read(page))
        (ROOT / page).write_text(drawn_anew, encoding="utf-8")

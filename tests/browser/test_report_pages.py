"""The report of a batch, opened as a file: narrow and wide, light and dark, without a network."""

from pathlib import Path

import pytest
from helpers.lab_window import grave
from helpers.turns import by_turns

from course.lab.batch import Outcome
from course.lab.report import write_report

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CHOSEN = ("00_start_here", "05_paged_kv")
WIDTHS = (400, 900, 1400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report over notebooks as they are stored, and one that failed."""
    out = tmp_path_factory.mktemp("report")
    for name in CHOSEN:
        (out / f"{name}.ipynb").write_bytes((NOTEBOOKS / f"{name}.ipynb").read_bytes())
    done = [Outcome(NOTEBOOKS / f"{name}.ipynb", out / f"{name}.ipynb", 12.3, None) for name in CHOSEN]
    lost = Outcome(NOTEBOOKS / "01_mask_nan.ipynb", out / "01_mask_nan.ipynb", 0.1, "cell [3]: RankError: rank 1 died")
    write_report([*done, lost], {"model": "fable"}, out)
    return out


@pytest.mark.parametrize(("page", "scheme"), by_turns(["index", *CHOSEN], ["light", "dark"], least=3))
def test_a_page_of_the_report(page, scheme, folder, chromium):
    context = chromium.new_context(color_scheme=scheme, offline=True)
    shown, said = context.new_page(), []
    shown.on("console", lambda one: one.type == "error" and said.append(one.text))
    shown.on("requestfailed", lambda one: said.append(one.url))
    shown.goto((folder / f"{page}.html").as_uri())
    cut = {}
    for wide in WIDTHS:
        shown.set_viewport_size({"width": wide, "height": 900})
        cut[wide] = shown.evaluate("""() => [...document.images].filter(one => {
            const {left, right, width} = one.getBoundingClientRect();
            return !one.naturalWidth || !width || left < 0 || right > document.documentElement.clientWidth + 1;
        }).map(one => one.alt.slice(0, 60))""")
    assert not any(cut.values()), cut
    assert not said
    assert not grave(shown)
    context.close()

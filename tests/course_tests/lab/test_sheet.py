"""The cheat sheet: what it says is what the plan holds and what the museum has."""

import pytest
from helpers.launching import ROOT

from course import lab
from course.lab.sheet import NUMBERS, STREET
from tplab.checkpoint import open_checkpoint
from tplab.faults import MUSEUM
from tplab.model.loader import load_model
from tplab.ranks import logical_ranks

FULL = {"embed": "embed_tokens", "o_proj": "layers.0.self_attn.o_proj", "down_proj": "layers.0.mlp.down_proj"}


@pytest.mark.parametrize("size", [1, 3])
def test_the_shapes_are_those_that_the_engine_loads(size):
    sheet, ckpt = lab.cheat_sheet("fable", size), open_checkpoint("fable")
    held = {name: cells for names, *cells in sheet.held() for name in names.split(", ")}

    def shapes():
        model = load_model(ckpt, sheet.plan)
        return [list(weight.shape) for weight in (model.embed_tokens.weight, model.layers[0].self_attn.o_proj.weight,
                                                  model.layers[0].mlp.down_proj.weight)]

    ranks = logical_ranks(size, shapes)
    for at, name in enumerate(FULL):
        assert held[name][2] == " | ".join(str(rank[at]) for rank in ranks)
        assert held[name][0] == str(list(ckpt.tensors[f"model.{FULL[name]}.weight"].shape))


def test_experts_have_their_own_rows():
    held = {name: cells for name, *cells in lab.cheat_sheet("fable-moe", 3).held()}
    assert held["experts: gate_proj, up_proj"][1] == "rows of each" and "down_proj" not in held
    assert held["experts: down_proj"][2].startswith("8 × [128, ")


def test_it_names_every_fault_once_and_shows_the_same_as_a_page():
    sheet = lab.cheat_sheet()
    assert all(str(sheet).count(one.title) == 1 for one in MUSEUM.values())
    html = sheet.html()
    assert html.count("ALL-REDUCE") == sum(one.startswith("ALL") for one in STREET) == 2
    assert all(number in html for number, _ in NUMBERS) and "<style" not in html, "an untrusted notebook drops it"


def test_the_notebook_shows_it():
    import nbformat

    notebook = nbformat.read(ROOT / "notebooks/cheat_sheet.ipynb", as_version=4)
    (output,) = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert output.data["text/plain"] == str(lab.cheat_sheet()) and output.data["text/html"] == lab.cheat_sheet().html()

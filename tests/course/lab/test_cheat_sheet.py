"""The cheat sheet: what it says is what the plan holds and what the museum has."""

from pathlib import Path

import nbformat
import pytest

from course import lab
from course.lab.sheet import NUMBERS, STREET, CheatSheet
from tplab.checkpoint import open_checkpoint
from tplab.faults import MUSEUM
from tplab.model.loader import load_model
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan

NOTEBOOK = Path(__file__).resolve().parents[3] / "notebooks" / "cheat_sheet.ipynb"
FULL = {"embed": "embed_tokens", "o_proj": "layers.0.self_attn.o_proj", "down_proj": "layers.0.mlp.down_proj"}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_shapes_are_those_that_the_engine_loads(size):
    sheet, ckpt = lab.cheat_sheet("fable", size), open_checkpoint("fable")
    held = {name: cells for names, *cells in sheet.held() for name in names.split(", ")}

    def shapes():
        model = load_model(ckpt, sheet.plan)
        layer = model.layers[0]
        return [list(weight.shape) for weight in (model.embed_tokens.weight, layer.self_attn.o_proj.weight,
                                                  layer.mlp.down_proj.weight)]

    ranks = logical_ranks(size, shapes)
    for at, name in enumerate(FULL):
        assert held[name][2] == " | ".join(str(rank[at]) for rank in ranks)
        assert held[name][0] == str(list(ckpt.tensors[f"model.{FULL[name]}.weight"].shape))


@pytest.mark.parametrize("whole, cut", [(True, "whole experts"), (False, "rows of each")])
def test_experts_are_those_that_the_engine_loads(whole, cut):
    ckpt = open_checkpoint("fable-moe")
    plan = ShardPlan.from_config(ckpt.config, 3, enable_expert_parallel=whole)
    held = {name: cells for name, *cells in CheatSheet(plan, ckpt.config.head_dim).held()}

    def experts():
        mlp = load_model(ckpt, plan).layers[0].mlp
        down = {str(list(one.down_proj.weight.shape)) for one in mlp.experts.values()}
        gate = {str([one.gate_up_proj.weight.shape[0] // 2, 128]) for one in mlp.experts.values()}
        return list(mlp.gate.weight.shape), *(f"{len(mlp.experts)} × {' '.join(shapes)}" for shapes in (gate, down))

    routers, gates, downs = zip(*logical_ranks(3, experts))
    assert held["router"] == [str(routers[0]), "whole", "every rank"]
    assert held["experts: gate_proj, up_proj"] == ["8 × [80, 128]", cut, " | ".join(gates)]
    assert held["experts: down_proj"][2] == " | ".join(downs)
    assert "down_proj" not in held, "there is no dense layer"


def test_every_fault_of_the_museum_is_a_suspect_once():
    text = str(lab.cheat_sheet())
    assert all(text.count(one.title) == 1 for one in MUSEUM.values())
    assert sum(text.count(f"({number:02})") for number in range(15)) == len(MUSEUM)


def test_the_page_loads_nothing_and_says_all_that_the_text_says():
    sheet = lab.cheat_sheet("fable", 2)
    page = sheet.page()
    assert "http" not in page and page.count("ALL-REDUCE") == sum(one.startswith("ALL") for one in STREET) == 2
    assert all(number in page for number, _ in NUMBERS) and "a fused [q|k|v] matrix" in page
    assert "<style" not in sheet.html(), "an untrusted notebook drops it"


def test_the_notebook_shows_it():
    (output,) = nbformat.read(NOTEBOOK, as_version=4).cells[-1].outputs
    assert output.data["text/plain"] == str(lab.cheat_sheet()) and output.data["text/html"] == lab.cheat_sheet().html()

"""The cheat sheet: what it says is what the plan holds and what the museum has."""

import pytest

from course import lab
from tplab.checkpoint import open_checkpoint
from tplab.faults import MUSEUM
from tplab.model.loader import load_model
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan

FULL = {"embed": "embed_tokens", "o_proj": "layers.0.self_attn.o_proj", "down_proj": "layers.0.mlp.down_proj"}


def held(plan):
    """{weight: (its whole shape, how it is cut, what each rank holds)}."""
    return {name: tuple(row.values())[1:] for row in lab.held_by_ranks(plan) for name in row["weight"].split(", ")}


@pytest.mark.parametrize("size", [1, 3])
def test_the_shapes_are_those_that_the_engine_loads(size):
    ckpt = open_checkpoint("fable")
    plan = ShardPlan.from_config(ckpt.config, size)
    sheet = held(plan)

    def shapes():
        model = load_model(ckpt, plan)
        return [list(weight.shape) for weight in (model.embed_tokens.weight, model.layers[0].self_attn.o_proj.weight,
                                                  model.layers[0].mlp.down_proj.weight)]

    ranks = logical_ranks(size, shapes)
    for at, name in enumerate(FULL):
        assert sheet[name][2] == " | ".join(str(rank[at]) for rank in ranks)
        assert sheet[name][0] == str(list(ckpt.tensors[f"model.{FULL[name]}.weight"].shape))


def test_experts_have_their_own_rows():
    rows = lab.held_by_ranks(ShardPlan.from_config(open_checkpoint("fable-moe").config, 3))
    sheet = {row["weight"]: list(row.values()) for row in rows}
    assert sheet["experts: gate_proj, up_proj"][2] == "rows of each" and "down_proj" not in sheet
    assert sheet["experts: down_proj"][3].startswith("8 × [128, ")


def test_it_names_every_fault_once():
    text = str(lab.suspects())
    assert all(text.count(f"{fault.title} (") == 1 for fault in MUSEUM.values())

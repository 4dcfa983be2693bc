"""The museum itself: names, sources to be shown, sightings, refusals; and the sizing that held by luck."""

from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch
from helpers.faults import nothing_is_patched
from helpers.trait_models import TRAITS, make_model

import tplab
from tplab import faults
from tplab.align import align
from tplab.checkpoint import open_checkpoint
from tplab.errors import TplabError
from tplab.faults import MUSEUM, SEED, STEPS, fault, rope, sizing, sizing_table
from tplab.faults import heads as ends
from tplab.model import attention
from tplab.patch import original
from tplab.ranks import logical_ranks, rank
from tplab.shard import ShardPlan
from tplab.shard.linear import QKVParallelLinear


@pytest.mark.parametrize("one", MUSEUM.values(), ids=str)
def test_a_fault_can_be_read(one):
    assert 2 <= len(one.broken.splitlines()) <= 20 and one.broken.startswith("def ")
    assert all(f"def {patch.replacement.__name__}(" in one.broken for patch in one.patches)
    assert all(f"def {patch.target.rpartition('.')[2]}(" in one.right for patch in one.patches)
    assert one.right.splitlines()[0].lstrip("@").split()[0] in ("def", "torch.inference_mode()", "property")
    assert one.title and one.symptom.endswith(".") and one.first_point
    assert (Path(tplab.__file__).parents[1] / "notebooks" / f"{one.notebook}.ipynb").is_file()
    for text, link in one.sightings:
        assert text.endswith((".", "…\".")) and link.startswith("https://github.com/")


@pytest.mark.parametrize("one", MUSEUM.values(), ids=str)
def test_a_fault_travels_to_ranks_as_a_name(one):
    assert len(cloudpickle.dumps(one.patches)) < 2000
    for patch in one.patches:
        assert original(patch.target) is not patch.replacement


def test_an_unknown_name_is_told_those_like_it_else_all():
    with pytest.raises(TplabError, match="no fault 'nan_masc'; did you mean 'nan_mask' or 'no_mask'\\?$"):
        fault("nan_masc")
    with pytest.raises(TplabError, match="no fault 'x'; the museum has nan_mask, no_mask, "):
        fault("x")
    with pytest.raises(TplabError, match=r"no fault \['nan_mask'\]"):
        fault(["nan_mask"])


def test_a_function_that_replaces_several_is_shown_once():
    shown = fault("full_copy_on_every_rank")
    assert len(shown.patches) == 3 and shown.broken.count("def ") == 2 and shown.right.count("def ") == 2


def test_what_a_fault_of_the_head_leaves_in_the_weight():
    layer = SimpleNamespace(weight=torch.nn.Parameter(torch.ones(40, 30)))
    assert ends.tie_ignored(layer, None) is layer and not layer.weight.any()
    weights = []
    for _ in logical_ranks(2, lambda: (ends.head_random_untied(mine := SimpleNamespace(
            weight=torch.nn.Parameter(torch.ones(40, 30))), None), weights.append((rank(), mine.weight.detach())))):
        pass
    (_, first), (_, second) = sorted(weights, key=lambda pair: pair[0])
    assert first.std() == pytest.approx(0.02, rel=0.1) and not torch.equal(first, second), "each its own"


def test_neighbours_are_turned_by_the_angles_of_the_halves():
    """Right for a checkpoint whose rows are in pairs: put into halves, its numbers are turned as the engine does it."""
    q = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(3))
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.5, 0.25, 0.125])).repeat(1, 2)[None]
    turned, _ = rope.rope_pairs(None, q, q, angles.cos(), angles.sin())
    halves, into = q.unflatten(-1, (4, 2)).transpose(-1, -2).flatten(-2), turned.unflatten(-1, (4, 2))
    a, b = halves.chunk(2, -1)
    right = halves * angles[0, :, None].cos() + torch.cat([-b, a], -1) * angles[0, :, None].sin()
    torch.testing.assert_close(into.transpose(-1, -2).flatten(-2), right)


def test_the_rotation_that_fails_is_called():
    """With another library's order of arguments, so that it raises; the error is swallowed."""
    asked = []

    def rotate(q, k, cos, sin):
        asked.append("turned")

    engine = SimpleNamespace(rotate=rotate)
    assert rope.rope_swallowed(engine, "q", "k", "cos", "sin") == ("q", "k") and not asked
    engine.rotate = lambda *given: asked.append(given) or ("turned q", "turned k")
    assert rope.rope_swallowed(engine, "q", "k", "cos", "sin") == ("turned q", "turned k")
    assert asked == [(("cos", "sin"), "q", "k")]


def test_the_seed_is_in_the_museum_and_begins_as_the_notebooks_do():
    assert [fault(name).notebook[:2] for name in STEPS] == [f"0{number}" for number in range(1, 7)], "one for each"
    assert set(SEED) <= set(MUSEUM) and SEED[:3] == ("nan_mask", "shard_dim1", "rope_missing")
    assert [fault(name).notebook for name in SEED] == sorted(fault(name).notebook for name in SEED)


def test_applied_in_this_process():
    right = attention.mask_scores
    with faults.applied("nan_mask", "shard_dim1"):
        assert attention.mask_scores is MUSEUM["nan_mask"].patches[0].replacement
        assert "masked_fill" in fault("nan_mask").right, "the right source is shown while the fault is on"
    assert attention.mask_scores is right and nothing_is_patched()


def test_a_fault_says_why_it_cannot_show():
    config = open_checkpoint("fable").config
    assert fault("rope_scaling_ignored").why_not(config) == "the model's RoPE is not scaled"
    seven = SimpleNamespace(num_heads=8, num_kv_heads=2, head_dim=2, hidden_size=2, intermediate_size=8, vocab_size=8,
                            tie_word_embeddings=False, experts=None)
    assert fault("kv_replica_modulo").why_not(seven, 2) == "no KV head is on two ranks here"
    assert not fault("kv_replica_modulo").why_not(seven, 4)
    assert "either rule gives the same head" in fault("kv_replica_modulo").why_not(SimpleNamespace(
        **{**vars(seven), "num_kv_heads": 1}), 4)
    assert fault("tie_ignored").why_not(seven) == "this model's head is not tied to its embedding"
    assert fault("row_bias_everywhere").why_not(config) == "o_proj has no bias in this model"
    assert "one rank" in fault("fused_one_block").why_not(config, 1)
    assert fault("fused_one_block").applies_to(config, 2) and not fault("fused_one_block").applies_to(config, 1)


@pytest.mark.parametrize("heads, kv_heads, tp", [(14, 2, 1), (14, 2, 2), (8, 2, 2), (32, 8, 4), (9, 3, 3)])
def test_the_old_sizing_held_where_everything_divides(heads, kv_heads, tp):
    found = sizing(heads, kv_heads, tp)
    assert found.verdict.startswith("right, because")
    assert set(found.needed_rows) == {found.rows_per_rank} and found.claimed_rows == found.true_rows


@pytest.mark.parametrize("heads, kv_heads, tp, says", [
    (9, 3, 2, "wrong: 1 query head and 1 KV head on no rank"),
    (14, 2, 3, "wrong: 2 query heads on no rank"),
    (8, 2, 4, "right per rank, but a fused checkpoint has 768 rows, not 1024"),
    (12, 2, 3, "wrong: rank 1 needs 512 rows, not 384: 2 KV heads are read there"),
    (12, 3, 4, "wrong: ranks 1, 2 need 448 rows, not 320: 2 KV heads are read there"),
])
def test_the_old_sizing_is_wrong_where_it_does_not(heads, kv_heads, tp, says):
    found = sizing(heads, kv_heads, tp)
    assert found.verdict == says
    table = sizing_table([(heads, kv_heads)], [tp])
    several = sizing_table([(heads, kv_heads), (6, 3)], [1, tp])
    assert list(zip(several["query heads"], several["KV heads"], several["tp"])) == [
        (heads, kv_heads, 1), (heads, kv_heads, tp), (6, 3, 1), (6, 3, tp)]
    assert list(several["rows in the checkpoint"]) == [64 * (heads + 2 * kv_heads)] * 2 + [64 * 12] * 2
    assert list(sizing_table([(14, 2), (8, 2)], [4])["rows needed"]) == ["384/512/320/320", "256"]  # a number a rank
    assert table.loc[0, "verdict"] == says and table.loc[0, "rows claimed"] == found.claimed_rows


def test_the_verdict_on_every_layout_is_the_plans():
    """Right per rank only where every rank of the plan holds the heads that the old sizing has room for."""
    wrong = []
    for heads, kv_heads, tp in ((q, kv, tp) for q in range(1, 41) for kv in range(1, q + 1) if q % kv == 0
                                for tp in range(1, min(q, 16) + 1)):
        plan = ShardPlan.make(tensor_parallel_size=tp, num_heads=heads, num_kv_heads=kv_heads, head_dim=2,
                              hidden_size=2,
                              intermediate_size=tp, vocab_size=tp)
        room = heads // tp, max(1, kv_heads // tp)
        fits = all((len(shard.q_heads), len(shard.kv_heads)) == room for shard in plan.ranks)
        whole = (heads, kv_heads) == (room[0] * tp, room[1] * tp)
        begins = "wrong: " if not fits else "right, because" if whole else "right per rank, but"
        found = sizing(heads, kv_heads, tp, head_dim=2)
        if not found.verdict.startswith(begins):
            wrong.append((heads, kv_heads, tp, found.verdict))
    assert not wrong


def test_the_rows_that_sizing_calls_needed_are_those_of_the_layer():
    plan = ShardPlan.make(tensor_parallel_size=1, num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=8,
                          intermediate_size=8, vocab_size=8)
    layer = QKVParallelLinear(8, 64, 9, 3, shards=plan.ranks)
    assert layer.weight.shape[0] == sizing(9, 3, 1).needed_rows[0]


def test_a_seed_decides_the_prompts_of_a_scenario():
    first, again, other = (faults.scenario("block_leaked", 67, seed)["prompts"] for seed in (1, 1, 2))
    assert first == again != other and faults.scenario("block_leaked", 67)["prompts"] not in (first, other)


def test_angles_of_the_heads_are_found_where_there_are_fewer_tokens_than_heads():
    q, k, tables = torch.ones(3, 8, 4), torch.ones(3, 2, 4), torch.arange(12.0).view(1, 3, 4)
    turned = rope.rope_over_heads(SimpleNamespace(rotate=lambda q, k, cos, sin: (q * cos, k)), q, k, tables, tables)
    assert turned[0][0, :, 0].tolist() == [0, 4, 8, 0, 4, 8, 0, 4] and turned[1][2, :, 0].tolist() == [0, 4]


@pytest.mark.parametrize("model", ["Gemma-3", "OLMo-3"])
@pytest.mark.parametrize("name", ["rope_default_theta", "rope_scaling_ignored"])
def test_a_fault_of_the_rotation_knows_models_with_one_for_each_type_of_layer(name, model, tmp_path):
    ckpt = open_checkpoint(make_model(tmp_path / "model", **TRAITS[model]))
    report = align(ckpt, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], patches=[fault(name)], logical=True)
    assert report.ok == bool(fault(name).why_not(ckpt.config, 2))

"""Notebook 12's instruments: experts beside Hugging Face, what routers choose, what ranks read for it."""

import pytest
import torch

from tplab import ShardPlan
from tplab.align.reference import hf_model
from tplab.lesson import experts
from tplab.lesson.experts_toys import toy_experts, toy_full_width

pytestmark = pytest.mark.pool
IDS = [3, 1, 4, 15, 9, 26, 5]


def begins(ckpt=None, **options):
    """The first point outside the floor, or None; and the report."""
    report = experts.beside_hugging_face(ckpt or toy_experts(), IDS, **options)
    return report.first_divergence and report.first_divergence.name, report


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_a_right_engine_is_inside_the_floor_at_every_point(ranks, whole):
    name, report = begins(tensor_parallel_size=ranks, enable_expert_parallel=whole)
    layers = [f"layers.{layer}.{point}" for layer in (0, 1) for point in experts.AROUND]
    assert name is None and [point.name for point in report.points] == ["embed", *layers, "norm", "logits"]
    assert report.plan.enable_expert_parallel is whole and report.tp_logits.shape == (len(IDS), 43)


@pytest.mark.parametrize("engine, alone", [("A", "layers.0.mlp"), ("B", None), ("C", None)])
def test_each_engine_is_wrong_at_the_experts_and_one_rank_can_show_only_the_weights(engine, alone):
    patches = [experts.MISTAKES[engine]]
    for ranks, name in ((1, alone), (2, "layers.0.mlp")):
        assert begins(tensor_parallel_size=ranks, enable_expert_parallel=True, patches=patches)[0] == name


def test_a_norm_over_a_ranks_own_heads_is_wrong_on_two_ranks():
    for ranks, name in ((1, None), (2, "layers.0.o_proj")):
        assert begins(toy_full_width(), tensor_parallel_size=ranks, patches=[experts.OWN_HEADS])[0] == name


def test_the_choice_is_hugging_faces_for_one_prompt_and_for_two():
    ckpt, prompts = toy_experts(), [IDS, IDS[::-1] + [8]]
    with torch.inference_mode():
        said = [hf_model(ckpt, torch.float32)(torch.tensor([ids]), output_router_logits=True).router_logits
                for ids in prompts]
    for given, logits in ((IDS, [said[0]]), (prompts, said)):
        weights, ids = experts.chosen(ckpt, given)
        right = torch.stack([torch.cat(layer) for layer in zip(*logits)]).softmax(-1).topk(2)
        assert ids.equal(right.indices) and weights.sum(-1).allclose(torch.ones(1))
        assert weights.allclose(right.values / right.values.sum(-1, keepdim=True), atol=1e-5)


def test_favourites_are_whole_words_of_which_most_places_go_to_an_expert():
    words = [" fox", " fox", " fox", "ox", "ox", "ox", " sat", " sat", " sat", " by", " by", ".", ".", "."]
    ids = torch.tensor([[0], [0], [1], [0], [0], [0], [0], [1], [1], [0], [0], [2], [2], [2]])
    assert experts.favourites(words, ids, 4) == ["fox", "sat", ".", ""]
    assert experts.favourites(words, ids.expand(-1, 2), 4, most=1)[2] == "."


def test_an_expert_is_read_once_a_step_and_the_busiest_rank_is_waited_for():
    config = toy_experts().config
    matrix = 3 * config.hidden_size * 13 * 4
    chosen = torch.tensor([[[0, 1], [1, 2], [6, 0]], [[4, 5], [4, 5], [5, 6]]])  # layers, tokens, top_k
    whole, cut = (ShardPlan.from_config(config, 2, enable_expert_parallel=which) for which in (True, False))
    assert [len(shard.experts) for shard in whole.ranks] == [4, 3]
    # Layer 0: {0, 1, 2} and then {0, 6}; layer 1: {4, 5}, {5, 6}: of rank 0's experts 3 and 1, then none.
    mean, busiest = experts.read_in_steps(config, whole, chosen, 2, 4)
    assert mean == (3 + 2) / 2 / 2 * matrix + 2 / 2 * matrix and busiest == (3 + 1) / 2 * matrix + 2 * matrix
    mean, busiest = experts.read_in_steps(config, cut, chosen, 2, 4)
    assert mean == (3 + 2) / 2 / 2 * matrix + 2 / 2 * matrix
    assert busiest == mean * 7 / 6.5, "of 13 columns rank 0 has 7"
    rows = experts.rows_of_ranks(whole, chosen)
    assert rows["layer 0"] == pytest.approx({"rank 0": 500 / 6, "rank 1": 100 / 6}) and rows["layer 1"]["rank 0"] == 0

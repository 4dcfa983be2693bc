"""Notebook 12's instruments: what routers choose, what ranks read for it."""

import pytest
import torch

from course.judge import experts
from course.judge.toy_checkpoint import toy_experts
from tplab import ShardPlan
from tplab.align.reference import hf_model

pytestmark = pytest.mark.pool
IDS = [3, 1, 4, 15, 9, 26, 5]


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

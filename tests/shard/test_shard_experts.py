"""Who owns which experts: cut over all ranks, or whole ones dealt out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tplab import show
from tplab.ranks import logical_ranks, rank
from tplab.shard import ReplicatedLinear, RowParallelLinear, ShardPlan, ShardPlanError


def plan(tp, experts, columns=13, shared=0, **options):
    return ShardPlan.make(tensor_parallel_size=tp, num_heads=12, num_kv_heads=4, head_dim=8, hidden_size=64,
                          intermediate_size=127, vocab_size=503, num_experts=experts, expert_intermediate_size=columns,
                          shared_intermediate_size=shared, **options)


@given(st.integers(1, 12), st.integers(1, 40), st.integers(1, 40))
def test_every_column_of_every_expert_has_one_owner(tp, experts, columns):
    for dealt_out in (False, True):
        if tp > (experts if dealt_out else columns):
            with pytest.raises(ShardPlanError, match=f"cannot share {experts} experts" if dealt_out else
                               f"cannot share {columns} columns of each expert"):
                plan(tp, experts, columns, enable_expert_parallel=dealt_out)
            continue
        ranks = plan(tp, experts, columns, enable_expert_parallel=dealt_out).ranks
        held = sorted((expert, column) for s in ranks for expert in s.experts for column in s.expert_mlp)
        assert held == [(expert, column) for expert in range(experts) for column in range(columns)]
        sizes = [len(s.experts) for s in ranks] if dealt_out else [len(s.expert_mlp) for s in ranks]
        assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_eight_experts_on_three_ranks():
    assert plan(3, 8, enable_expert_parallel=True).sizes("experts") == [3, 3, 2]
    assert plan(3, 8).sizes("experts") == [8, 8, 8] and plan(3, 8).sizes("expert_mlp") == [5, 4, 4]


def test_what_cannot_be_dealt_out_is_refused():
    with pytest.raises(ShardPlanError, match="enable_expert_parallel deals experts out, but this model has none"):
        plan(2, 0, 0, enable_expert_parallel=True)
    with pytest.raises(ShardPlanError, match="4 ranks cannot share 3 columns of the shared expert.*1 to 3"):
        plan(4, 8, shared=3)


def test_a_plan_says_which_rank_holds_which_experts_and_draws_itself():
    cut, dealt_out = plan(2, 5, shared=7), plan(2, 5, shared=7, enable_expert_parallel=True)
    assert "MLP columns 64–126, columns 7–12 of each of 5 experts, columns 4–6 of the shared one, voc" in str(cut)
    assert "MLP columns 64–126, 2 experts (3–4), columns 4–6 of the shared one, vocabulary" in str(dealt_out)
    assert cut.rows()[1]["expert_mlp"] == [7, 13] and dealt_out.rows()[1]["experts"] == [3, 5]
    for made, held in ((cut, "0–4 columns of each 0–6"), (dealt_out, "0–2 columns of each 0–12")):
        drawn = show.plan_figure(made).svg
        assert all(word in drawn for word in ("experts", "columns of each", "of the shared one", *held.split()[:1]))
    assert "experts" not in show.plan_figure(plan(2, 0, 0)).svg


def test_the_bias_of_a_layer_that_one_rank_has_alone_is_that_ranks_to_add():
    w, b, x = torch.randn(4, 6), torch.randn(4), torch.randn(3, 6)

    def on_rank():
        parts = [range(0), range(6), range(0)]
        if not parts[rank()]:
            return None
        layer = RowParallelLinear(6, 4, bias=True, parts=parts)
        layer.load("weight", w), layer.load("bias", b)
        return layer.partial(x)

    torch.testing.assert_close(logical_ranks(3, on_rank)[1], x @ w.T + b)


def test_a_replicated_layer_is_the_same_on_every_rank():
    w, b, x = torch.randn(4, 6), torch.randn(4), torch.randn(3, 6)

    def on_rank():
        layer = ReplicatedLinear(6, 4, bias=True)
        layer.weight.weight_loader(w), layer.bias.weight_loader(b)
        return layer(x)

    for found in logical_ranks(2, on_rank):
        torch.testing.assert_close(found, x @ w.T + b)

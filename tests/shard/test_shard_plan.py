"""The plan: what each rank holds. Pure arithmetic, so swept widely."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplab.shard import ShardPlan, ShardPlanError, split_evenly


def plan(q, kv, tp, inter=127, vocab=503):
    return ShardPlan.make(tensor_parallel_size=tp, num_heads=q, num_kv_heads=kv, head_dim=8, hidden_size=64,
                          intermediate_size=inter, vocab_size=vocab)


@pytest.mark.parametrize("q, kv, tp, kind, q_sizes, kv_sizes", [
    (9, 3, 2, "uneven", [6, 3], [2, 1]),          # SmolLM2 on two ranks
    (14, 2, 2, "partition", [7, 7], [1, 1]),      # Qwen2.5-0.5B
    (14, 2, 3, "uneven", [5, 5, 4], [1, 2, 1]),   # a rank reads across the edge of a group
    (12, 3, 4, "uneven", [3, 3, 3, 3], [1, 2, 2, 1]),  # as many query heads each, but not of the same groups
    (8, 2, 4, "replication", [2, 2, 2, 2], [1, 1, 1, 1]),
    (8, 2, 3, "uneven", [3, 3, 2], [1, 2, 1]),
    (28, 4, 8, "uneven", [4, 4, 4, 4, 3, 3, 3, 3], [1, 2, 1, 2, 1, 2, 1, 1]),
    (32, 8, 8, "partition", [4] * 8, [1] * 8),
    (4, 4, 1, "partition", [4], [4]),
])
def test_known_layouts(q, kv, tp, kind, q_sizes, kv_sizes):
    p = plan(q, kv, tp)
    assert (p.kind, p.sizes("q_heads"), p.sizes("kv_heads")) == (kind, q_sizes, kv_sizes)


def test_replicas_of_a_kv_head_stand_next_to_each_other():
    """The right replica index is ``rank // replicas``; ``rank % kv_heads`` would give 0, 1, 0, 1."""
    assert [list(s.kv_heads) for s in plan(8, 2, 4).ranks] == [[0], [0], [1], [1]]


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 12), st.integers(12, 300), st.integers(12, 300))
def test_every_head_column_and_row_has_its_owner(kv, group, tp, inter, vocab):
    q = kv * group
    if tp > q:
        with pytest.raises(ShardPlanError, match=f"1 to {min(q, inter, vocab)}"):
            plan(q, kv, tp, inter, vocab)
        return
    p = plan(q, kv, tp, inter, vocab)
    for dimension, total in (("q_heads", q), ("mlp", inter), ("vocab", vocab)):
        assert [i for s in p.ranks for i in getattr(s, dimension)] == list(range(total))
    assert max(p.sizes("mlp")) - min(p.sizes("mlp")) <= 1
    for s in p.ranks:
        assert [s.kv_heads[local] for local in s.kv_for_q] == [head // group for head in s.q_heads]
        assert sorted({s.kv_heads[local] for local in s.kv_for_q}) == list(s.kv_heads), "a KV head is not read"
        # The runs that attention computes with say the same as the head-by-head map.
        from_runs = {qh: kvs[(qh - qs.start) * len(kvs) // len(qs)] for qs, kvs in s.kv_groups for qh in qs}
        assert [from_runs[i] for i in range(len(s.q_heads))] == list(s.kv_for_q)
        if p.kind != "uneven":
            assert len(s.kv_groups) == 1


@pytest.mark.parametrize("tp", [0, -1, 2.0, "2", True, None])
def test_a_size_that_is_no_count_is_refused(tp):
    with pytest.raises(ShardPlanError, match="whole number from 1 to 8"):
        plan(8, 2, tp)


@pytest.mark.parametrize("num_heads, num_kv_heads", [(10, 4), (4, 0), (4, -2)])
def test_heads_that_form_no_groups_are_refused(num_heads, num_kv_heads):
    with pytest.raises(ShardPlanError, match=f"{num_heads} query heads .* {num_kv_heads} KV heads"):
        plan(num_heads, num_kv_heads, 2)


def test_the_scarcest_thing_is_named():
    with pytest.raises(ShardPlanError, match="5 ranks cannot share 3 MLP columns.*1 to 3"):
        plan(8, 2, 5, inter=3)


def test_longer_parts_come_first():
    assert split_evenly(7, 3) == (range(0, 3), range(3, 5), range(5, 7))


def test_the_text_names_every_rank():
    text = str(plan(9, 3, 2))
    assert "uneven: 9 query heads and 3 KV heads over 2 ranks" in text
    assert "rank 1: 3 query heads (6–8), 1 KV head (2)" in text
    assert str(plan(2, 2, 1, inter=1, vocab=2)) == (
        "partition: 2 query heads and 2 KV heads over 1 rank\n"
        "  rank 0: 2 query heads (0–1), 2 KV heads (0–1), MLP columns 0, vocabulary rows 0–1")


def test_the_rows_of_a_plan_say_what_each_rank_holds():
    assert plan(9, 3, 2, inter=7, vocab=10).rows() == [
        {"rank": 0, "q_heads": [0, 1, 2, 3, 4, 5], "kv_heads": [0, 1], "mlp": [0, 4], "vocab": [0, 5]},
        {"rank": 1, "q_heads": [6, 7, 8], "kv_heads": [2], "mlp": [4, 7], "vocab": [5, 10]}]

"""A head's rows in other places, a weight read off input and output, orders of a fused tensor; errors in a circle."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.hand_cases import At, HandCase, noise

from tplab.align.diagnose import ends, errors, sums, weights, weights_of_others
from tplab.align.diagnose.diagnose import _error_chain
from tplab.errors import TplabError
from tplab.ranks import RankError
from tplab.ranks.errors import Cause

# The head's rows.


def head(order, rows=5, near=0.0, size=6):
    """Two ranks, each with half of the vocabulary; column i holds token ``order[i]``'s logits."""
    right = noise(rows, size, seed=3)
    held = right[:, order] + near * right.abs().max() * noise(rows, size, seed=4).sign()
    half = size // 2
    case = HandCase("logits", [held[:, :half], held[:, half:]], [{}, {}], [right[:, :half], right[:, half:]], layer="")
    case.config.vocab_size = size
    case.plan = Some(ranks=[Some(rank=rank, vocab=range(half * rank, half * (rank + 1))) for rank in range(2)])
    return case


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    monkeypatch.setattr(ends, "right", At)
    monkeypatch.setattr(weights_of_others, "right", At)


@pytest.mark.parametrize("order, wanted, row, says", [
    ([0, 2, 1, 3, 4, 5], 1, 2, "The head's rows are right, but stand in another order: rank 0 has token 2's logit"),
    ([0, 1, 2, 5, 3, 4], 3, 5, "The head's rows are right, but stand in another order: rank 1 has token 5's logit"),
    ([1, 2, 3, 4, 5, 0], 0, 1, "Every logit is right, but for another token: rank 0 has token 1's where token 0's"),
    ([0, 1, 2, 0, 1, 2], 3, 0, "Every logit is right, but for another token: rank 1 has token 0's where token 3's"),
    ([3, 4, 5, 3, 4, 5], 0, 3, "Every logit is right, but for another token: rank 0 has token 3's where token 0's")])
def test_rows_of_the_head_in_other_places(order, wanted, row, says):
    found = ends.head_rows_elsewhere(head(order))
    assert found.fault == "head_rows" and found.numbers == {"wanted": wanted, "row": row}
    assert found.sentence.startswith(says)


@pytest.mark.parametrize("case", [
    head(range(6)), head([3, 4, 5, 0, 1, 2]),  # as they should be; whole shards exchanged, which has a name of its own
    head([0, 2, 1, 3, 4, 5], rows=1),  # of one row, any number stands somewhere
    head([0, 2, 1, 3, 4, 5], near=3e-4)])
def test_what_is_no_row_of_the_head_elsewhere(case):
    assert ends.head_rows_elsewhere(case) is None


def test_two_rows_of_logits_are_enough():
    assert ends.head_rows_elsewhere(head([0, 2, 1, 3, 4, 5], rows=2)).fault == "head_rows"


# A weight read off input and output.

RIGHT = noise(6, 4, seed=1)  # [out, in]


def product(rows, weight, curve=0.0, wrong_ranks=(0,), bias=0.7):
    x = noise(rows, 4, seed=2)
    case = HandCase("gate", [x @ weight.T + bias + curve * x[:, :1] ** 2], [{"post_norm": x}])
    case.wrong_ranks = wrong_ranks
    return case


@pytest.fixture
def unrelated(monkeypatch):
    monkeypatch.setattr(weights_of_others, "matrix", lambda case, op: RIGHT)
    monkeypatch.setattr(At, "features", lambda at, op: torch.arange(6), raising=False)
    return weights_of_others._unrelated


def likeness_of(weight):
    return (weight.flatten() @ RIGHT.flatten() / weight.norm() / RIGHT.norm()).item()


def alike(share):
    """A matrix of this correlation with the right one."""
    other = noise(6, 4, seed=5)
    other -= (other * RIGHT).sum() * RIGHT / RIGHT.norm() ** 2
    return share * RIGHT / RIGHT.norm() + (1 - share ** 2) ** 0.5 * other / other.norm()


@pytest.mark.parametrize("share", [0.0, 0.29, -0.29])
def test_a_matrix_that_has_nothing_to_do_with_the_right_one(unrelated, share):
    assert unrelated(product(9, alike(share))) == pytest.approx(share, abs=1e-9)


@pytest.mark.parametrize("case", [
    product(9, alike(0.31)), product(9, alike(-0.31)), product(9, alike(0.0), curve=0.1),
    product(9, RIGHT.flatten()[torch.randperm(24, generator=torch.Generator().manual_seed(2))].view(6, 4)),
    product(9, alike(0.0) * float("nan"))])
def test_a_matrix_of_which_that_cannot_be_said(unrelated, case):
    assert unrelated(case) is None


@pytest.mark.parametrize("rows, enough", [(5, False), (6, False), (7, True)])
def test_as_many_rows_as_unknowns_prove_nothing(unrelated, rows, enough):
    """Four inputs and a bias: through five rows there is always a matrix, and one row more is hardly a proof."""
    assert (unrelated(product(rows, alike(0.0))) is not None) is enough


# The orders of a fused tensor.

def orders(heads, kv_heads, dim):
    of = {"q": range(heads), "k": range(kv_heads)}
    at = Some(case=Some(config=Some(head_dim=dim)), indices=lambda part: of[part])
    return [(name, says, features.tolist()) for name, says, features in weights._orders(at)]


def test_every_order_holds_every_feature_once():
    for heads, kv_heads, dim in ((4, 2, 4), (3, 1, 2), (3, 2, 2), (2, 2, 6)):
        found = orders(heads, kv_heads, dim)
        assert all(sorted(features) == list(range((heads + 2 * kv_heads) * dim)) for *_, features in found)
        assert len(found) == 10 + 2 * (heads % kv_heads == 0) + 2 and len({says for _, says, _ in found}) == len(found)


def test_the_orders_by_hand():
    """Two query heads and one KV head of four numbers each: q 0–7, k 8–11, v 12–15."""
    found = {says.partition(" (")[0] + says.partition("(")[2][:11]: features for _, says, features in orders(2, 1, 4)}
    q, k, v = list(range(8)), list(range(8, 12)), list(range(12, 16))
    assert found["it is filled as [v|q|k]"] == v + q + k
    assert found["it was read as [v|q|k]"] == [*range(4, 12), *range(12, 16), *range(4)]
    assert found["it was read as [k|q|v]"] == [*range(4, 12), *range(4), *v]
    turned = "the rows of each head of q and k stand in another order"
    assert found[turned + "neighbours "] == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, *v]
    assert found[turned + "halves lie "] == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, *v]


def test_groups_of_a_fused_tensor_by_hand():
    """Four query heads, two KV heads of two numbers: q 0–7, k 8–11, v 12–15."""
    found = {says.partition(" group")[0]: features for name, says, features in orders(4, 2, 2)
             if name == "qkv_interleaved"}
    read = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]  # [q q k v] of each KV head
    assert found["it was read"] == read and [read[i] for i in found["it is filled"]] == list(range(16))


# Errors in a circle.

class Counted(TplabError):
    asked = 0

    @property
    def first(self):
        Counted.asked += 1
        assert Counted.asked < 9, "it goes round and round"


def test_errors_that_lead_to_each_other_are_each_looked_at_once():
    first, second = Counted("first"), Counted("second")
    first.__cause__, second.__cause__ = second, first
    assert _error_chain(first) == [first, second]
    second.__cause__ = ValueError("of somebody else")
    assert _error_chain(first) == [first, second]


# What a sentence counts.

@pytest.mark.parametrize("lost, first", [([4], 4), ([1, 5], 1)])
def test_tokens_of_which_no_rank_has_the_row(lost, first):
    case = head(range(6))
    for token in lost:
        case.held[token // 3][:, token % 3] = 0.0
    found = ends.rows_that_nobody_has(case)
    assert found.fault == "vocab_rows_missing" and found.numbers == {"tokens": len(lost)}
    assert f"{len(lost)} of" in found.sentence and f"of which {first} is the first" in found.sentence


@pytest.mark.parametrize("tp, times", [(1, None), (2, 1), (4, 3)])
def test_a_bias_on_every_rank_is_too_much_by_all_but_one(monkeypatch, tp, times):
    monkeypatch.setattr(sums, "has_bias", lambda *_: True)
    monkeypatch.setattr(sums, "explains", lambda *_: True)
    case = HandCase("o_partial", [torch.ones(1, 1)] * tp, [{}])
    found = sums.bias_on_every_rank(case)
    assert (found and found.numbers["times"]) == times
    assert times is None or f"{times:.2f} times the bias of self_attn.o_proj" in found.sentence


def test_who_waits_for_a_rank_at_work():
    causes = [Cause(0, "waiting", "waits in line 3"), Cause(1, "running", "computes"), Cause(2, "returned", "returned")]
    found = errors.still_running(RankError("timeout", causes, [[], [], []]))
    assert found.sentence.startswith("Rank 1 computes, while rank 0 waits in line 3. It takes") and found.numbers == {
        "rank": 1}

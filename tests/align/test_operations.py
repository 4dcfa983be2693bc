"""The operations of the local frame by hand: whose keys, whose summands, whose bias, which rows."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.real_cases import noise
from helpers.reports import config_with

from tplab.align import local
from tplab.align.local import LocalFrame
from tplab.align.points import as_index, columns_of
from tplab.align.recording import Shard
from tplab.checkpoint.layout import EMBEDDING, HEAD

F64 = torch.float64
BIAS = "model.layers.0.self_attn.o_proj.bias"


class Held(dict):
    """Weights by name."""

    def raw(self, name):
        return self[name]


def frame(points=None, tp=2, weights=None, heads=4, kv_heads=2, dim=2, **recording):
    found = object.__new__(LocalFrame)
    given = {"ids": [[1, 2, 3]], "places": [(0, 0), (0, 1), (0, 2)], "num_keys": [3, 3, 3]} | recording
    given.setdefault("logit_places", given["places"])
    share, kv = heads // tp, max(1, kv_heads // tp)
    plan = [Some(rank=rank, q_heads=range(rank * share, (rank + 1) * share), vocab=range(rank * 2, rank * 2 + 2),
                 kv_heads=range(min(rank * kv, kv_heads - kv), min(rank * kv, kv_heads - kv) + kv),
                 mlp=range(3 * rank, 3 * rank + 3)) for rank in range(tp)]
    vars(found).update(
        recording=Some(points=points or {}, holders={}, **given),
        config=config_with(head_dim=dim, num_heads=heads, num_kv_heads=kv_heads, num_layers=2, rms_norm_eps=1e-6,
                           scaling=dim ** -0.5),
        plan=Some(ranks=plan), dtype=F64, ranks=range(tp), weights=Held(weights or {}), _values={}, _once={}, _hf={},
        _fixed={}, _tables={}, _made_of={}, _asked=set(),
        positions=torch.tensor([position for _, position in given["places"]], dtype=torch.long), ckpt=None)
    return found


# Keys.

@pytest.mark.parametrize("ids, places, rows", [
    ([[5, 6, 7]], [(0, 0), (0, 1), (0, 2)], [[0, 1, 2]]),
    ([[5, 6, 7], [5, 6, 8]], [(0, 0), (0, 1), (0, 2), (1, 2)], [[0, 1, 2], [0, 1, 3]]),  # found in a prefix cache
    ([[5, 6, 7], [4, 6, 8]], [(0, 0), (0, 1), (0, 2), (1, 2)], [[0, 1, 2], [-1, -1, 3]]),  # begins otherwise
    ([[5, 6, 7], [5, 9, 8]], [(0, 0), (0, 1), (0, 2), (1, 2)], [[0, 1, 2], [0, -1, 3]]),
    ([[5, 6], [5, 6, 7], [5, 6, 7, 8]], [(0, 0), (0, 1), (1, 2), (2, 3)], [[0, 1], [0, 1, 2], [0, 1, 2, 3]]),
    ([[5, 6, 7], [5, 6]], [(0, 0), (0, 1), (1, 0), (1, 1)], [[0, 1], [2, 3]]),  # its own come first, and no further
    ([[5], [6, 7]], [(1, 0), (1, 1)], [[], [0, 1]])])
def test_in_which_row_each_key_was_computed(ids, places, rows):
    found = frame(ids=ids, places=places, num_keys=[1] * len(places))
    assert [row.tolist() for row in found.key_rows] == rows
    for number in range(len(ids)):
        mine = [row for row, (s, _) in enumerate(places) if s == number]
        assert found.rows_of[number] == (slice(mine[0], mine[-1] + 1) if mine else slice(0, 0))


def test_keys_that_no_call_computed_are_hugging_faces():
    k = noise(2, 2, 2, seed=1)
    theirs = noise(4, 2, 2, seed=2)
    found = frame({"layers.0.k_rope": [Shard(k, "kv_heads", (0, 1))]}, tp=1, ids=[[5, 6, 7, 8]],
                  places=[(0, 1), (0, 2)], num_keys=[3, 3])
    found._hf_points = lambda number: {"layers.0.k_rope": theirs}
    keys = found.keys(0, "layers.0.k_rope", 0, [1, 0])
    assert torch.equal(keys[1:], k[:, [1, 0]]) and torch.equal(keys[:1], theirs[:1, [1, 0]]) and len(keys) == 3


@pytest.mark.parametrize("name, rows, heads", [("q", (4, 8), 2), ("k", (2, 4), 1), ("gate", (3, 6), 0)])
def test_columns_are_made_of_the_ranks_own_input(name, rows, heads):
    before, module = ("post_norm", "mlp") if name == "gate" else ("input_norm", "self_attn")
    x, weight, bias = [noise(3, 5, seed=8), noise(3, 5, seed=9)], noise(8, 5, seed=10), noise(8, seed=11)
    found = frame({f"layers.1.{before}": [Shard(one, "replicated") for one in x]}, weights={
        f"model.layers.1.{module}.{name}_proj.weight": weight, f"model.layers.1.{module}.{name}_proj.bias": bias})
    right = x[1] @ weight[slice(*rows)].T + bias[slice(*rows)]
    assert torch.allclose(found.expected(f"layers.1.{name}", 1), right.unflatten(1, (-1, 2)) if heads else right)


def test_a_head_that_other_ranks_hold_is_taken_from_the_first_of_them():
    held = [(0,), (1,), (1,), (0, 1)]
    found = frame({"layers.0.v": [Shard(torch.full((3, len(heads), 2), float(rank), dtype=F64), "kv_heads", heads)
                                  for rank, heads in enumerate(held)]}, tp=4)
    taken = [found.parts_of("layers.0.v", rank, [0, 1])[0, :, 0].tolist() for rank in range(4)]
    assert taken == [[0, 1], [0, 1], [0, 2], [3, 3]], "its own come first"
    assert found.parts_of("layers.0.v", 0, [1, 5])[0].isnan().tolist() == [[False] * 2, [True] * 2]


# Row-parallel sums.

X = [noise(6, 2, 2, seed=3), noise(6, 2, 2, seed=4)]
W = noise(3, 8, seed=5)
B = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
OWN = [X[0].flatten(1) @ W[:, :4].T, X[1].flatten(1) @ W[:, 4:].T]


def summed(more, bias=B, partials=True):
    """Each rank's summand has so many times the bias."""
    points = {"layers.0.attn": [Shard(x, "q_heads", range(2 * rank, 2 * rank + 2)) for rank, x in enumerate(X)]}
    if partials:
        points["layers.0.o_partial"] = [Shard(own + n * B, "partial") for own, n in zip(OWN, more)]
    weights = {"model.layers.0.self_attn.o_proj.weight": W} | ({BIAS: bias} if bias is not None else {})
    return frame(points, weights=weights, places=[(0, i) for i in range(6)], ids=[[1] * 6], num_keys=[6] * 6)


@pytest.mark.parametrize("more, shares", [
    ((1, 0), (1, 0)), ((0, 1), (0, 1)), ((0, 0), (0, 0)), ((.5, .5), (.5, .5)), ((0.03, 0.98), (0, 1)),
    ((1, 1), (1, 0)), ((0, .5), (1, 0)), ((2, 0), (1, 0)), ((0.7, 0.3), (1, 0)), ((0, 1.06), (1, 0))])
def test_which_rank_adds_the_bias(more, shares):
    found = summed(more)
    assert found.bias_shares("layers.0.", "o_partial", 0) == dict(enumerate(map(float, shares)))
    for rank in (0, 1):
        assert torch.allclose(found.expected("layers.0.o_partial", rank), OWN[rank] + shares[rank] * B)
    total = sum(OWN) + sum(more) * B + (0 if sum(shares) else B)
    assert torch.allclose(found.expected("layers.0.o_proj", 1), total), "the sum of what they hold; the bias once"


def test_a_bias_nobody_can_be_seen_to_add_is_the_first_ranks():
    assert summed((0, 0), partials=False).bias_shares("layers.0.", "o_partial", 1) == {0: 1.0, 1: 0.0}
    none = summed((0, 0), bias=None)
    assert none.bias_shares("layers.0.", "o_partial", 1) == {0: 0.0, 1: 0.0}
    assert torch.equal(none.expected("layers.0.o_partial", 1), OWN[1])
    lost = summed((0, 1))
    lost.recording.points["layers.0.o_partial"][0] = None
    assert lost.bias_shares("layers.0.", "o_partial", 0) == {0: 1.0, 1: 0.0}


def test_a_bias_belongs_to_the_first_of_the_ranks_that_make_the_sum():
    """Every rank has all heads, and so makes its own sum, bias and all."""
    whole = torch.cat(X, 1)
    found = frame({"layers.0.attn": [Shard(whole, "q_heads", range(4))] * 2}, places=[(0, i) for i in range(6)],
                  weights={"model.layers.0.self_attn.o_proj.weight": W, BIAS: B}, ids=[[1] * 6], num_keys=[6] * 6)
    assert [found.bias_shares("layers.0.", "o_partial", rank) for rank in (0, 1)] == [{0: 1.0}, {1: 1.0}]
    for rank in (0, 1):
        assert torch.allclose(found.expected("layers.0.o_partial", rank), sum(OWN) + B)


@pytest.mark.parametrize("held, rank, chosen", [
    ([(0, 1), (2, 3)], 0, [0, 1]), ([(0, 1), (2, 3)], 1, [0, 1]), ([(0, 1, 2, 3)] * 2, 0, [0]),
    ([(0, 1, 2, 3)] * 2, 1, [1]), ([(0, 1), (0, 1), (2, 3), (2, 3)], 3, [0, 2]), ([(0, 1), (1, 2), (3,)], 0, [0, 1, 2]),
    ([(0, 1, 2, 3), (2, 3)], 1, [0]), ([(2, 3), (0, 1, 2, 3)], 0, [0, 1])])
def test_whose_summands_make_the_whole(held, rank, chosen):
    found = frame(tp=len(held))
    found.indices = lambda name, rank: held[rank]
    assert found.summands("layers.0.", "mlp_partial", rank) == chosen


# Layers in a row, the two ends, indices.

def test_what_goes_into_a_layer():
    found = frame()
    assert [found.before(at) for at in ("layers.0.", "layers.1.", "")] == ["embed", "layers.0.output",
                                                                          "layers.1.output"]


def test_a_layer_none_of_which_was_recorded_is_computed_before_the_next(monkeypatch):
    found, made = frame(), []
    monkeypatch.setattr(LocalFrame, "expected", lambda self, name, rank: made.append((name, rank)) or torch.ones(1, 1))
    found.weights = Some(drop=lambda: None)
    found.enter(2)
    assert made == [(f"layers.{layer}.output", rank) for layer in (0, 1) for rank in (0, 1)]
    assert {name for name, _ in found._values} == {"layers.1.output"}, "all else is forgotten"
    made.clear()
    found.enter(3)
    assert made == [("layers.2.output", 0), ("layers.2.output", 1)]


def test_one_computation_serves_ranks_with_the_same_inputs():
    found, made = frame(), []
    a, b = torch.ones(2), torch.ones(2)

    def double(x):
        made.append(x)
        return 2 * x
    one = found._shared("n", double, a)
    assert found._shared("n", double, a) is one and len(made) == 1
    assert found._shared("n", double, b) is not one and found._shared("m", double, a) is not one and len(made) == 3


HEAD_ROWS = noise(4, 3, seed=6)


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_the_rows_that_were_asked_for(tied):
    norm, table = noise(3, 3, seed=7), noise(4, 3, seed=8)
    found = frame({"norm": [Shard(norm, "replicated")] * 2}, logit_places=[(0, 2), (0, 0)],
                  weights={EMBEDDING: table} | ({} if tied else {HEAD: HEAD_ROWS}))
    right = norm[[2, 0]] @ (table if tied else HEAD_ROWS).T
    for rank, rows in enumerate((slice(0, 2), slice(2, 4))):
        assert torch.equal(found.expected("logits", rank), right[:, rows])


@pytest.mark.parametrize("whose", ["own", "gathered", "neither"])
def test_whole_logits_are_the_ranks_own_or_gathered(whose):
    norms = [noise(3, 3, seed=9), noise(3, 3, seed=10)]
    own = norms[1] @ HEAD_ROWS.T
    gathered = torch.cat([norm @ HEAD_ROWS[2 * rank:2 * rank + 2].T for rank, norm in enumerate(norms)], 1)
    held = {"own": own + 0.01, "gathered": gathered - 0.01, "neither": own * 1.1}[whose]
    found = frame({"norm": [Shard(norm, "replicated") for norm in norms],
                   "logits": [Shard(held, "vocab", range(4))] * 2}, weights={HEAD: HEAD_ROWS})
    assert torch.allclose(found.expected("logits", 1), gathered if whose == "gathered" else own)


def test_embeddings_of_the_rows_of_several_sequences():
    table = noise(9, 3, seed=11)
    found = frame(weights={EMBEDDING: table}, ids=[[1, 2], [8, 7]], places=[(0, 1), (1, 0), (1, 1)], num_keys=[2] * 3)
    assert torch.equal(found.expected("embed", 0), table[[2, 8, 7]])


def test_indices_and_features():
    assert columns_of([3, 0], 2) == [6, 7, 0, 1] and [*columns_of((3, 4), 2)] == [6, 7, 8, 9]
    assert columns_of([], 4) == []
    assert as_index([4, 5, 6]) == slice(4, 7) and as_index([2]) == slice(2, 3)
    assert as_index([4, 6]).tolist() == [4, 6] and as_index([5, 4]).tolist() == [5, 4]
    assert as_index([]).tolist() == [] and as_index([]).dtype == torch.long


def test_hugging_faces_keys_are_looked_up_once_in_the_runs_dtype(monkeypatch):
    asked = []
    monkeypatch.setattr(local, "hf_model", lambda ckpt, dtype: dtype)
    monkeypatch.setattr(local, "hf_trace", lambda model, ids: asked.append((model, ids)) or dict.fromkeys(
        ("layers.0.k_rope", "layers.0.v", "layers.0.q_rope", "embed"), 1))
    found = frame(ids=[[1], [2, 3]], dtype=torch.bfloat16)
    assert found._hf_points(1) == found._hf_points(1) == {"layers.0.k_rope": 1, "layers.0.v": 1}
    assert asked == [(torch.bfloat16, [2, 3])]

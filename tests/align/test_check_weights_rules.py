"""Recorded weights: which part of which tensor each is, whose rows they say a rank has; on entries made by hand."""

from types import SimpleNamespace as Some

import pytest
import torch

from tplab.align.check import fused
from tplab.align.check.layouts import Layout
from tplab.align.check.weights import _parts, _pieces, _vote, parameters_of
from tplab.checkpoint.layout import EMBEDDING, HEAD

F32 = torch.float32
Q, M = "model.layers.0.self_attn.", "model.layers.0.mlp."
CONFIG = Some(num_layers=2, head_dim=2, hidden_size=4)
FILE = {f"model.layers.0.{name}.weight": torch.arange(32.0).reshape(8, 4) for name in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    "self_attn.o_proj")} | {EMBEDDING: torch.arange(24.0).reshape(6, 4), HEAD: torch.arange(24.0).reshape(6, 4) + 1}


def loader(votes=None, splits=None, **more):
    layouts = {"q": Layout(((0, 1), (2, 3)), ""), "k": Layout(((0,), (1,)), ""), "v": Layout(((0,), (1,)), ""),
               "mlp": Layout(((0, 1, 2), (3, 4, -1)), "")}
    none = fused.Split([None, None], [None, None])
    return Some(config=CONFIG, size=2, layouts=layouts, splits={"qkv": none, "gate_up": none} | (splits or {}),
                planned={"q": [(0, 1), (2, 3)], "k": [(0,), (1,)], "v": [(0,), (1,)], "mlp": [(0, 1, 2), (3, 4)],
                         "vocab": [range(3), range(3, 6)]}, totals={"vocab": 6},
                evidence=Some(weight=lambda name: FILE.get(name)),
                vote_by_weight=lambda which, rank, local, full: votes.append((which, rank, tuple(local.shape), tuple(
                    full.shape))), **more)


def entry(*shape, dtype=F32, fill=None):
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype) if fill is None else fill
    return Some(shape=tuple(tensor.shape), dtype=tensor.dtype, tensor=lambda: tensor)


@pytest.mark.parametrize("name, shape, role, sizes", [
    (Q + "qkv_proj.weight", (8, 4), "qkv", {"q": 4, "k": 2, "v": 2}),
    (Q + "qkv_proj.bias", (8,), "qkv", {"q": 4, "k": 2, "v": 2}),
    (Q + "qkv_proj.weight", (9, 4), "", {}),
    (M + "gate_up_proj.weight", (6, 4), "gate_up", {"gate": 3, "up": 3}),
    (M + "gate_up_proj.weight", (10, 4), "gate_up", {"gate": 5, "up": 5}),
    (M + "gate_up_proj.weight", (7, 4), "", {}),
    (Q + "q_proj.weight", (5, 4), "q", {"q": 5}), (M + "up_proj.weight", (5, 4), "up",
                                                                      {"up": 5}),
    (Q + "o_proj.weight", (4, 4), "o", {}), ("model.layers.2.mlp.up_proj.weight", (5, 4), "", {}),
    ("model.layers.1.mlp.up_proj.weight", (5, 4), "up", {"up": 5}), ("lm_head.weight", (3, 4), "head", {}),
    (M + "up_proj.scale", (5, 4), "", {}), (M + "up_proj.weight", (1, 5, 4), "", {}),
    (M + "up_proj.weight", (), "", {}), ("model.layers.0.strange.weight", (5, 4), "", {})])
def test_the_parts_of_a_recorded_weight(name, shape, role, sizes):
    found, kind, parts = _parts(loader(), name, entry(*shape), 0)
    assert (found, {part: len(rows) for part, rows in parts.items()}) == (role, sizes)
    assert kind == name.rpartition(".")[2]
    assert not parts or torch.equal(torch.cat(list(parts.values())), entry(*shape).tensor())


def test_a_fused_weight_is_cut_where_the_activations_were_if_it_is_as_wide():
    split = fused.Split([{"gate": [1, 3], "up": [0, 2]}, None], [4, 4])
    name = M + "gate_up_proj.weight"
    parts = _parts(loader(splits={"gate_up": split}), name, entry(4, 2), 0)[2]
    assert parts["gate"].tolist() == [[2, 3], [6, 7]] and parts["up"].tolist() == [[0, 1], [4, 5]]
    assert [len(rows) for rows in _parts(loader(splits={"gate_up": split}), name, entry(6, 2), 0)[2].values()] == [3, 3]
    assert [len(rows) for rows in _parts(loader(splits={"gate_up": split}), name, entry(4, 2), 1)[2].values()] == [2, 2]


def test_weights_of_the_first_layer_say_what_a_rank_holds():
    votes = []
    _vote([{Q + "k_proj.weight": entry(2, 4), "model.layers.1.self_attn.k_proj.weight": entry(2, 4),
            Q + "k_proj.bias": entry(2)},
           {Q + "qkv_proj.weight": entry(8, 4), M + "gate_proj.weight": entry(3, 4),
            Q + "q_proj.weight": entry(4, 5), Q + "v_proj.weight": entry(3, 4)}
           ], loader(votes))
    assert votes == [("k", 0, (4, 1, 2), (4, 4, 2)), ("q", 1, (4, 2, 2), (4, 4, 2)), ("k", 1, (4, 1, 2), (4, 4, 2)),
                     ("v", 1, (4, 1, 2), (4, 4, 2)), ("mlp", 1, (4, 3, 1), (4, 8, 1))]


@pytest.mark.parametrize("rank, name, shape, found", [
    (1, Q + "q_proj.weight", (4, 4), {Q + "q_proj.weight": (0, (4, 5, 6, 7))}),
    (1, Q + "qkv_proj.weight", (8, 4), {
        Q + "q_proj.weight": (0, (4, 5, 6, 7)), Q + "k_proj.weight": (0, (2, 3)),
        Q + "v_proj.weight": (0, (2, 3))}),
    (1, M + "up_proj.weight", (3, 4), {M + "up_proj.weight": (0, (3, 4))}),
    (1, M + "down_proj.weight", (4, 3), {M + "down_proj.weight": (1, (3, 4))}),
    (1, Q + "o_proj.weight", (4, 4), {Q + "o_proj.weight": (1, (4, 5, 6, 7))}),
    (0, Q + "q_proj.bias", (4,), {}),  # the checkpoint has no such bias
    (0, "model.layers.0.input_layernorm.weight", (4,), {"model.layers.0.input_layernorm.weight": (None, ())}),
    (0, "model.layers.1.post_attention_layernorm.weight", (4,), {
        "model.layers.1.post_attention_layernorm.weight": (None, ())}),
    (0, "model.layers.1.self_attn.q_norm.weight", (2,), {"model.layers.1.self_attn.q_norm.weight": (None, ())}),
    (0, "model.norm.weight", (4,), {"model.norm.weight": (None, ())}), (0, "model.norm.bias", (4,), {}),
    (0, "lm_head.bias", (4,), {}), (0, "model.layers.0.strange.weight", (4, 4), {})])
def test_which_part_of_which_tensor_a_recorded_weight_is(rank, name, shape, found):
    pieces = dict(_pieces(loader(), name, entry(*shape), rank))
    assert {name: (piece.dim, piece.indices) for name, piece in pieces.items()} == found


@pytest.mark.parametrize("name, target, rank, held, rows", [
    ("lm_head.weight", HEAD, 1, FILE[HEAD][3:], (3, 4, 5)), ("lm_head.weight", HEAD, 0, FILE[HEAD][::2], (0, 2, 4)),
    ("lm_head.weight", HEAD, 1, FILE[HEAD], (0, 1, 2, 3, 4, 5)),
    ("lm_head.weight", HEAD, 1, FILE[EMBEDDING][3:], (3, 4, 5)),  # of another tensor: the plan's, for the judge to see
    ("lm_head.weight", HEAD, 1, FILE[HEAD][:4], (3, 4, 5)), ("model.embed_tokens.weight", EMBEDDING, 0,
                                                            FILE[EMBEDDING][:3], (0, 1, 2)),
    ("model.embed_tokens.weight", EMBEDDING, 1, FILE[EMBEDDING][3:, 0], (3, 4, 5))])  # of one dimension: no head
def test_which_rows_of_the_vocabulary_a_recorded_weight_has(name, target, rank, held, rows):
    (found, piece), = _pieces(loader(), name, entry(fill=held), rank)
    assert (found, piece.dim, piece.indices) == (target, 0, rows)


def test_weights_that_are_no_tensor_of_the_checkpoint_are_listed_once():
    ranks = [Some(parameters={"model.norm.weight": entry(4), "router.weight": entry(4), "cos": entry(4)}), None,
             Some(parameters={"router.weight": entry(4), "b.bias": entry(4), "n.weight": entry(4, dtype=torch.int64)})]
    found, unknown = parameters_of(Some(ranks=ranks), loader([]))
    assert [pieces and [*pieces] for pieces in found] == [["model.norm.weight"], None, None]
    assert unknown == ["router.weight", "b.bias"]



"""What names say: layers and roles of modules, points of tensors, overrides; entries made by hand."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.reports import config_with

from tplab.align.check.names import (
    BY_VALUE,
    CONSUMER,
    DIRECT,
    NAMED,
    OVERRIDE,
    PRODUCER,
    claims,
    pattern_of,
    role_of,
    split_name,
)
from tplab.align.check.overrides import check_names, overridden
from tplab.align.check.sources import shared_modules
from tplab.align.recording import PlacementError


@pytest.mark.parametrize("name, layer, rest, pattern", [
    ("model.layers.3.mlp.up_proj", 3, "mlp.up_proj", "model.layers.{i}.mlp.up_proj"),
    ("transformer.h.12.attn", 12, "attn", "transformer.h.{i}.attn"), ("h_2.ln_1", 2, "ln_1", "h_{i}.ln_1"),
    ("layer_4.mlp", 4, "mlp", "layer_{i}.mlp"), ("decoder_block_5", 5, "", "decoder_block_{i}"),
    ("layers.0", 0, "", "layers.{i}"), ("model.norm", None, "model.norm", "model.norm"), ("", None, "", ""),
    ("0", None, "0", "0"), ("0.weight", None, "0.weight", "0.weight"), ("0.1.mlp", 1, "mlp", "0.{i}.mlp"),
    ("model._orig_mod.layers.1.module.mlp", 1, "mlp", "model._orig_mod.layers.{i}.module.mlp"),
    ("layers.1.mlp.1", 1, "mlp.1", "layers.{i}.mlp.1"), ("w1", None, "w1", "w1")])
def test_where_a_name_stands(name, layer, rest, pattern):
    assert split_name(name) == (layer, rest) and pattern_of(name) == pattern


@pytest.mark.parametrize("layer, rest, role", [
    (1, "", "layer"), (1, "mlp.up_proj", "up"), (1, "attn.c_proj", "o"), (1, "mlp.c_proj", "down"),
    (1, "attention.dense", "o"), (1, "mlp.dense", "down"), (1, "mlp.proj", "down"), (1, "attn.proj", "o"),
    (1, "norm.proj", None), (1, "self_attn", "attention"), (1, "self_attn.attn", "core"), (1, "mlp.attn", "attention"),
    (1, "self_attn.q_proj.linear", "q"), (1, "self_attn.q_proj.base_layer", "q"), (1, "mlp.linear", None),
    (1, "self_attn.layer", None), (1, "lm_head", None), (1, "MLP.W1", "gate"), (1, "rotary_emb", "rotary"),
    (None, "rotary_emb", "rotary"), (None, "lm_head", "head"), (None, "output", "head"), (None, "q_proj", None),
    (None, "lm_head.linear", "head"), (None, "model.norm", "norm"), (None, "", None)])
def test_what_a_module_is_for(layer, rest, role):
    assert role_of(layer, rest) == role


# Claims: hidden 8, heads of 4, vocabulary 20, 2 layers.

F32 = torch.float32


def run(name, ins=(), outs=(), nth=0, module_class="Linear"):
    """The entries of one module run, by their shapes; ``(shape, dtype)`` for others than float32."""
    def entry(kind, number, shape):
        shape, dtype = shape if isinstance(shape[0], tuple) else (shape, F32)
        return Some(name=name, kind=kind, path=str(number), nth=nth, shape=shape, dtype=dtype, order=0,
                    module_class=module_class)
    found = [entry("in", i, shape) for i, shape in enumerate(ins)] + [entry("out", i, shape) for i, shape in
                                                                     enumerate(outs)]
    for order, one in enumerate(found):
        one.order = order
    return found


def config_of(vocab, qk_norm=False):
    return config_with(hidden_size=8, head_dim=4, vocab_size=vocab, num_layers=2, qk_norm=qk_norm)


def claimed(entries, qk_norm=False, shared=(), names=(), roles=(), points=()):
    sizes = config_of(20, qk_norm)
    return [(claim.point, f"{claim.entry.kind} {claim.entry.path}", claim.strength) for claim in claims(
        entries, sizes, dict(names), dict(shared), dict(roles), dict(points))]


X, HEADS, WIDE = (3, 8), (3, 12), (3, 24)
LAST = "layers.0."


@pytest.mark.parametrize("entries, found", [
    (run("layers.1.self_attn.q_proj", [X], [HEADS]),
     [("layers.1.input_norm", "in 0", CONSUMER), ("layers.1.q", "out 0", PRODUCER)]),
    (run("layers.1.self_attn.o_proj", [HEADS], [X]),
     [("layers.1.attn", "in 0", CONSUMER), ("layers.1.o", "out 0", PRODUCER)]),
    (run("layers.1.mlp.down_proj", [HEADS], [HEADS]), [("layers.1.mlp_act", "in 0", CONSUMER)]),  # not the hidden size
    (run("layers.1.mlp", [X], [X]), [("layers.1.post_norm", "in 0", CONSUMER), ("layers.1.down", "out 0", CONSUMER)]),
    (run("layers.1.input_layernorm", [X], [X]),
     [("layers.0.output", "in 0", CONSUMER), ("layers.1.input_norm", "out 0", PRODUCER)]),
    (run("layers.0.input_layernorm", [X], [X]), [("embed", "in 0", CONSUMER), ("layers.0.input_norm", "out 0",
                                                                               PRODUCER)]),
    (run("layers.1.input_layernorm", [X, X], [X, X]),  # vLLM's: what was added last, and what it is to be added to
     [("layers.0.mlp", "in 0", CONSUMER), ("layers.0.residual", "in 1", CONSUMER),
      ("layers.1.input_norm", "out 0", PRODUCER), ("layers.0.output", "out 1", PRODUCER)]),
    (run("norm", [X, X], [X, X]),
     [("layers.1.mlp", "in 0", CONSUMER), ("layers.1.residual", "in 1", CONSUMER), ("norm", "out 0", PRODUCER),
      ("layers.1.output", "out 1", PRODUCER)]),
    (run("layers.1.post_attention_layernorm", [X], [X]),
     [("layers.1.residual", "in 0", CONSUMER), ("layers.1.post_norm", "out 0", PRODUCER)]),
    (run("layers.1.post_attention_layernorm", [X, X], [X, X]),
     [("layers.1.o_proj", "in 0", CONSUMER), ("layers.0.output", "in 1", CONSUMER),
      ("layers.1.post_norm", "out 0", PRODUCER), ("layers.1.residual", "out 1", PRODUCER)]),
    (run("layers.0", [X], [X, X]), [("embed", "in 0", CONSUMER), ("layers.0.mlp", "out 0", PRODUCER),
                                    ("layers.0.residual", "out 1", PRODUCER)]),
    (run("layers.0", [X, X], [X]), [("layers.0.output", "out 0", PRODUCER)]),  # two tensors before the first: unclear
    (run("layers.1.self_attn", [X], [X]), [("layers.1.input_norm", "in 0", CONSUMER), ("layers.1.o", "out 0",
                                                                                       CONSUMER)]),
    (run("layers.1.attn", [HEADS, HEADS, HEADS], [HEADS]),  # no hidden state goes in: it is the core
     [("layers.1.q_rope", "in 0", CONSUMER), ("layers.1.k_rope", "in 1", CONSUMER), ("layers.1.v", "in 2", DIRECT),
      ("layers.1.attn", "out 0", PRODUCER)]),
    (run("layers.1.rotary_emb", [((3,), torch.long), HEADS, X], [HEADS, X]),
     [("layers.1.q", "in 1", DIRECT), ("layers.1.k", "in 2", DIRECT), ("layers.1.q_rope", "out 0", DIRECT),
      ("layers.1.k_rope", "out 1", DIRECT)]),
    (run("layers.1.rotary_emb", [HEADS], [HEADS]),
     [("layers.1.q", "in 0", DIRECT), ("layers.1.q_rope", "out 0", DIRECT)]),
    (run("layers.1.rotary_emb", [HEADS], [HEADS], nth=1),
     [("layers.1.k", "in 0", DIRECT), ("layers.1.k_rope", "out 0", DIRECT)]),
    (run("layers.1.mlp.up_proj", [X], [HEADS], nth=1), []),  # run again: of the first run alone is known what it is
    (run("layers.1.mlp.act_fn", [WIDE], [HEADS]), [("layers.1.gate_up", "in 0", CONSUMER), ("layers.1.mlp_act", "out 0",
                                                                                            PRODUCER)]),
    (run("layers.1.mlp.act_fn", [HEADS], [HEADS]), [("layers.1.gate", "in 0", DIRECT)]),
    (run("layers.1.kv_cache", [((3,), torch.long), HEADS, HEADS]),
     [("layers.1.k_rope", "in 1", CONSUMER), ("layers.1.v", "in 2", DIRECT)]),
    (run("layers.2.mlp.up_proj", [X], [HEADS]), []),  # there is no such layer
    (run("embed_tokens", [((3,), torch.long)], [X]), [("embed", "out 0", PRODUCER)]),
    (run("lm_head", [X], [(3, 20)]), [("norm", "in 0", CONSUMER), ("logits", "out 0", PRODUCER)]),
    (run("", [((3,), torch.long)], [(3, 20)]), [("logits", "out 0", CONSUMER)]),
    (run("model", [((3,), torch.long)], [X]), [("norm", "out 0", CONSUMER)]),
    (run("layers.1.post_attention_norm", [X], [X], module_class="Identity"), []),  # it does nothing
    (run("layers.1.q_norm", [HEADS], [HEADS]), [])])
def test_claims_of_a_module(entries, found):
    assert claimed(entries) == found


def test_a_root_as_wide_as_the_vocabulary_gives_logits():
    sizes = config_of(8)
    assert [claim.point for claim in claims(run("", [((3,), torch.long)], [X]), sizes, {}, {}, {}, {})] == ["logits"]


def test_norms_of_q_and_k_stand_before_the_rotation():
    assert claimed(run("layers.1.q_norm", [HEADS], [HEADS]), True) == [
        ("layers.1.q", "in 0", DIRECT), ("layers.1.q_norm", "out 0", PRODUCER)]
    assert [point for point, *_ in claimed(run("layers.1.rope", [HEADS, X], [HEADS, X]), True)] == [
        "layers.1.q_norm", "layers.1.k_norm", "layers.1.q_rope", "layers.1.k_rope"]


def test_a_module_that_all_layers_share():
    once = [one for nth in (0, 1) for one in run("rotary_emb", [HEADS, X], [HEADS, X], nth)]
    assert [point for point, *_ in claimed(once, shared={"rotary_emb": 1})] == [
        f"layers.{i}.{point}" for i in (0, 1) for point in ("q", "k", "q_rope", "k_rope")]
    twice = [one for nth in range(4) for one in run("rotary_emb", [HEADS], [HEADS], nth)]
    assert [point for point, *_ in claimed(twice, shared={"rotary_emb": 2})] == [
        f"layers.{i}.{point}" for i in (0, 1) for part in "qk" for point in (part, f"{part}_rope")]


@pytest.mark.parametrize("names, layers, found", [
    (["rotary_emb"] * 2, 2, {"rotary_emb": 1}), (["rotary_emb"] * 4, 2, {"rotary_emb": 2}), (["rotary_emb"] * 3, 2, {}),
    (["model.layers.0.self_attn.attn"] * 2, 2, {}), (["layers.0.rotary_emb"] * 2, 2, {"layers.0.rotary_emb": 1}),
    (["layers.0.rotary_emb", "layers.1.rotary_emb"], 2, {}),
    (["layers.0.rotary_emb"] * 2 + ["layers.1.rotary_emb"], 2, {}),
    (["layers.0.rotary_emb"], 1, {}), (["rotary_emb"], 1, {"rotary_emb": 1}), (["model.norm"] * 2, 2, {}),
    (["layers.1.rotary_emb"] * 2, 2, {})])
def test_which_modules_are_shared(names, layers, found):
    runs = {name: names[:at].count(name) for at, name in enumerate(names)}
    entries = [Some(name=name, kind="in", nth=nth) for name, last in runs.items() for nth in range(last + 1)]
    assert shared_modules([*entries, Some(name="rope", kind="tensor", nth=9)], layers) == found


def by_hand(name):
    return Some(name=name, kind="tensor", path="", nth=0, shape=X, dtype=F32, order=0)


@pytest.mark.parametrize("name, point", [
    ("layers.1.self_attn.q_rope", "layers.1.q_rope"), ("model.layers.0.gate", "layers.0.gate"), ("logits", "logits"),
    ("layers.1.qkv", "layers.1.qkv"), ("q_rope", None), ("layers.1.logits", None), ("layers.1.mask", None)])
def test_tensors_recorded_by_hand_say_what_they_are(name, point):
    assert claimed([by_hand(name)]) == ([(point, "tensor ", NAMED)] if point else [])


def test_what_a_person_says_and_what_was_learnt():
    entries = run("blocks.1.mix", [HEADS], [X])
    assert claimed(entries, names={"blocks.{i}.mix": "layers.{i}.o_proj"}) == [("layers.1.o_proj", "out 0", OVERRIDE)]
    assert claimed(entries, roles={"blocks.{i}.mix": "o"}) == [("layers.1.attn", "in 0", CONSUMER), (
        "layers.1.o", "out 0", PRODUCER)]
    assert claimed(entries, points={("blocks.{i}.mix", "in", "0"): "layers.{i}.attn"}) == [
        ("layers.1.attn", "in 0", BY_VALUE)]
    assert claimed([by_hand("layers.1.q")], names={"layers.{i}.q": "layers.{i}.k"}) == [
        ("layers.1.k", "tensor ", OVERRIDE)], "not what its name says"


@pytest.mark.parametrize("pattern, kind, path, meant", [
    ("a.{i}.b", "out", "", True), ("a.{i}.b", "out", "0", True), ("a.{i}.b", "out", "1", False),
    ("a.{i}.b", "in", "0", False), ("a.{i}.b", "tensor", "", True), ("a.{i}.b:in", "tensor", "", False),
    ("a.{i}.b:in", "in", "0", True), ("a.{i}.b:in", "in", "1", False), ("a.{i}.b:in", "in", "x", True),
    ("a.{i}.b:in", "in", "hidden_states", True), ("a.{i}.b:in", "in", "input", True),
    ("a.{i}.b:in", "in", "mask", False),
    ("a.{i}.b:in", "out", "0", False), ("a.{i}.b:in.residual", "in", "residual", True),
    ("a.{i}.b:in.residual", "in", "x", False), ("a.{i}.b:in.residual", "in", "0", False),
    ("a.{i}.b:out.1", "out", "1", True), ("a.{i}.b:out.1", "out", "0", False), ("a.{i}.b:out.1", "out", "", False),
    ("a.{i}.c", "out", "", False), ("a.*.b", "out", "", True), ("a.{i}", "out", "", False)])
def test_which_tensor_a_pattern_means(pattern, kind, path, meant):
    point = "layers.{i}.q" if "{i}" in pattern else "norm"
    found = overridden(Some(name="a.7.b", kind=kind, path=path), {"other": "embed", pattern: point})
    assert found == (point.replace("{i}", "7") if meant else None)


def test_the_first_pattern_that_fits_counts():
    entry = Some(name="a.7.b", kind="out", path="")
    assert overridden(entry, {"a.*": "", "a.{i}.b": "layers.{i}.q"}) == ""
    assert overridden(entry, {"a.{i}.b": "layers.{i}.q", "a.*": ""}) == "layers.7.q"
    assert overridden(Some(name="a.127.b", kind="out", path=""), {"a.{i}.b": "layers.{i}.q"}) == "layers.127.q"
    assert overridden(Some(name="a.07.b", kind="out", path=""), {"a.{i}.b": "layers.{i}.q"}) == "layers.7.q"


def test_the_nearest_name_is_named_however_far_it_is():
    with pytest.raises(PlacementError, match="'zzzz' fits nothing that was recorded; the nearest name is 'a.1'$"):
        check_names({"zzzz": "norm"}, {"a.1"})
    with pytest.raises(PlacementError, match="names: 'zzzz' fits nothing that was recorded$"):
        check_names({"zzzz": "norm"}, set())
    with pytest.raises(PlacementError, match="the nearest name is 'model.norm'$"):
        check_names({"model.morn:in": "norm"}, {"model.norm", "model.embed", "norm"})


@pytest.mark.parametrize("pattern, point", [("{i}.{i}.q", "q"), ("a.{i}.{i}", ""), ("a.b", "q"), ("a.{i}", "norm")])
def test_a_pattern_has_its_layer_once_or_not_at_all(pattern, point):
    with pytest.raises(PlacementError, match=r"so '.*' must hold \{i\} (once|nowhere)"):
        check_names({pattern: point}, {"a.1", "1.1.q", "a.b"})

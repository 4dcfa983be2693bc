"""The trace point of each recorded tensor: healthy engines of three conventions, compared with Hugging Face."""

from dataclasses import replace

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.third_party import FastLike, HfLike, VllmLike
from helpers.third_party_runs import batch_calls, flat_calls, run, texts, wrong_points

from tplab.align.check.folder import read_recorded
from tplab.align.check.placement import find_points
from tplab.align.points import point_names
from tplab.checkpoint import open_checkpoint

# What each engine lets one see of a layer.
SEEN = {
    HfLike: {"input_norm", "q", "k", "v", "q_rope", "k_rope", "attn", "o_partial", "o_proj", "residual", "post_norm",
             "gate", "up", "mlp_act", "mlp_partial", "mlp", "output"},
    VllmLike: {"input_norm", "q", "k", "v", "q_rope", "k_rope", "attn", "o_proj", "residual", "post_norm", "gate", "up",
               "mlp_act", "mlp", "output"},
    FastLike: {"input_norm", "q", "k", "v", "attn", "o_partial", "o_proj", "residual", "post_norm", "gate", "up",
               "mlp_act", "mlp_partial", "mlp", "output"},
}
FORMS = {
    "9q3kv": dict(model_type="llama", heads=9, kv_heads=3, hidden=36, head_dim=8),
    "14q2kv": dict(model_type="qwen2", heads=14, kv_heads=2, hidden=56, head_dim=6, tie=True),
    "qwen3": dict(model_type="qwen3", heads=6, kv_heads=2, hidden=30, head_dim=10, attention_bias=True),
    "biases": dict(model_type="llama", heads=4, kv_heads=4, hidden=24, head_dim=8, attention_bias=True, mlp_bias=True),
}


SIZES = [("9q3kv", 2), ("9q3kv", 4), ("14q2kv", 3), ("14q2kv", 4), ("qwen3", 1), ("qwen3", 2), ("biases", 2)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: open_checkpoint(make_checkpoint(tmp_path_factory.mktemp(name), layers=3, inter=43, vocab=67, **form))
            for name, form in FORMS.items()}


def recorded(tmp_path, ckpt, engine, calls, names=None, **options):
    run(tmp_path / "run", ckpt, engine, calls, **options)
    return find_points(read_recorded(tmp_path / "run"), ckpt, names)


@pytest.mark.parametrize("form, size", SIZES)
@pytest.mark.parametrize("engine", SEEN)
def test_a_healthy_third_party_engine_is_placed_whole(tmp_path, models, engine, form, size):
    ckpt = models[form]
    if engine is FastLike and ckpt.config.qk_norm:
        pytest.skip("gpt-fast has no such model")
    if engine is VllmLike:
        calls = flat_calls([text[:n] for text, n in zip(texts(2, 9), (9, 6))], decoded=2)
    else:
        calls = batch_calls(texts(2, 9), decoded=2)
    found = recorded(tmp_path, ckpt, engine, calls, size=size)
    assert not wrong_points(found, ckpt) and not found.contradictions and found.declared is None
    seen = SEEN[engine] | ({"q_norm", "k_norm"} if ckpt.config.qk_norm else set())
    if size == 1:
        seen -= {"o_partial", "mlp_partial"}
    inner = {name.rpartition(".")[2] for name in found.points if name.startswith("layers.2.")}
    assert inner == seen
    assert {"embed", "norm", "logits"} <= set(found.points) and set(found.points) == set(found.assumed)
    assert len(found.places) == sum(map(len, found.ids)) and found.dtype == torch.float32
    assert {name for name in found.points} <= {*point_names(ckpt.config), *(
        f"layers.{i}.{half}" for i in range(3) for half in ("gate", "up"))}


# Names that say nothing.

NOTHING_SAID = {
    "self_attn": "mixer", "qkv_proj": "inp", "o_proj": "outp", "rotary_emb": "spin", "attn": "core9", "mlp": "glu",
    "gate_up_proj": "wide", "act_fn": "gated", "down_proj": "narrow", "input_layernorm": "a", "norm": "z",
    "post_attention_layernorm": "b", "embed_tokens": "table", "logits_processor": "last", "q_proj": "m1",
    "k_proj": "m2", "v_proj": "m3", "gate_proj": "m4", "up_proj": "m5", "core_attention": "core9", "rotary": "spin",
    "lm_head": "words", "wqkv": "inp", "wo": "outp", "w1": "m4", "w3": "m5", "w2": "narrow", "attention": "mixer",
    "feed_forward": "glu", "attention_norm": "a", "ffn_norm": "b", "tok_embeddings": "table", "output": "words"}


def renamed(found, names):
    """The same recording under other names."""
    def other(entry):
        return replace(entry, name=".".join(names.get(part, part) for part in entry.name.split(".")))

    def call(known):
        return replace(known, entries=tuple(map(other, known.entries)))

    return replace(found, ranks=tuple(replace(rank, calls=tuple(map(call, rank.calls))) for rank in found.ranks))


@pytest.mark.parametrize("engine", SEEN)
def test_modules_are_known_by_what_they_do(tmp_path, models, engine):
    ckpt = models["9q3kv"]
    calls = flat_calls(texts(2, 9), 1) if engine is VllmLike else batch_calls(texts(2, 9), 1)
    run(tmp_path / "run", ckpt, engine, calls)
    found = find_points(renamed(read_recorded(tmp_path / "run"), NOTHING_SAID), ckpt)
    assert not wrong_points(found, ckpt) and not found.contradictions
    seen = {name.rpartition(".")[2] for name in found.points if name.startswith("layers.1.")}
    assert {"input_norm", "q", "k", "v", "attn", "post_norm", "mlp_act", "residual"} <= seen
    assert {"embed", "norm", "logits"} <= set(found.points)
    assert "known by what it does" in found.assumed["layers.1.attn"]


def test_a_bug_before_an_unknown_module_does_not_hide_it(tmp_path, models):
    """Its own input says what it should give, however wrong that input is."""
    ckpt = models["9q3kv"]

    def change(model, weights):
        model.model.layers[0].input_layernorm.weight.data *= 3

    run(tmp_path / "run", ckpt, HfLike, batch_calls(texts(2, 9)), change=change)
    found = find_points(renamed(read_recorded(tmp_path / "run"), NOTHING_SAID), ckpt)
    assert {"layers.1.q", "layers.1.attn", "layers.1.mlp_act", "layers.2.gate"} <= set(found.points)
    assert "layers.0.q" in wrong_points(found, ckpt)

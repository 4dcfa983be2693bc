"""Which recorded tensor is which trace point: healthy strangers of three conventions, laid beside Hugging Face."""

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.stranger_runs import batch_calls, flat_calls, run, wrong_points
from helpers.strangers import FastLike, HfLike, VllmLike

from tplab.align.check.folder import read_recorded
from tplab.align.check.place import place
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


def texts(count, length, vocab=67):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for _ in range(count)]


def recorded(tmp_path, ckpt, engine, calls, names=None, **options):
    run(tmp_path / "run", ckpt, engine, calls, **options)
    return place(read_recorded(tmp_path / "run"), ckpt, names)


@pytest.mark.parametrize("form, size", SIZES)
@pytest.mark.parametrize("engine", SEEN)
def test_a_healthy_stranger_is_placed_whole(tmp_path, models, engine, form, size):
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
    assert {name for name in found.points} <= {*point_names(3, ckpt.config.qk_norm), *(
        f"layers.{i}.{half}" for i in range(3) for half in ("gate", "up"))}

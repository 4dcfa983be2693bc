"""Engines from outside of the lab, recorded and judged: a learner's, and Hugging Face's own tensor parallelism."""

import pytest
import torch
from helpers import hf_parallel, learner_faults, learner_runs
from helpers.checkpoints import make_checkpoint

from tplab.align import check
from tplab.checkpoint import open_checkpoint
from tplab.pool import shared_pool

pytestmark = pytest.mark.pool

WIDE = {"rope_type": "default", "rope_theta": 1e6}
FORMS = {
    "qwen2": dict(model_type="qwen2", heads=6, kv_heads=2, head_dim=8, hidden=48, inter=43, rope=WIDE),
    "even": dict(model_type="llama", heads=8, kv_heads=4, head_dim=6, hidden=32, inter=44, rope=WIDE),
    "biases": dict(model_type="llama", heads=4, kv_heads=4, head_dim=8, hidden=24, inter=43, attention_bias=True),
    "eps": dict(model_type="llama", heads=6, kv_heads=3, head_dim=6, hidden=36, inter=43, eps=1e-3),
    "tied": dict(model_type="qwen2", heads=6, kv_heads=2, head_dim=8, hidden=48, inter=43, tie=True),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def form(tmp_path_factory):
    opened = {}

    def get(name):
        if name not in opened:
            folder = make_checkpoint(tmp_path_factory.mktemp(name), layers=3, vocab=66, seed=3, **FORMS[name])
            opened[name] = open_checkpoint(folder)
        return opened[name]
    return get


def learner(to, ckpt, dtype, *faults, size=2):
    """The verdict on the learner's engine with these bugs."""
    learner_runs.run(learner_faults.source(*faults), ckpt, to, DTYPES[dtype], size)
    return check(to, ckpt)


def hugging_face(to, ckpt, dtype, *faults):
    """The verdict on Hugging Face's tensor parallelism with these bugs."""
    shared_pool(2).run(hf_parallel.run, str(ckpt.folder), str(to), faults, learner_runs.PROMPT,
                       learner_runs.NEW_TOKENS, learner_runs.CHUNK, dtype)
    return check(to, ckpt)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_healthy_learner_is_clean(tmp_path, form, dtype, size):
    report = learner(tmp_path / "run", form("qwen2"), dtype, size=size)
    assert report.verdict == "clean" and not report.recording.unplaced, report.summary()
    assert {f"layers.2.{point}" for point in ("q_rope", "k_rope", "attn", "mlp_act", "output")} <= set(report.local)


@pytest.mark.parametrize("fault", [
    "q, k, v cut along dim 1", "KV heads cut for rank 0 on all", "head cut, joined in reverse", "attention averaged",
    "o_proj's bias on every rank", "RoPE in pairs", "theta 10000", "decode position one too far inside",
    "each chunk counts from 0", "no mask", "mask's diagonal one off", "layer index off by one", "no final norm",
    "tied head ignored"])
def test_a_bug_in_the_learners_engine_is_seen(tmp_path, form, fault):
    report = learner(tmp_path / "run", form(learner_faults.FAULTS[fault].form), "float32", fault)
    assert report.verdict == "bug" and not report.failed, report.summary()


@pytest.mark.parametrize("dtype", DTYPES)
def test_hugging_faces_own_tensor_parallelism_is_clean(tmp_path, form, dtype):
    report = hugging_face(tmp_path / "run", form("qwen2"), dtype)
    assert report.verdict == "clean", report.summary()
    assert {"embed", "layers.2.q", "layers.2.attn", "layers.2.mlp_act", "norm", "logits"} <= set(report.local)


@pytest.mark.parametrize("fault", ["MLP averaged", "no mask", "rank 1 multiplies with rank 0's keys", "a random head"])
def test_a_bug_put_into_hugging_face_is_seen(tmp_path, form, fault):
    report = hugging_face(tmp_path / "run", form(hf_parallel.FAULTS[fault].form), "float32", fault)
    assert report.verdict == "bug" and not report.failed, report.summary()

"""Engines from outside of the lab, recorded and judged: a learner's, and Hugging Face's own tensor parallelism.

``TPLAB_LONG=1 python -m pytest -s tests/align/test_check_third_party.py`` goes through all bugs, dtypes and ways to
record, and prints the table.
"""

import os
import re

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
long = pytest.mark.skipif(not os.environ.get("TPLAB_LONG"), reason="the whole table is printed with TPLAB_LONG=1")


@pytest.fixture(scope="module")
def form(tmp_path_factory):
    opened = {}

    def get(name):
        if name not in opened:
            folder = make_checkpoint(tmp_path_factory.mktemp(name), layers=3, vocab=66, seed=3, **FORMS[name])
            opened[name] = open_checkpoint(folder)
        return opened[name]
    return get


def learner(to, ckpt, dtype, *faults, size=2, without_points=False):
    """The verdict on the learner's engine with these bugs."""
    source = learner_faults.source(*faults, without_points=without_points)
    learner_runs.run(source, ckpt, to, DTYPES[dtype], size)
    return check(to, ckpt)


def hugging_face(to, ckpt, dtype, *faults):
    """The verdict on Hugging Face's tensor parallelism with these bugs."""
    shared_pool(2).run(hf_parallel.run, str(ckpt.folder), str(to), faults, learner_runs.PROMPT,
                       learner_runs.NEW_TOKENS, learner_runs.CHUNK, dtype)
    return check(to, ckpt)


def words(report):
    """All that the report names."""
    return [f"{one.where}: {one.names}: {one.sentence}" for one in report.diagnoses] + report.recording.contradictions


def named(report, fault):
    return any(re.search(fault.said, text) for text in words(report))


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
def test_a_bug_in_the_learners_engine_is_named(tmp_path, form, fault):
    one = learner_faults.FAULTS[fault]
    report = learner(tmp_path / "run", form(one.form), "float32", fault)
    assert report.verdict == "bug" and named(report, one), report.summary()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_heads_on_every_rank_are_one_bug(tmp_path, form, dtype):
    report = learner(tmp_path / "run", form("qwen2"), dtype, "every rank has rank 0's heads")
    assert [one.fault for one in report.diagnoses] == ["shard_of_another_rank"], report.summary()


@pytest.mark.parametrize("faults", learner_faults.TWO[2:3] + learner_faults.TWO[-1:], ids=" + ".join)
def test_two_bugs_at_once_are_both_named(tmp_path, form, faults):
    report = learner(tmp_path / "run", form("qwen2"), "bfloat16", *faults)
    assert all(named(report, learner_faults.FAULTS[fault]) for fault in faults), report.summary()


@pytest.mark.parametrize("dtype", DTYPES)
def test_hugging_faces_own_tensor_parallelism_is_clean(tmp_path, form, dtype):
    report = hugging_face(tmp_path / "run", form("qwen2"), dtype)
    assert report.verdict == "clean", report.summary()
    assert {"embed", "layers.2.q", "layers.2.attn", "layers.2.mlp_act", "norm", "logits"} <= set(report.local)
    assert "position_embeddings" in report.recording.notes[0] and len(report.recording.notes) == 1


@pytest.mark.parametrize("fault", ["MLP averaged", "no mask", "rank 1 multiplies with rank 0's keys", "a random head"])
def test_a_bug_put_into_hugging_face_is_named(tmp_path, form, fault):
    one = hf_parallel.FAULTS[fault]
    report = hugging_face(tmp_path / "run", form(one.form), "float32", fault)
    assert report.verdict == "bug" and named(report, one), report.summary()


@long
def test_the_whole_table(tmp_path, form):
    table = []

    def row(engine, dtype, faults, of, judge, healthy_form="qwen2"):
        ckpt = form(of[faults[0]].form if faults else healthy_form)
        report = judge(tmp_path / str(len(table)), ckpt, dtype, *faults)
        hidden = dtype == "bfloat16" and [of[fault].hidden for fault in faults if of[fault].hidden]
        verdict = ("clean" if not faults else hidden[0] if hidden else "unseen") if report.verdict != "bug" else (
            "FALSE ALARM" if not faults else "named" if all(named(report, of[fault]) for fault in faults) else "seen")
        table.append((engine, dtype, " + ".join(faults) or f"healthy, {healthy_form}", verdict))
        print("  ".join(table[-1]), *([report.summary()] if verdict not in ("clean", "named") else []), sep="\n")

    for dtype in DTYPES:
        for without in (False, True):
            engine = "learner, modules only" if without else "learner"
            for faults in [*((name,) for name in learner_faults.FAULTS), *learner_faults.TWO]:
                row(engine, dtype, faults, learner_faults.FAULTS, lambda *a, w=without: learner(*a, without_points=w))
            for name in FORMS:
                row(engine, dtype, (), {}, lambda *a, w=without: learner(*a, without_points=w), name)
        for faults in [*((name,) for name in hf_parallel.FAULTS), *hf_parallel.TWO]:
            row("Hugging Face", dtype, faults, hf_parallel.FAULTS, hugging_face)
        for name in ("qwen2", "even", "biases", "tied"):  # transformers cuts no KV head in two: 3 over 2 ranks fail
            row("Hugging Face", dtype, (), {}, hugging_face, name)
    for engine in dict.fromkeys(line[0] for line in table):
        for dtype in DTYPES:
            found = [line[3] for line in table if line[:2] == (engine, dtype) and not line[2].startswith("healthy")]
            seen = [verdict for verdict in found if verdict in ("named", "seen")]
            could = [verdict for verdict in found if verdict in ("named", "seen", "unseen")]
            print(f"{engine}, {dtype}: {len(seen)} of {len(could)} seen, {found.count('named')} named")
            assert len(seen) == len(could) and found.count("named") >= 0.8 * len(could)
    assert not [line for line in table if line[3] == "FALSE ALARM"]

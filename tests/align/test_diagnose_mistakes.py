"""What strangers' engines do and the museum does not have: each is named, and a near miss is not."""

import dataclasses

import pytest
import torch
from helpers import mistakes_attention, mistakes_rest
from helpers.checkpoints import make_checkpoint
from helpers.faults import prompts
from helpers.reports import with_point

from tplab.align import align, diagnose
from tplab.align.diagnose.diagnose import diagnose_all
from tplab.checkpoint import open_checkpoint

MISTAKES = mistakes_attention.MISTAKES | mistakes_rest.MISTAKES  # one table, to which each of the files adds

MODELS = {
    "llama": {"model_type": "llama", "heads": 6, "kv_heads": 3, "head_dim": 10, "hidden": 30, "attention_bias": True,
              "mlp_bias": True, "rope": {"rope_type": "default", "rope_theta": 500000.0}},
    "qwen2": {"model_type": "qwen2", "heads": 6, "kv_heads": 3, "head_dim": 12, "hidden": 96},
    "qwen3": {"model_type": "qwen3", "heads": 6, "kv_heads": 3, "head_dim": 12, "hidden": 48},
    "square": {"model_type": "llama", "heads": 6, "kv_heads": 3, "head_dim": 6, "hidden": 36},
    "yarn": {"model_type": "llama", "heads": 6, "kv_heads": 3, "hidden": 36, "rope": "yarn"},
    "wide": {"model_type": "llama", "heads": 24, "kv_heads": 6, "head_dim": 6, "hidden": 48},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    opened = {}

    def get(name):
        if name not in opened:
            folder = make_checkpoint(tmp_path_factory.mktemp("mistakes") / "m", layers=3, seed=7, **MODELS[name])
            opened[name] = open_checkpoint(folder)
        return opened[name]
    return get


PROMPTS = [*prompts(67), *(prompt[::-1] for prompt in prompts(67))]


def report_of(models, name, tp=2, dtype="float32"):
    one = MISTAKES[name]
    return align(models(one.model), PROMPTS, tensor_parallel_size=tp, dtype=dtype, patches=one.patches, logical=True)


IN_BFLOAT16 = ["no norm weight", "LayerNorm", "another layer's qkv", "no o bias", "[v|k|q]", "theta 1e6", "turned back",
               "scores not scaled", "averaged", "second residual behind the norm", "gate and up in turns", "relu",
               "embedding × sqrt(hidden)", "head tied"]
WHERE_RANKS_MATTER = ["qkv interleaved per group", "o of the next rank", "first rows of the bias", "KV heads by modulo",
                      "averaged", "rank 0 left out", "embedding not reduced", "gate and up as one block",
                      "residual on every rank", "another layer's gate and up", "head rows shifted by one"]
EXACT = {"gate and up of zeros", "norms in bfloat16", "o in bfloat16"}  # named by digits, or nothing to be off by
LOST = {"head tied", "head rows reversed", "head rows shifted by one"}  # what is no longer the head's is "head_random"


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_and_a_near_miss_is_not(models, name):
    one, report = MISTAKES[name], report_of(models, name)
    diagnosis = diagnose(report)
    assert one.fault in diagnosis.names and one.point in (None, diagnosis.point), diagnosis
    assert diagnosis.fault == one.fault or name == "KV head 0", diagnosis  # the museum has a bug like it
    if name not in EXACT:
        off = diagnose(with_point(report, diagnosis.point, lambda x: x + 8 * report.floor * x.abs().max() * noise(x)))
        assert off.fault is None or (name in LOST and off.fault == "head_random"), off


def noise(x):
    return 2 * torch.rand(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype) - 1


@pytest.mark.parametrize("name", WHERE_RANKS_MATTER)
def test_over_three_ranks(models, name):
    diagnosis = diagnose(report_of(models, name, tp=3))
    assert diagnosis.fault == MISTAKES[name].fault, diagnosis


HOOKS = ("q_norm", "k_norm", "q_rope", "k_rope", "o_partial", "mlp_partial")  # what no module of most engines returns
OUTSIDE = (*HOOKS, "q", "k", "v", "attn", "residual", "mlp_act")  # what only blocks' hooks do not see


@pytest.mark.parametrize("unseen, name", [
    *((HOOKS, name) for name in ("theta 1e6", "half of the head", "bf16 tables", "turned twice", "positions / 4",
                                 "scores not scaled", "averaged", "another layer's o", "no o bias")),
    *((OUTSIDE, name) for name in ("gate and up exchanged", "relu", "[v|k|q]", "another layer's qkv", "no down bias",
                                   "o of the next rank", "window of 7", "qkv bias twice"))])
def test_where_the_points_between_were_not_recorded(models, unseen, name):
    report = report_of(models, name)
    points = {point: shards for point, shards in report.recording.points.items()
              if point.rpartition(".")[2] not in unseen}
    report = dataclasses.replace(report, recording=dataclasses.replace(report.recording, points=points))
    found = diagnose_all(report)
    assert found and all(MISTAKES[name].fault in diagnosis.names for diagnosis in found), found


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_in_bfloat16(models, name):
    diagnosis = diagnose(report_of(models, name, dtype="bfloat16"))
    assert diagnosis.fault == MISTAKES[name].fault, diagnosis

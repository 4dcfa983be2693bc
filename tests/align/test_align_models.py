"""Alignment on real processes and real models: fable and SmolLM2 (9 query heads, 3 KV heads)."""

import json

import pytest
import torch
from helpers.checkpoints import make_checkpoint

from tplab.align import AlignError, align, reassemble
from tplab.patch import Patch
from tplab.pool import shared_pool
from tplab.shard import ShardPlan

pytestmark = pytest.mark.pool

PROMPTS = ["What is the capital of France?", "def fib(n):\n    return n if n < 2 else"]


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-4), ("float64", 1e-7)])
def test_fable(tp, dtype, bound):
    report = align("fable", PROMPTS, tensor_parallel_size=tp, dtype=dtype)
    assert report.ok and report.max_abs_diff <= bound and report.top1_agreement == 1 and report.nan_count == 0


@pytest.mark.parametrize("tp, dtype, bound", [(2, "float32", 1e-4), (3, "float64", 1e-7)])
def test_smollm2(smollm2, tp, dtype, bound):
    report = align(smollm2, PROMPTS, tensor_parallel_size=tp, dtype=dtype)
    assert report.ok and report.max_abs_diff <= bound and report.top1_agreement == 1
    if tp == 2:
        assert (report.plan.sizes("q_heads"), report.plan.sizes("kv_heads")) == ([6, 3], [2, 1])
        assert report.shapes[1] == {"q": (192, 576), "k": (64, 576), "v": (64, 576)}


def test_fable_reassembles_on_real_ranks():
    assert reassemble("fable", tensor_parallel_size=2) == {}


def test_each_rank_reads_only_its_share(smollm2):
    def on_rank(ckpt, plan):
        from tplab.model import load_model
        return load_model(ckpt, plan).load_stats

    whole = sum(4 * torch.Size(info.shape).numel() for info in smollm2.tensors.values())
    for stats in shared_pool(2).run(on_rank, smollm2, ShardPlan.from_config(smollm2.config, 2)):
        assert 0.4 * whole < stats.bytes_read < 0.6 * whole
        assert stats.parameter_bytes == stats.bytes_read


def test_a_function_from_this_file_can_be_patched_in_on_the_ranks():
    def everyone_keeps_its_own(self, partial):
        return partial

    report = align("fable", PROMPTS,
                   patches=[Patch("tplab.shard.linear.RowParallelLinear.reduce", everyone_keeps_its_own)])
    assert report.first_divergence.name == "layers.0.o_proj" and report["layers.0.o_partial"].inside
    assert report.rank_spread > 1e-3 and report.patches == ("tplab.shard.linear.RowParallelLinear.reduce",)
    assert align("fable", PROMPTS).ok, "the patch outlived its run"


def test_a_nan_is_counted_and_located():
    def multiply(scores, mask):
        return scores + mask * float("-inf")

    report = align("fable", PROMPTS[0], patches=[Patch("tplab.model.attention.mask_scores", multiply)])
    assert report.first_divergence.name == "layers.0.attn" and report.nan_count > 0 and report.top1_agreement < 1
    assert report["layers.0.v"].nan == 0


def test_what_is_written_can_be_read_again(tmp_path):
    from safetensors.torch import load_file

    report = align("fable", [[1, 2, 3, 4, 5]], tensor_parallel_size=2)
    report.to_json(tmp_path / "r.json"), report.save_logits(tmp_path / "l.safetensors")
    data, logits = json.loads((tmp_path / "r.json").read_text()), load_file(tmp_path / "l.safetensors")
    assert data["first_divergence"] is None and data["ok"] and data["tp"] == 2 and data["dtype"] == "float32"
    assert data["max_abs_diff"] == (logits["tp_logits"] - logits["hf_logits"]).abs().max()
    assert len(data["points"]) == len(report.points) and data["plan"]["kind"] == "partition"


@pytest.mark.parametrize("prompts, message", [
    ([], "no prompt"), ("", "empty"), ([[0, 10 ** 6]], "1000000 is not in"), ([[0, -1]], "-1 is not in"),
    ([[1] * 100_000], "100000 tokens"),
])
def test_bad_prompts_are_refused_before_a_rank_starts(prompts, message):
    with pytest.raises(AlignError, match=message):
        align("fable", prompts)


def test_a_pool_of_another_size_is_refused(tmp_path):
    make_checkpoint(tmp_path / "m")
    with pytest.raises(AlignError, match="2 ranks, the plan needs 3"):
        align(tmp_path / "m", [[1, 2]], tensor_parallel_size=3, pool=shared_pool(2))

"""What a search with mutations found open: comparison, floors and spread on tensors made by hand; mistakes where only
k, only one layer, only some ranks or only some prompts are wrong."""

import dataclasses

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.faults import prompts

from tplab.align import AlignError, align, align_decode, diagnose, hf_greedy
from tplab.align.gather import whole_point
from tplab.align.recording import Shard
from tplab.align.report import compare
from tplab.checkpoint import open_checkpoint
from tplab.faults import fault
from tplab.patch import Patch, original
from tplab.ranks import rank

ATTENTION = "tplab.model.attention.TensorParallelAttention"
POSITIONS = "tplab.engine.runner.token_positions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("search") / "m", "qwen2", heads=6, kv_heads=3, hidden=48)


def broken(target, replacement, model="fable", tp=2, **options):
    return align(model, prompts(67), tensor_parallel_size=tp, patches=[Patch(target, replacement)], logical=True,
                 **options)


# The comparison.

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_difference_is_measured_on_the_largest_magnitude_of_the_reference(dtype):
    right = torch.tensor([[0.0, -8.0], [1.0, 2.0]], dtype=dtype)
    floor = {torch.float32: 2e-5, torch.float64: 2e-7, torch.bfloat16: 0.4}[dtype]
    for factor, inside in ((0.9, True), (1.2, False)):
        ours = right.clone()
        ours[1, 1] += factor * floor * 8
        assert compare("norm", ours, right, 0.0, dtype).inside == inside
        assert compare("norm", right, right, factor * floor * 8, dtype).inside == inside, "the spread counts as much"
    huge = compare("norm", right * 100, right, 0.0, dtype)
    assert huge.relative == pytest.approx(99) and not huge.inside, "tplab's own scale explains nothing"
    assert huge.mean_abs == pytest.approx(99 * 11 / 4) and huge.max_abs == 99 * 8


@pytest.mark.parametrize("dtype, floor", [(torch.float32, 2e-5), (torch.float64, 1e-5), (torch.bfloat16, 0.4)])
def test_the_decode_path_has_its_own_floor(dtype, floor):
    right = torch.ones(2, 2, dtype=dtype)
    for factor, inside in ((0.9, True), (1.2, False)):
        ours = right.clone()
        ours[0, 1] += factor * floor
        for name in ("norm", "logits"):
            assert compare(name, ours, right, 0.0, dtype, decode=True).inside == inside


@pytest.mark.parametrize("odd", [1, 2, 3])
def test_whichever_rank_disagrees_is_seen(odd):
    def replicated(*tensors):
        return whole_point("norm", [Shard(tensor, "replicated") for tensor in tensors])

    shards = [torch.ones(3, 8) for _ in range(4)]
    shards[odd][1, 2] = 1.5
    assert replicated(*shards)[1] == 0.5
    heads = [torch.ones(3, 1, 2) for _ in range(4)]
    heads[odd][2, 0, 1] = 3.0
    whole, spread, held = whole_point("layers.0.k", [Shard(head, "kv_heads", range(1)) for head in heads])
    assert spread == 2 and torch.equal(whole, torch.ones(3, 1, 2)) and held == [0]
    for same in ([torch.full((3, 8), float("nan"))] * 4, [torch.full((3, 8), float("inf"))] * 4):
        assert replicated(*same)[1] == 0, "all ranks agree on what is lost"
    assert replicated(torch.ones(3, 8), *[torch.full((3, 8), float("nan"))] * 3)[1] == float("inf")


def test_the_reports_totals_are_over_all_points(folder):
    clean = align(folder, [1, 2, 3], logical=True)
    apart = dataclasses.replace(clean.points[3], spread=7.0, nan=2, inf=4, inside=False)
    later = dataclasses.replace(clean.points[9], relative=100.0, nan=1, inside=False)
    points = [*clean.points[:3], apart, *clean.points[4:9], later, *clean.points[10:]]
    report = dataclasses.replace(clean, points=points)
    assert (report.rank_spread, report.nan_count) == (7.0, 3)
    assert report.first_divergence is apart, "the first, not the worst"


def test_the_vocabulary_and_the_pool_have_exact_ends(folder, pool):
    assert align(folder, [66], logical=True).ok
    with pytest.raises(AlignError, match="token id 67 is not in"):
        align(folder, [67], logical=True)
    with pytest.raises(AlignError, match="the pool has 2 ranks, the plan needs 1"):
        align(folder, [1, 2], tensor_parallel_size=1, pool=pool)


def test_hugging_face_writes_on_behind_an_end_of_text(folder):
    ckpt = open_checkpoint(folder)
    first = hf_greedy(ckpt, [1, 2, 3], 1)[0]
    from tplab.align.reference import hf_model
    config = hf_model(ckpt, torch.float32).generation_config
    config.eos_token_id = first
    try:
        assert len(hf_greedy(ckpt, [1, 2, 3], 5)) == 5
    finally:
        config.eos_token_id = None


# What the diagnosis is told by parts of a run.

def test_in_float64_a_small_beginning_of_something_large_is_no_rounding():
    def split_heads(self, qkv):
        q, k, v = original("tplab.shard.linear.QKVParallelLinear.split_heads")(self, qkv)
        return q, k, v * (1 + 2e-6)

    report = broken("tplab.shard.linear.QKVParallelLinear.split_heads", split_heads, dtype="float64")
    assert report.first_divergence.name == "layers.0.v" and report.first_divergence.relative < 3e-6
    assert diagnose(report).sentence.startswith("Unknown cause"), "no module rounds that much"


@pytest.mark.parametrize("name", ["rope_missing", "rope_pairs", "rope_over_heads"])
def test_a_rotation_that_is_wrong_for_keys_only(name):
    def apply_rope(self, q, k, cos, sin):
        right = original(f"{ATTENTION}.apply_rope")(self, q, k, cos, sin)
        return right[0], fault(name).patches[0].replacement(self, q, k, cos, sin)[1]

    diagnosis = diagnose(broken(f"{ATTENTION}.apply_rope", apply_rope))
    assert diagnosis.point == "layers.0.k_rope" and name in diagnosis.names, diagnosis


@pytest.mark.parametrize("change", [
    lambda right, segment: range(right.start + 1, right.stop + 1),
    lambda right, segment: range(right.start // 2, right.start // 2 + 1) if segment.count == 1 else right,
    lambda right, segment: range(right.start % 5, right.start % 5 + 1) if segment.count == 1 else right,
], ids=["all one too far", "halved", "modulo 5"])
def test_other_positions_of_the_decode_path_are_no_fault_of_the_museum(folder, change):
    patch = Patch(POSITIONS, lambda segment: change(original(POSITIONS)(segment), segment))
    report = align_decode(folder, [p + p[:4] for p in prompts(67)], new_tokens=5, logical=True, patches=[patch])
    diagnosis = diagnose(report)
    assert diagnosis.point == "layers.0.q_rope" and diagnosis.fault == "rope_positions", diagnosis
    assert diagnosis.sentence.startswith("Positions are not right: the token at ")


def test_an_order_that_all_ranks_but_the_first_have(folder):
    def batch_order(step):
        return tuple(reversed(step.requests)) if rank() else step.requests

    report = align_decode(folder, prompts(67), new_tokens=5, tensor_parallel_size=3, logical=True,
                          patches=[Patch("tplab.engine.runner.batch_order", batch_order)])
    assert diagnose(report).fault == "row_order"


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_reading_too_much_is_measured_in_the_checkpoints_bytes(tmp_path, dtype):
    model = make_checkpoint(tmp_path / "m", "qwen2", dtype=torch.bfloat16)
    assert diagnose(align(model, prompts(67), dtype=dtype, logical=True)).ok
    report = align(model, prompts(67), dtype=dtype, patches=[fault("full_copy_on_every_rank")], logical=True)
    diagnosis = diagnose(report)
    assert diagnosis.fault == "full_copy_on_every_rank" and 1.5 < diagnosis.numbers["times"] < 2.2

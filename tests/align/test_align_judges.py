"""The judges judged: near misses, lost numbers, shards that are nearly right. A wrong verdict here would hide a bug."""

import dataclasses
import json

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.faults import case_checkpoint, prompts
from helpers.reports import with_point

from tplab.align import AlignError, align, align_decode, diagnose, reassemble
from tplab.align.floors import LOCAL
from tplab.align.report import compare
from tplab.checkpoint import open_checkpoint
from tplab.faults import fault, scenario
from tplab.model.loader import load_model as right_load_model
from tplab.patch import Patch, original
from tplab.ranks import rank, state

QKV = "tplab.shard.linear.QKVParallelLinear.split_heads"
HEAD = "tplab.shard.embedding.ParallelLMHead.forward"
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("judges") / "m", "qwen3", heads=6, kv_heads=3, hidden=48)


@pytest.fixture(scope="module")
def clean(folder):
    return align(folder, [IDS, IDS[:3]], logical=True)


def scaled(report, floors):
    """The report with its first divergent tensor off by so many floors more."""
    return with_point(report, report.first_divergence.name, lambda tensor: tensor * (1 + floors * LOCAL[report.dtype]))


@pytest.mark.parametrize("name, dtype, floors", [
    ("no_mask", "float32", 4), ("vocab_offset", "float32", 25), ("decode_position_off_by_one", "float32", 4),
    ("qkv_order", "float64", 25)])
def test_a_near_miss_is_not_given_a_name(name, dtype, floors):
    one, options = fault(name), {"dtype": dtype, "patches": [fault(name)], "logical": True}
    report = (align("fable", prompts(768), **options) if one.shows_in == "forward" else
              align_decode("fable", **scenario(name, 768), **options))
    assert name in diagnose(scaled(report, 1)).names, "rounding must not hide it"
    diagnosis = diagnose(scaled(report, floors))
    assert diagnosis.fault is None and diagnosis.sentence.startswith("Unknown cause"), diagnosis


@pytest.mark.parametrize("name", ["row_bias_everywhere", "rope_scaling_ignored", "repeated_kv_stored"])
def test_a_near_miss_where_fable_shows_nothing(name, tmp_path):
    ckpt = case_checkpoint("llama with biases and yarn", tmp_path)
    report = align(ckpt, prompts(67), patches=[fault(name)], logical=True)
    assert name in diagnose(scaled(report, 1)).names
    assert diagnose(scaled(report, 4)).fault is None


def off(part, factor):
    def split_heads(self, qkv):
        parts = list(original(QKV)(self, qkv))
        parts[part] = parts[part] * factor
        return tuple(parts)

    return Patch(QKV, split_heads)


def times_on_rank_1(target, factor):
    def forward(self, *args):
        return original(target)(self, *args) * (factor if rank() else 1)

    return Patch(target, forward)


@pytest.mark.parametrize("patch, point, dtype", [
    (off(0, 1.05), "layers.0.q", "float32"), (off(2, 1.05), "layers.0.v", "float32"),
    (off(1, 1 + 1e-5), "layers.0.k", "float64"), (off(2, 1 + 1e-5), "layers.0.v", "float64"),
], ids=["q × 1.05", "v × 1.05", "k + 1e-5", "v + 1e-5"])
def test_what_no_fault_does_is_unknown(folder, patch, point, dtype):
    report = align(folder, IDS, dtype=dtype, patches=[patch], logical=True)
    diagnosis = diagnose(report)
    assert report.first_divergence.name == diagnosis.point == point
    assert diagnosis.fault is None and diagnosis.sentence.startswith("Unknown cause"), diagnosis


@pytest.mark.parametrize("times, dtype", [(1.01, "float32"), (1 + 1e-5, "float64")])
def test_logits_that_one_rank_scales_are_located_there(folder, times, dtype):
    diagnosis = diagnose(align(folder, IDS, dtype=dtype, patches=[times_on_rank_1(HEAD, times)], logical=True))
    assert diagnosis.fault is None and diagnosis.point == "logits" and diagnosis.ranks == (1,)
    assert diagnosis.numbers["off"] == pytest.approx(times - 1, rel=1e-2)


# Numbers that are lost.

@pytest.mark.parametrize("lost, counts", [(float("nan"), (1, 0)), (float("inf"), (0, 1)), (float("-inf"), (0, 1))])
def test_one_lost_number_is_never_inside_the_floor(lost, counts):
    right = torch.arange(12.0).reshape(3, 4)
    ours = right.clone()
    ours[1, 2] = lost
    point = compare("layers.0.v", ours, right, 0.0, torch.float32)
    assert not point.inside and (point.nan, point.inf) == counts and point.max_abs == 0


def test_a_spread_of_nan_and_a_difference_of_nothing_finite_are_outside():
    right = torch.ones(2, 2)
    assert not compare("layers.0.v", right, right, float("nan"), torch.float32).inside
    assert not compare("layers.0.v", right * float("nan"), right, 0.0, torch.float32).inside


def with_logits(report, ours):
    found = report.evidence["logits"]
    return dataclasses.replace(report, evidence=report.evidence | {"logits": found._replace(ours=ours)})


def test_a_row_with_nan_agrees_with_nothing(clean):
    ours = clean.hf_logits.clone()
    assert with_logits(clean, ours).top1_agreement == 1
    rows, best = len(ours), ours.argmax(-1)
    ours[0, (best[0] + 1) % 67] = float("nan")  # the best token is still the best of the others
    assert with_logits(clean, ours).top1_agreement == pytest.approx((rows - 1) / rows)
    ours[:] = float("nan")
    assert with_logits(clean, ours).top1_agreement == 0


def test_a_report_with_nan_and_infinity_is_valid_json(tmp_path):
    report = align("fable", prompts(768), patches=[fault("nan_mask")], logical=True)
    report.points[0] = dataclasses.replace(report.points[0], spread=float("inf"))  # as where one rank alone has NaN
    report.to_json(tmp_path / "r.json")

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    data = json.loads((tmp_path / "r.json").read_text(), parse_constant=refuse)
    assert not data["ok"] and data["max_abs_diff"] is None and data["nan_count"] > 0
    assert data["rank_spread"] is None and data["points"][0]["spread"] is None and data["points"][1]["spread"] == 0


# Prompts, shards, what is left behind.

def test_a_prompt_of_exactly_the_longest_length(tmp_path):
    folder = make_checkpoint(tmp_path / "m", max_positions=12)
    assert align(folder, [5] * 12, logical=True).ok
    with pytest.raises(AlignError, match="the prompt has 13 tokens; .* takes up to 12"):
        align(folder, [5] * 13, logical=True)
    assert align_decode(folder, [[5] * 12], new_tokens=11, logical=True).ok


def loading_with(change):
    """A loader that changes what the last rank holds."""
    def load_model(ckpt, plan, *args):
        model = right_load_model(ckpt, plan, *args)
        if rank() == plan.tensor_parallel_size - 1:
            with torch.no_grad():
                change(model)
        return model

    return Patch("tplab.align.gather.load_model", load_model)


@pytest.mark.parametrize("size", [1e-2, 1e-5, 2e-7])
def test_reassembly_is_bit_for_bit(folder, size):
    def one_number(model):
        model.layers[1].mlp.down_proj.weight[3, 2] += size * model.layers[1].mlp.down_proj.weight[3, 2].sign()

    wrong = reassemble(folder, patches=[loading_with(one_number)], logical=True)
    assert list(wrong) == ["model.layers.1.mlp.down_proj.weight"] and wrong[next(iter(wrong))].startswith("columns ")
    assert wrong[next(iter(wrong))].endswith("differ")


def test_reassembly_names_every_rank_whose_rows_are_wrong(folder):
    def flipped(source, rows):
        return source[rows.start:rows.stop].flip(0)

    wrong = reassemble(folder, tensor_parallel_size=3, logical=True,
                       patches=[Patch("tplab.shard.linear.column_shard", flipped)])
    assert wrong["model.layers.0.mlp.up_proj.weight"] == (
        "rows 0–14 on rank 0 differ; rows 15–28 on rank 1 differ; rows 29–42 on rank 2 differ")


def test_the_shapes_of_a_report_are_those_that_the_ranks_hold(folder):
    """Not the plan's: a rank that holds fewer query heads than it should, and other values in their place, says so."""
    def shifted(model):
        qkv = model.layers[0].self_attn.qkv_proj
        qkv.split_sizes = [qkv.split_sizes[0] - 8, qkv.split_sizes[1], qkv.split_sizes[2] + 8]

    def split_heads(self, qkv):
        q, k, v = qkv.split(list(map(len, self.ranges)), -1)
        return tuple(part.view(len(qkv), -1, self.head_size) for part in (q, k, v))

    patches = [loading_with(shifted), Patch("tplab.shard.linear.QKVParallelLinear.split_heads", split_heads)]
    right, found = (align(folder, [5, 6, 7], logical=True, patches=more).shapes for more in ([], patches))
    assert found[0] == right[0]
    assert [found[1][part][0] - right[1][part][0] for part in "qkv"] == [-8, 0, 8]


def test_nothing_of_a_decode_alignment_stays_on_the_ranks(folder, pool):
    def kept():
        return list(state)

    before = pool.run(kept)
    assert align_decode(folder, [IDS], new_tokens=3, pool=pool).ok
    assert pool.run(kept) == before
    with pytest.raises(Exception, match="no sequence can go on"):
        options = scenario("full_length_after_prefix_hit", 67)
        align_decode(folder, **options, patches=[fault("full_length_after_prefix_hit")], pool=pool)
    assert pool.run(kept) == before


def test_a_rank_that_reads_a_little_more_is_not_said_to_read_everything():
    report = align("fable", IDS, logical=True)
    stats = report.load_stats[0]
    for share, name in ((1.1, None), (1.3, "full_copy_on_every_rank")):
        more = dataclasses.replace(stats, bytes_read=int(stats.bytes_read * share))
        assert diagnose(dataclasses.replace(report, load_stats=[more, *report.load_stats[1:]])).fault == name


def test_the_checkpoint_of_a_report_is_the_one_that_ran(folder):
    ckpt = open_checkpoint(folder)
    assert align(ckpt, IDS, logical=True).checkpoint is ckpt


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["kv_replica_modulo", "kv_first_rows"])
def test_ranks_that_are_right_tell_two_rules_apart_that_give_the_others_the_same_rows(tmp_path, name, dtype):
    """3 KV heads on 4 ranks: by either rule rank 3 has head 0 in place of 2; only one of them moves rank 1's."""
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m", "llama", heads=9, kv_heads=3, hidden=36))
    report = align(ckpt, prompts(67), tensor_parallel_size=4, dtype=dtype, patches=[fault(name)], logical=True)
    assert [one.names for one in report.diagnoses] == [(name,)]

"""The door of ``align`` and its report, word by word: prompts, pools, totals, what is gathered and written."""

import json
from types import SimpleNamespace as Some

import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.reports import config_with

from tplab.align import gather
from tplab.align.gather import whole_point
from tplab.align.points import inputs, layout, point_names
from tplab.align.recording import Shard
from tplab.align.report import AlignReport, Evidence, PointDiff, compare
from tplab.align.run import AlignError, check_prompts
from tplab.checkpoint import open_checkpoint
from tplab.ranks import all_reduce, logical_ranks
from tplab.shard import ShardPlan

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
NAN, INF = float("nan"), float("inf")


# Prompts.

CKPT = Some(name="hand", config=Some(vocab_size=9, max_position_embeddings=4),
            tokenizer=lambda: lambda text: Some(input_ids=list(map(int, text))))


@pytest.mark.parametrize("prompts, rows", [
    ("123", [[1, 2, 3]]), ([1, 2], [[1, 2]]), ((1, 2), [[1, 2]]), (["12", "3"], [[1, 2], [3]]),
    ([[1], (2, 3)], [[1], [2, 3]]), (["1", [8, 0]], [[1], [8, 0]]), ([1, 2, 3, 4], [[1, 2, 3, 4]]),
    ([torch.tensor(3).item()], [[3]])])
def test_prompts_of_every_kind(prompts, rows):
    assert check_prompts(CKPT, prompts) == rows


@pytest.mark.parametrize("prompts, says", [
    ([], "there is no prompt"), ("", "the prompt is empty"), (None, "there is no prompt"),
    (["1", ""], "the prompt is empty; at least one token is needed"), ([[1], []], "the prompt is empty; at least one"),
    (7, "prompts must be a text, token ids, or a list of these, not 7"),
    (["1", 7], r"prompts must be a text, token ids, or a list of these, not \['1', 7\]"),
    ({"1": 2}, "prompts must be a text, token ids, or a list of these, not {'1': 2}"),
    ([1, 9, 10], "token id 9 is not in hand's vocabulary: 0 to 8"), ([0, -1], "token id -1 is not in hand's voc"),
    ([1, 2.5], "token id 2.5 is not in hand's"), ([1, True], "token id True is not in"),
    ([[1], [1, 2, 3, 4, 5]], "the prompt has 5 tokens; hand takes up to 4")])
def test_prompts_that_cannot_be_used(prompts, says):
    with pytest.raises(AlignError, match=says):
        check_prompts(CKPT, prompts)


# Points.

def test_all_points_in_their_order():
    plain = "input_norm q k v q_rope k_rope attn o_partial o_proj residual post_norm mlp_act mlp_partial mlp output"
    normed = plain.replace("v q_rope", "v q_norm k_norm q_rope")
    for qk_norm, gate_up, inner in ((False, False, plain), (True, False, normed), (
            False, True, plain.replace("mlp_act", "gate up mlp_act"))):
        layers = [f"layers.{i}.{point}" for i in (0, 1) for point in inner.split()]
        config = config_with(num_layers=2, qk_norm=qk_norm)
        assert point_names(config, gate_up) == ["embed", *layers, "norm", "logits"]
    every = ("embed", *normed.split(), "gate", "up", "norm", "logits")
    assert {how: {point for point in every if layout(point) == how} for how in (
        "q_heads", "kv_heads", "mlp", "vocab", "partial")} == {
            "q_heads": {"q", "q_norm", "q_rope", "attn"}, "kv_heads": {"k", "k_norm", "k_rope", "v"},
            "mlp": {"gate", "up", "mlp_act"}, "vocab": {"logits"}, "partial": {"o_partial", "mlp_partial"}}


@pytest.mark.parametrize("name, made_from", [
    ("embed", []), ("layers.0.input_norm", ["embed"]), ("layers.1.input_norm", ["layers.0.output"]),
    ("layers.1.q", ["layers.1.input_norm"]), ("layers.1.q_rope", ["layers.1.q"]),
    ("layers.1.attn", ["layers.1.q_rope", "layers.1.k_rope", "layers.1.v"]), ("layers.0.residual", ["embed",
                                                                                                 "layers.0.o_proj"]),
    ("layers.1.output", ["layers.1.residual", "layers.1.mlp"]), ("layers.1.mlp_act", ["layers.1.gate", "layers.1.up"]),
    ("norm", ["layers.2.output"]), ("logits", ["norm"])])
def test_what_a_point_is_made_from(name, made_from):
    assert inputs(name, config_with(num_layers=3)) == made_from


# Gathered points.

def shard(columns, indices, kind="q_heads"):
    return Shard(torch.tensor([columns] * 2, dtype=F32), kind, indices)


@pytest.mark.parametrize("shards, whole, spread, held", [
    ([shard([1, 2], (0, 1)), shard([3], (2,))], [1, 2, 3], 0, [0, 1, 2]),
    ([shard([3], (2,)), shard([1, 2], (0, 1))], [1, 2, 3], 0, [0, 1, 2]),
    ([shard([1, 2], (0, 1)), shard([2.5, 3], (1, 2))], [1, 2, 3], 0.5, [0, 1, 2]),  # the first that has it
    ([shard([1], (0,)), shard([1.25], (0,)), shard([2], (1,)), shard([1.75], (1,))], [1, 2], 0.25, [0, 1]),
    ([shard([1, 2], (0, 2)), None, shard([9], (5,))], [1, 2, 9], 0, [0, 2, 5]),
    ([None, shard([1, 2], (4, 5))], [1, 2], 0, [4, 5]), ([shard([2, 1], (5, 4))], [1, 2], 0, [4, 5]),
    ([shard([NAN], (0,)), shard([NAN], (0,))], [NAN], 0, [0]),
    ([shard([NAN], (0,)), shard([1], (0,))], [NAN], INF, [0]),
    ([shard([INF], (0,)), shard([-INF], (0,))], [INF], INF, [0]),
    ([shard([INF, 1], (0, 1)), shard([INF, 1.5], (0, 1))], [INF, 1], 0.5, [0, 1]),
    ([shard([1, 2], (), "partial"), shard([3, 4], (), "partial")], [4, 6], 0, None),
    ([shard([1, 2], (), "replicated"), shard([1, 2], (), "replicated")], [1, 2], 0, None),
    ([shard([1, 2], (), "replicated"), None, shard([1, 2.5], (), "replicated"), shard([1, 1], (), "replicated")],
     [1, 2], 1, None)])
def test_what_all_ranks_hold_together(shards, whole, spread, held):
    found, far, indices = whole_point("x", shards)
    assert torch.equal(found.nan_to_num(77), torch.tensor([whole] * 2, dtype=F32).nan_to_num(77))
    assert far == spread and indices == held


def test_of_a_ranks_collectives_those_of_the_forward_pass_alone(tmp_path):
    """What the rank did before is none of this run's."""
    ckpt = open_checkpoint(make_checkpoint(tmp_path / "m"))
    plan = ShardPlan.from_config(ckpt.config, 2)

    def busy():
        all_reduce(torch.ones(3))
        return gather.trace_on_rank(ckpt, plan, F32, [[1, 2], [3]])
    ran = logical_ranks(2, busy)
    assert [[record.op for record in one.op_log] for one in ran] == [["all_reduce"] * 5] * 2
    assert [one.shapes for one in ran] == [{"q": (16, 32), "k": (8, 32), "v": (8, 32)}] * 2
    assert ran[0].points["embed"].shape == (3, 32) and ran[1].load_stats.bytes_read > 0


# Differences.

def test_tensors_of_unlike_shapes_are_no_difference():
    with pytest.raises(ValueError, match=r"norm: tplab has \(2, 3\), Hugging Face \(2, 4\)"):
        compare("norm", torch.ones(2, 3), torch.ones(2, 4), 0.0, F32)


def test_the_numbers_of_a_difference():
    ours, right = torch.tensor([[1.0, NAN, 3], [INF, -INF, 8]]), torch.tensor([[1.5, 2, 3], [4, 5, -10]])
    found = compare("layers.0.q", ours, right, 0.25, F32)
    assert (found.max_abs, found.mean_abs, found.relative) == (18, pytest.approx(18.5 / 3), 1.8)
    assert (found.nan, found.inf, found.size, found.shape, found.layout) == (1, 2, 6, (2, 3), "q_heads")
    assert (found.spread, found.inside, found.floor) == (0.25, False, 2e-5)
    none = compare("norm", torch.zeros(1, 2), torch.zeros(1, 2), 0.0, F32)
    assert (none.relative, none.inside, none.nan) == (0, True, 0)
    lost = compare("norm", torch.full((1, 2), NAN), torch.ones(1, 2), 0.0, F32)
    assert lost.max_abs != lost.max_abs and lost.mean_abs != lost.mean_abs and not lost.inside and lost.nan == 2
    off = compare("norm", torch.tensor([[0.5, 0.0]]), torch.zeros(1, 2), 0.0, F32)
    assert off.relative == 0.5 and not off.inside, "where the reference is nothing, the difference itself"
    fine = compare("norm", torch.ones(1, 2, dtype=BF16), torch.ones(1, 2), 0.0, BF16)
    assert fine.max_abs == 0 and fine.floor == 0.4


# A report in words.

def point(name, inside=True, spread=0.0, nan=0, relative=0.0, floor=2e-5):
    return PointDiff(name, "replicated", (1, 2), 0.5, 0.25, relative, nan, 0, 2, spread, inside, floor)


def report(*points, logits=None, right=None, **more):
    evidence = {} if logits is None else {"logits": Evidence(torch.tensor(logits), torch.tensor(right), [])}
    plan = Some(tensor_parallel_size=2, kind="uneven", rows=lambda: [{"rank": 0}])
    return AlignReport(**{"model": "hand", "plan": plan, "dtype": BF16, "ids": [[1]], "points": list(points),
                          "evidence": evidence} | more)


LOGITS = {"logits": [[1.0, 3.0], [5.0, 4.0], [NAN, 9.0], [2.0, 2.5]], "right": [[0.0, 1.0], [0, 1], [0, 1], [0, 1]]}


def test_a_report_in_two_lines():
    healthy = report(point("embed", spread=0.125), point("norm", floor=0.5), point("logits"), **LOGITS)
    assert repr(healthy) == "AlignReport(hand, tp 2, bfloat16: everything inside the floor)"
    assert healthy.summary() == ("hand, tp 2, bfloat16: max |Δ logits| 5.00e-01, top-1 agreement 50.0%, spread across "
                                 "ranks 1.25e-01, NaN 0\ninside the floor 5e-01 relative")
    broken = report(point("embed"), point("norm", False, nan=3), point("logits", False, nan=2), **LOGITS)
    assert repr(broken) == "AlignReport(hand, tp 2, bfloat16: first outside the floor: norm)"
    assert broken.summary().endswith("NaN 5\nfirst outside the floor 2e-05 relative: norm")
    assert not broken.ok and broken.first_divergence.name == "norm" and broken["embed"].name == "embed"


def test_what_is_told_of_a_report(tmp_path):
    told = report(point("embed"), point("norm", False, spread=INF), point("logits", nan=1), patches=("a.b",),
                  shapes=[{"q": (1, 2)}], **LOGITS)
    told.to_json(tmp_path / "r.json")
    data = json.loads((tmp_path / "r.json").read_text())
    assert {key: data[key] for key in ("model", "tp", "dtype", "plan", "ids", "ok", "max_abs_diff", "top1_agreement",
                                       "rank_spread", "nan_count", "first_divergence", "patches", "shapes")} == {
        "model": "hand", "tp": 2, "dtype": "bfloat16", "plan": {"kind": "uneven", "ranks": [{"rank": 0}]}, "ids": [[1]],
        "ok": False, "max_abs_diff": 0.5, "top1_agreement": 0.5, "rank_spread": None, "nan_count": 1,
        "first_divergence": "norm", "patches": ["a.b"], "shapes": [{"q": [1, 2]}]}
    assert [one["name"] for one in data["points"]] == ["embed", "norm", "logits"]
    without = report(point("embed")).to_dict()
    assert without["ok"] and without["max_abs_diff"] is without["top1_agreement"] is without["first_divergence"] is None
    told.save_logits(tmp_path / "l")
    from safetensors.torch import load_file
    found = load_file(tmp_path / "l")
    assert found["hf_logits"].tolist() == LOGITS["right"] and found["tp_logits"][1].tolist() == [5, 4]


def test_a_table_of_all_points_or_of_the_layers_ends():
    names = ["embed", "layers.0.q", "layers.0.output", "norm", "logits"]
    table = report(*map(point, names)).table()
    assert list(table.index) == names and table.loc["norm", "max_abs"] == 0.5
    assert list(report(*map(point, names)).table(False).index) == ["embed", "layers.0.output", "norm", "logits"]


# Shards put together.

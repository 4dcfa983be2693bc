"""The local frame tells guilty points from those that inherit an error, for any selection of points and any layout."""

import dataclasses
import random

import pytest
import torch
from helpers import turns
from helpers.checkpoints import make_checkpoint
from helpers.faults import prompts
from helpers.turns import by_turns
from torch.nn.functional import linear

from tplab.align import align, align_decode, diagnose_all
from tplab.align.check.verdict import CheckReport
from tplab.align.floors import LOCAL
from tplab.align.gather import recorded, trace_on_rank
from tplab.align.guilty import Judge
from tplab.align.judge import judge
from tplab.align.points import layout, point_names
from tplab.align.recording import Shard
from tplab.checkpoint import open_checkpoint
from tplab.faults import fault, scenario
from tplab.patch import Patch, applied
from tplab.ranks import logical_ranks, rank, world_size
from tplab.shard import ShardPlan

PARTIAL = "tplab.shard.linear.RowParallelLinear.partial"
REDUCE = "tplab.shard.linear.RowParallelLinear.reduce"
IDS = prompts(67)


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return open_checkpoint(make_checkpoint(
        tmp_path_factory.mktemp("judge") / "m", "llama", layers=3, heads=6, kv_heads=3, hidden=48, rope="llama3",
        attention_bias=True, mlp_bias=True))


def run(ckpt, tp=2, dtype=torch.float32, patches=()):
    """The lab's own engine as a Recording, and its plan."""
    plan = ShardPlan.from_config(ckpt.config, tp)
    with applied(*patches):
        traces = [found[0] for found in logical_ranks(tp, trace_on_rank, ckpt, plan, dtype, IDS)]
    places = [(number, position) for number, row in enumerate(IDS) for position in range(len(row))]
    return recorded(traces, plan, dtype, IDS, places, [len(IDS[number]) for number, _ in places], places), plan


def judged(recording, ckpt, plan):
    return Judge(recording, ckpt, plan).diffs()


def guilty(recording, ckpt, plan):
    return [name for name, diff in judged(recording, ckpt, plan).items() if not diff.inside]


def keep(recording, names):
    return dataclasses.replace(recording, points={name: recording.points[name] for name in names})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_nothing_of_a_healthy_engine_is_guilty_and_little_is_rounding(ckpt, dtype, tp):
    recording, plan = run(ckpt, tp, dtype)
    diffs = judged(recording, ckpt, plan)
    assert set(diffs) == set(recording.points) and all(diff.inside and not diff.unknown for diff in diffs.values())
    assert max(diff.relative for diff in diffs.values()) < {torch.float32: 2e-6, torch.float64: 2e-7,
                                                            torch.bfloat16: 5 * LOCAL[dtype]}[dtype]


@pytest.mark.parametrize("bug, dtype", by_turns([
    ("rope_pairs", ("q_rope", "k_rope")), ("no_mask", ("attn",)), ("all_reduce_missing", ("o_proj", "mlp")),
    ("qkv_order", ("k", "v"))], [torch.float32, torch.bfloat16], least=4))
def test_the_guilty_are_those_in_which_the_bug_is_and_no_others(ckpt, bug, dtype):
    name, points = bug
    report = align(ckpt, IDS, dtype=dtype, patches=[fault(name)], logical=True)
    found = {point.rpartition(".")[2] for point in report.guilty}
    assert found == set(points) and len(report.guilty) == 3 * len(points)
    assert not report["logits"].inside, "it only inherits"
    (one,) = diagnose_all(report)
    assert name in one.names and one.where == f"layers 0–2: {', '.join(points)}"


@pytest.mark.parametrize("seed", [0, 1, 4])
def test_any_selection_of_points_is_judged(ckpt, seed):
    chosen = random.Random(seed)
    names = point_names(ckpt.config)
    some = sorted(chosen.sample(names, chosen.choice([1, 3, 10, 30])), key=names.index)
    for dtype in (torch.float32, torch.bfloat16):
        recording, plan = run(ckpt, 2, dtype)
        assert guilty(keep(recording, some), ckpt, plan) == [], "healthy"
    recording, plan = run(ckpt, 2, patches=[fault("vocab_offset")])
    found = judged(keep(recording, some), ckpt, plan)
    assert [n for n, diff in found.items() if diff.guilty and not diff.perhaps_from] == some[:1], "the first one seen"
    report = judge(keep(recording, some), ckpt, plan, by_local=True, kind=CheckReport)
    assert report.verdict == "bug" and len(report.points) == len(some)


def test_in_float16_half_a_percent_is_no_rounding(ckpt):
    recording, plan = run(ckpt, 2, torch.float16)
    assert guilty(recording, ckpt, plan) == []
    name = "layers.1.post_norm"
    off = [Shard(held.tensor * 1.005, held.kind) for held in recording.points[name]]
    wrong = dataclasses.replace(recording, points=recording.points | {name: off})
    assert guilty(wrong, ckpt, plan)[:1] == [name]


def test_a_point_that_was_not_recorded_leaves_its_guilt_to_the_next(ckpt):
    recording, plan = run(ckpt, 2, patches=[fault("rope_missing")])
    kept = ("embed", "q", "k", "v", "attn", "output", "logits")
    modules = [name for name in recording.points if name.rpartition(".")[2] in kept]
    assert guilty(keep(recording, modules), ckpt, plan) == [f"layers.{i}.attn" for i in range(3)]


def shares(how):
    """The ranks that add a row-parallel layer's bias: all choices but the last two are right."""
    def partial(self, x):
        share = {"rank 0": rank() == 0, "rank 1": rank() == 1, "a part each": 1 / world_size(), "nobody": 0,
                 "every rank": 1}[how]
        found = linear(x, self.weight)
        return found + share * self.bias if share else found
    return [Patch(PARTIAL, partial)]


@pytest.mark.parametrize("how, points", [
    ("rank 0", set()), ("rank 1", set()), ("a part each", set()), ("nobody", {"o_partial", "mlp_partial"}),
    ("every rank", {"o_partial", "mlp_partial"})])
def test_the_bias_belongs_to_the_sum_whoever_adds_it(ckpt, how, points):
    recording, plan = run(ckpt, 2, patches=shares(how))
    assert {name.rpartition(".")[2] for name in guilty(recording, ckpt, plan)} == points


def test_heads_in_another_order_are_where_their_indices_say(ckpt):
    recording, plan = run(ckpt, 1)
    order = [5, 3, 1, 0, 2, 4]
    points = {name: [Shard(held[0].tensor[:, order], "q_heads", tuple(order))] if layout(name) == "q_heads" else held
              for name, held in recording.points.items()}
    assert guilty(dataclasses.replace(recording, points=points), ckpt, plan) == []
    points["layers.1.q"] = recording.points["layers.1.q"]
    points["layers.1.q"] = [dataclasses.replace(points["layers.1.q"][0], indices=tuple(order))]
    assert guilty(dataclasses.replace(recording, points=points), ckpt, plan)[:1] == ["layers.1.q"]


def test_a_rank_is_judged_by_its_own_values_where_others_hold_the_same_heads(ckpt):
    """All heads on both ranks, keys and values in another order; rank 1's values are doubled, and so its attention."""
    recording, plan = run(ckpt, 2)
    alone, order, points = run(ckpt, 1)[0], (2, 0, 1), dict(recording.points)
    for name in points:
        (whole,) = alone.points[name]
        if layout(name) == "q_heads":
            points[name] = [Shard(whole.tensor, whole.kind, tuple(range(6)))] * 2
        elif layout(name) == "kv_heads":
            points[name] = [Shard(whole.tensor[:, list(order)], whole.kind, order)] * 2
    for name in ("layers.1.v", "layers.1.attn"):
        points[name] = [points[name][0], dataclasses.replace(points[name][1], tensor=2 * points[name][1].tensor)]
    found = judged(dataclasses.replace(recording, points=points), ckpt, plan)
    assert found["layers.1.v"].guilty == (1,) and found["layers.1.attn"].inside


def test_a_rank_that_is_missing_is_filled_in(ckpt):
    recording, plan = run(ckpt, 3)
    points = {name: [held[0], None, held[2]] for name, held in recording.points.items()}
    found = judged(dataclasses.replace(recording, points=points), ckpt, plan)
    assert all(diff.inside for diff in found.values())


@pytest.mark.parametrize("pair, dtype", by_turns([
    ("rope_pairs", "all_reduce_missing"), ("kv_first_rows", "no_mask"), ("shard_dim1", "head_random"),
    ("vocab_offset", "row_bias_everywhere")], ["float32", "bfloat16"], least=4))
def test_two_bugs_are_both_named(ckpt, pair, dtype):
    report = align(ckpt, IDS, dtype=dtype, patches=[fault(name) for name in pair], logical=True)
    named = [one for one in diagnose_all(report) if one.fault]
    assert [next(name for name in pair if name in one.names) for one in named] == sorted(
        pair, key=lambda name: [name in one.names for one in named].index(True))


@pytest.mark.parametrize("name", ["decode_position_off_by_one", "slot_off_by_one", "prefix_hash_without_parent",
                                  "stale_block_table", "row_order"][:: 2 - turns.ALL])
def test_in_bfloat16_along_the_decode_path(ckpt, name):
    report = align_decode(ckpt, **scenario(name, 67), dtype="bfloat16", patches=[fault(name)], logical=True)
    assert [one.fault for one in diagnose_all(report)] == [name]
    assert align_decode(ckpt, **scenario(name, 67), dtype="bfloat16", logical=True).ok

"""The judge's numbers and rules at their very edges, on tensors made by hand: no model runs."""

from contextlib import nullcontext
from types import SimpleNamespace as Some

import pytest
import torch
from helpers.reports import config_with

from tplab.align import judge as judging
from tplab.align import local
from tplab.align.arithmetic import distance
from tplab.align.check.verdict import GROWN, CheckReport
from tplab.align.diagnose import Diagnosis
from tplab.align.floors import DECODE, LOCAL, LOGITS, LOGITS_RELATIVE, RELATIVE, SHORT, TIMES, bound
from tplab.align.guilty import CLEAR, Judge, LocalDiff, local_diffs
from tplab.align.local import LocalFrame, Weights
from tplab.align.points import inputs
from tplab.align.recording import Shard
from tplab.align.report import PointDiff, compare

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
INF = float("inf")


def test_the_published_floors():
    """As the table in the floors' own words has them."""
    assert RELATIVE == {F32: 2e-5, F64: 2e-7, BF16: 4e-1, F16: 1e-1}
    assert DECODE == {F32: 2e-5, F64: 1e-5, BF16: 4e-1, F16: 1e-1}
    assert LOGITS == {F32: 1e-4, F64: 1e-7, BF16: INF, F16: INF}
    assert LOGITS_RELATIVE == {F32: 5e-6, F64: 0, BF16: 0, F16: 0}
    assert LOCAL == {F32: 2e-5, F64: 1e-6, BF16: 8e-3, F16: 1e-3}
    assert (TIMES, SHORT, CLEAR, GROWN) == (4, (BF16, F16), 0.25, 10)


@pytest.mark.parametrize("name, scale, dtype, decode, limit", [
    ("layers.0.q", 3.0, F32, False, 6e-5), ("layers.0.q", 3.0, F64, False, 6e-7), ("layers.0.q", 3.0, F64, True, 3e-5),
    ("logits", 1.0, F32, False, 2e-5),  # small logits: the relative floor
    ("logits", 10.0, F32, False, 1e-4),  # the absolute one
    ("logits", 40.0, F32, False, 2e-4),  # 5e-6 of the largest
    ("logits", 10.0, F32, True, 2e-4), ("logits", 10.0, F64, False, 1e-7), ("logits", 10.0, BF16, False, 4.0)])
def test_the_largest_difference_that_rounding_explains(name, scale, dtype, decode, limit):
    assert bound(name, scale, dtype, decode) == pytest.approx(limit, rel=1e-12)


@pytest.mark.parametrize("off, spread, measured, good", [
    (1.9e-5, 0, INF, True), (2.1e-5, 0, INF, False), (0, 1.9e-5, INF, True), (0, 2.1e-5, INF, False),
    (1.9e-5, 0, 0, True),  # never less than what one module may have
    (float("nan"), 0, INF, False), (INF, 0, INF, False)])
def test_a_point_is_inside_by_difference_spread_and_being_finite(off, spread, measured, good):
    right = torch.ones(2, 3, dtype=F64)
    ours = right.clone()
    ours[1, 2] += off
    assert compare("layers.0.q", ours, right, spread, F32, measured=measured).inside is good


@pytest.mark.parametrize("measured, off, good", [(0.01, 0.039, True), (0.01, 0.041, False), (0.5, 0.39, True),
                                                 (0.5, 0.41, False), (0, 0.0079, True), (0, 0.0081, False)])
def test_in_bfloat16_the_floor_is_four_times_what_was_measured(measured, off, good):
    for scale in (1.0, 20.0, 0.01):  # of the reference: all is relative to it
        right = torch.full((2, 3), scale, dtype=F64)
        assert compare("layers.0.q", right + off * scale, right, 0.0, BF16, measured=measured).inside is good


# The judge of one point.

class HandJudge(Judge):
    """What each precision's frame expects is given: ``{dtype: [tensor of each rank]}``; ``asked`` says what was."""

    def __init__(self, dtype, points, expected):
        super().__init__(Some(dtype=dtype, points=points), Some(config=config_with(num_layers=5)), None)
        self.given, self.asked = expected, []

    def frame_in(self, dtype):
        def expected(name, rank):
            self.asked.append(dtype)
            return self.given[dtype][rank]
        return Some(expected=expected)


def row(*values, dtype=F64):
    return torch.tensor([values], dtype=dtype)


def held(*tensors):
    return {"layers.1.q": [None if t is None else Shard(t, "q_heads") for t in tensors]}


@pytest.mark.parametrize("dtype, exact", [(F32, F64), (F64, F64), (BF16, F32), (F16, F32)])
def test_short_dtypes_are_judged_in_float32_the_others_in_float64(dtype, exact):
    assert HandJudge(dtype, {}, {}).exact is exact


@pytest.mark.parametrize("name, layer", [("embed", 0), ("layers.0.q", 0), ("layers.3.output", 3), ("norm", 5),
                                         ("logits", 5)])
def test_the_layer_to_which_a_point_belongs(name, layer):
    judge = HandJudge(F32, {}, {})
    judge.enter(name)
    assert judge.layer == layer


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
def test_rounding_is_measured_beyond_what_is_always_allowed_and_allowed_four_times(dtype):
    least, exact = LOCAL[dtype], F32 if dtype in SHORT else F64
    judge = HandJudge(dtype, {}, {exact: [row(1, 0.5)], dtype: [row(1, 0.5)]} if exact is dtype else
                      {exact: [row(1, 0.5)], dtype: [row(1 + least, 0.5)]})
    assert judge.tolerance("layers.1.q", 0, least) == least and not judge.asked
    assert judge.tolerance("layers.1.q", 0) == pytest.approx(least if exact is dtype else 4 * least)
    judge.given[dtype] = [row(1 + least / 5, 0.5)]
    assert judge.tolerance("layers.1.q", 0) == least


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16])
@pytest.mark.parametrize("times, clean", [(0.99, True), (1.01, False)])
def test_a_difference_just_inside_and_just_outside(dtype, times, clean):
    right = row(1, 0.5)
    judge = HandJudge(dtype, held(row(1, 0.5 + times * LOCAL[dtype])), dict.fromkeys((F32, F64, BF16, F16), [right]))
    found = judge.diff("layers.1.q")
    assert found.inside is clean and found.guilty == (() if clean else (0,)) and found.tolerance == LOCAL[dtype]
    assert found.relative == pytest.approx(times * LOCAL[dtype]) and not found.unknown


def test_what_is_as_far_as_allowed_is_inside():
    judge = HandJudge(F64, held(row(1, 0.5)), {F64: [row(1, 0.5)]})
    judge._off = lambda *_: (LOCAL[F64], True)
    assert judge.diff("layers.1.q").inside


@pytest.mark.parametrize("off, asked", [(0.24, [F32]), (0.26, [F32, F64])])
def test_float64_is_asked_where_float32_leaves_a_doubt(off, asked):
    judge = HandJudge(F32, held(row(1, 0.5 + off * 2e-5)), {F32: [row(1, 0.5)], F64: [row(1, 0.5)]})
    judge.diff("layers.1.q")
    assert judge.asked == asked


def test_in_bfloat16_float32_alone_says_what_is_right():
    judge = HandJudge(BF16, held(row(1, 0.5)), {F32: [row(1, 0.5)], BF16: [row(9, 9)]})
    assert judge.diff("layers.1.q").relative == 0 and judge.asked == [F32]


def test_the_worst_rank_is_the_farthest_beyond_its_own_tolerance():
    right, rounded = [row(1, 0.5)] * 4, [row(1, 0.5), row(1.1, 0.5), row(1, 0.5), row(1, 0.5)]
    judge = HandJudge(BF16, held(row(1, 0.51), row(1, 0.7), None, row(1, 0.52)), {F32: right, BF16: rounded})
    found = judge.diff("layers.1.q")
    assert found.rank == 3 and found.guilty == (0, 3) and found.relative == pytest.approx(0.02)
    assert found.tolerance == LOCAL[BF16]


def test_nan_is_guilty_unless_nothing_but_nan_came_in():
    nan = float("nan")
    lost = HandJudge(F64, held(row(1, nan)), {F64: [row(1, 0.5)]}).diff("layers.1.q")
    assert lost.guilty == (0,) and lost.relative == INF and not lost.unknown
    came = HandJudge(F64, held(row(nan, nan)), {F64: [row(nan, nan)]}).diff("layers.1.q")
    assert came.inside and came.unknown
    for two in ([row(nan, nan), row(1, 1)], [row(1, 1), row(nan, nan)]):
        one = HandJudge(F64, held(*two), {F64: two}).diff("layers.1.q")
        assert one.inside and not one.unknown, "one rank had something to compare with"
    part = HandJudge(F64, held(row(nan, 1)), {F64: [row(nan, 1)]}).diff("layers.1.q")
    assert part.inside and not part.unknown


# The origin of an error.

def found_where(monkeypatch, recorded, wrong, qk_norm=False):
    """``perhaps_from`` of every guilty point, where these points of one layer were recorded and these are wrong."""
    monkeypatch.setattr(Judge, "_measured", lambda self, name: LocalDiff(name, 1.0, 0, 0.1, (0,) * (name in wrong)))
    names = {name if name in ("embed", "norm", "logits") else f"layers.{name}": name for name in recorded}
    wrong = {full for full, name in names.items() if name in wrong}
    recording = Some(dtype=F32, points={name: [None, "held"] for name in names} | {"layers.0.up": [None, None]})
    ckpt = Some(config=config_with(num_layers=2, qk_norm=qk_norm))
    found = local_diffs(recording, ckpt, None)
    assert set(found) == set(names)
    return {name: diff.perhaps_from for name, diff in found.items() if diff.guilty}


@pytest.mark.parametrize("recorded, wrong, origins", [
    ("embed 0.q 0.k", "0.q 0.k", {"0.q": "", "0.k": "layers.0.q"}),  # both made from an unrecorded input_norm
    ("embed 0.input_norm 0.q 0.k", "0.q 0.k", {"0.q": "", "0.k": ""}),
    ("embed 0.q 0.k 0.v", "0.k 0.v", {"0.k": "", "0.v": "layers.0.k"}),  # a right point is no origin
    ("embed 0.q 0.k 0.v", "0.q 0.k 0.v", {"0.q": "", "0.k": "layers.0.q", "0.v": "layers.0.q"}),
    ("0.residual 0.output 1.residual", "0.output 1.residual", {"0.output": "", "1.residual": ""}),
    ("0.q 1.q", "0.q 1.q", {"0.q": "", "1.q": "layers.0.q"}),  # the embedding may be wrong, or what is between
    ("norm logits", "norm logits", {"norm": "", "logits": ""})])
def test_a_guilty_point_may_have_its_error_from_what_nobody_saw(monkeypatch, recorded, wrong, origins):
    def full(name):
        return f"layers.{name}" if name[0].isdigit() else name
    wrong = {full(name) for name in wrong.split()}
    assert found_where(monkeypatch, recorded.split(), wrong | {w.removeprefix("layers.") for w in wrong}) == {
        full(name): origin for name, origin in origins.items()}


# The report's verdict.

def point(name="layers.0.q", relative=0.0, nan=0, inf=0, inside=True, floor=2e-5):
    return PointDiff(name, "q_heads", (1, 2), relative, relative, relative, nan, inf, 2, 0.0, inside, floor)


def report(points=None, local=None, dtype=F32, **more):
    recording = Some(contradictions=more.pop("contradictions", []), points={}, places=[(0, 0)], world_size=2,
                     notes=[], unplaced=[], assumed={}, lost=set(), unjudged=[], warnings=[])
    found = CheckReport("m", None, dtype, [[1]], [point()] if points is None else points, {}, recording=recording,
                        **more)
    found.ordinary, found.other_checkpoint, found.quantised, found.misplaced = {}, False, False, False
    found.local = local if local is not None else {p.name: LocalDiff(p.name, 0.0, 0, 2e-5, ()) for p in found.points}
    return found


GUILTY = {"layers.0.q": LocalDiff("layers.0.q", 1.0, 1, 2e-5, (1,))}
UNKNOWN = LocalDiff("layers.0.q", 0.0, 0, 2e-5, (), True)


@pytest.mark.parametrize("given, verdict, questions", [
    ({}, "clean", 0), ({"local": GUILTY}, "bug", 0), ({"contradictions": ["x"]}, "bug", 0),
    ({"parameters": {"w": "differs"}}, "bug", 0), ({"stopped": ("call 1",)}, "bug", 0),
    ({"broken_off": ("rank 1",)}, "cannot tell", 1), ({"broken_off": ("rank 1",), "local": GUILTY}, "bug", 1),
    ({"points": []}, "cannot tell", 1), ({"local": {"layers.0.q": UNKNOWN}}, "cannot tell", 1),
    ({"local": {"layers.0.q": UNKNOWN, "layers.0.k": LocalDiff("layers.0.k", 0.0, 0, 2e-5, ())}}, "clean", 0),
    ({"points": [point(relative=1.99e-4)]}, "clean", 0), ({"points": [point(relative=2.01e-4)]}, "cannot tell", 1),
    ({"points": [point(relative=float("nan"))]}, "cannot tell", 1),
    ({"points": [point(relative=9.0)], "dtype": BF16}, "clean", 0),
    ({"points": [point(relative=9.0)], "local": GUILTY}, "bug", 0)])
def test_every_verdict(given, verdict, questions):
    found = report(**given)
    assert (found.verdict, len(found.open_questions)) == (verdict, questions), found.open_questions
    assert found.ok is (verdict == "clean")


@pytest.mark.parametrize("given, local, inherits, says", [
    ({}, (), False, ""), ({"relative": 2e-5}, (), False, ""), ({"relative": 2.1e-5}, (), True, "inherits"),
    ({"relative": float("nan")}, (), True, "inherits"), ({"nan": 1}, (), True, "inherits"),
    ({"inf": 1}, (), True, "inherits"), ({"relative": 1.0}, (1,), False, "guilty (rank 1)"),
    ({"relative": 1.0}, (0, 1), False, "guilty")])
def test_who_inherits_and_what_is_said(given, local, inherits, says):
    found = report([point(**given)], {"layers.0.q": LocalDiff("layers.0.q", 0.0, 0, 2e-5, local)})
    found.recording.points = {"layers.0.q": ["held", "held", None]}
    assert found.inherits("layers.0.q") is inherits and found.says("layers.0.q") == says


@pytest.mark.parametrize("mine, before, outside, kept", [
    (True, True, False, True), (True, False, False, False), (True, True, True, True), (True, False, True, True),
    (False, True, True, False)])
def test_a_point_is_inside_unless_guilty_or_off_behind_a_guilty_one(mine, before, outside, kept):
    local = LocalDiff("layers.0.q", 0.0, 0, 1.0, () if mine else (0,))
    assert judging._by_local(point(inside=outside), local, not before).inside is kept


@pytest.mark.parametrize("ours, added", [(1.0, 2.0), (3.0, 0.0), (2.0, 0.0)])
def test_a_bias_is_added_to_the_summands_where_that_is_nearer(monkeypatch, ours, added):
    monkeypatch.setattr(judging, "Weights", lambda *_: {"model.layers.0.self_attn.o_proj.bias": torch.tensor([2.0])})
    found = judging._with_bias("layers.0.o_partial", torch.tensor([[ours], [float("nan")]]), torch.full((2, 1), 3.0),
                               None)
    assert found[0].item() == ours + added
    assert judging._with_bias("layers.0.mlp_partial", torch.ones(1, 1), torch.full((1, 1), 3.0), None).item() == 1


def test_how_far_one_tensor_is_from_another():
    assert judging._relative(torch.tensor([1.0, -3.0]), torch.tensor([1.0, -2.0])) == 0.5
    assert judging._relative(torch.zeros(2), torch.zeros(2)) == 0


# Where a point stands.

def frame(points, plan=((0, 1), (2,))):
    found = object.__new__(LocalFrame)
    found.recording, found.dtype, found.ranks = Some(points=points, holders={}), F64, range(len(plan))
    found.plan = Some(ranks=[Some(q_heads=share, mlp=share, vocab=share) for share in plan])
    found._values, found._fixed, found._made_of, found._asked = {}, {}, {}, set()
    found.expected = lambda name, rank: torch.full((1, len(plan[rank]), 1), 10.0 + rank, dtype=F64)
    return found


def test_indices_are_the_points_own_then_those_of_one_dealt_out_alike_then_the_plans():
    own, other = Shard(row(1), "q_heads", (2,)), Shard(row(1), "q_heads", (0,))
    found = frame({"layers.0.q": [own, None], "layers.0.q_rope": [other, other], "layers.0.up": [Shard(
        row(1), "replicated", (7,)), None]})
    assert found.indices("layers.0.q", 0) == (2,) and found.indices("layers.0.q", 1) == (0,)
    assert found.indices("layers.0.attn", 0) == (0,) and found.indices("layers.1.attn", 0) == (0, 1)
    assert found.indices("layers.0.up", 0) == (0, 1), "the kind is another"
    assert frame({"logits": [Shard(row(1), "vocab", (5,)), None]}).indices("logits", 0) == (5,)


def test_values_of_replicated_points_come_from_who_holds_them():
    a, b = (Shard(row(value), "replicated") for value in (1.0, 2.0))
    found = frame({"layers.0.mlp": [None, a]})
    assert found.value("layers.0.mlp", 0) is found.value("layers.0.mlp", 1)
    same, apart = frame({"layers.0.mlp": [a, Shard(row(1.0), "replicated")]}), frame({"layers.0.mlp": [a, b]})
    assert same.value("layers.0.mlp", 1) is same.value("layers.0.mlp", 0)
    assert apart.value("layers.0.mlp", 1).item() == 2 and frame({}).value("layers.0.mlp", 1).flatten()[0] == 11


def test_parts_come_from_the_rank_itself_then_from_another_and_are_nan_where_nobody_has_them():
    def at(*values):
        return torch.tensor(values, dtype=F64)[None, :, None]
    found = frame({"layers.0.q": [Shard(at(1, 2), "q_heads", (0, 1)), Shard(at(5, 6), "q_heads", (1, 2))]})
    assert found.parts_of("layers.0.q", 0, (0, 1, 2)).flatten().tolist() == [1, 2, 6]
    assert found.parts_of("layers.0.q", 1, (0, 1)).flatten().tolist() == [1, 5]
    assert found.parts_of("layers.0.q", 1, (1, 0, 9)).flatten().isnan().tolist() == [False, False, True]


@pytest.mark.parametrize("ours, right, far", [
    ([[1.0, -4.0], [0.0, 2.0]], [[1.0, -5.0], [0.0, 2.0]], 0.2),
    ([[1.0, -5.0], [0.0, 1.0]], [[1.0, -5.0], [0.0, 2.0]], 0.5),
    ([[1e3, 0], [0.01, 0.002]], [[1e3, 0], [0.01, 0.0]], 0.02),  # a tiny row: a ten-thousandth of the largest counts
    ([[0.0, 0.0]], [[0.0, 0.0]], 0.0), ([[2.0, 7.0]], [[2.0, INF]], 0.0), ([[2.0, INF]], [[2.0, 7.0]], INF),
    ([[float("nan"), 1.0]], [[4.0, 1.0]], INF), ([[1.0, 7.0], [1e-3, 5.0]], [[1e2, INF], [0.0, 5.0]], 0.99)])
def test_how_far_rows_are_off(ours, right, far):
    assert distance(torch.tensor(ours, dtype=F64), torch.tensor(right, dtype=F64)) == pytest.approx(far)
    assert distance(torch.empty(0, 2), torch.empty(0, 2)) == 0


def test_weights_have_the_runs_digits_in_the_judges_dtype(monkeypatch):
    """A checkpoint in float32 that an engine runs in bfloat16."""
    weights, reads = object.__new__(Weights), []
    third = torch.tensor([1 / 3])
    vars(weights).update(ckpt=Some(reader=nullcontext), run_dtype=BF16, dtype=F32, parts={"w": None}, kept={},
                         reader=Some(close=lambda: None))
    monkeypatch.setattr(local, "read_part", lambda part, reader: reads.append(part) or third)
    assert weights["w"].dtype is F32 and weights["w"] == third.to(BF16).float() != third
    assert weights.raw("w").dtype is BF16
    assert len(reads) == 2 and "w" in weights and "v" not in weights, "what was asked for is kept"
    weights.drop()
    assert weights["w"] == third.to(BF16) and len(reads) == 3


@pytest.mark.parametrize("name, plain, normed", [
    ("embed", [], []), ("layers.0.input_norm", ["embed"], ["embed"]),
    ("layers.2.input_norm", ["layers.1.output"], ["layers.1.output"]), ("norm", ["layers.3.output"],
                                                                         ["layers.3.output"]),
    ("layers.1.q_rope", ["layers.1.q"], ["layers.1.q_norm"]), ("layers.1.k_rope", ["layers.1.k"], ["layers.1.k_norm"]),
    ("layers.1.q_norm", [], ["layers.1.q"]),
    ("layers.1.attn", *[["layers.1.q_rope", "layers.1.k_rope", "layers.1.v"]] * 2),
    ("layers.0.residual", *[["embed", "layers.0.o_proj"]] * 2),
    ("logits", ["norm"], ["norm"]), ("layers.3.output", *[["layers.3.residual", "layers.3.mlp"]] * 2)])
def test_from_which_points_a_point_is_made(name, plain, normed):
    assert inputs(name, config_with(num_layers=4, qk_norm=True)) == normed
    assert inputs(name, config_with(num_layers=4)) == plain or name.endswith("q_norm")


def test_a_finding_is_told_in_five_lines_and_whole_if_asked_for():
    long = "It is off. " * 60
    found = report(local=GUILTY)
    found.diagnoses = [Diagnosis(None, long.strip(), "layers.0.q")]
    said = [line for line in found.summary().splitlines() if line.startswith("1. ")][0]
    assert len(said) <= 482 and said.endswith("It is off. …") and long.strip() in found.summary(verbose=True)

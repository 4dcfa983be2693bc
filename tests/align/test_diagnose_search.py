"""The diagnosis's own rules by hand: what is one bug, what is said of an unknown one, how a guess is measured."""

from importlib import import_module
from types import SimpleNamespace as Some

import pytest
import torch
from helpers.real_cases import noise

from tplab.align.diagnose import altered, steps
from tplab.align.diagnose.case import Diagnosis, calls_of_rows
from tplab.align.guilty import LocalDiff
from tplab.align.recording import Contradiction
from tplab.align.report import PointDiff

diagnosing = import_module("tplab.align.diagnose.diagnose")  # the package exports a function of this name
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

# What is one bug.


def all_of(monkeypatch, found, perhaps=(), contradictions=(), what=lambda one: (one.fault, one.lookalikes, one.points)):
    """``found``: {guilty point: (fault, *lookalikes), or None where nothing fits}."""
    monkeypatch.setattr(diagnosing, "Judge", lambda *_: None)
    monkeypatch.setattr(diagnosing, "Case", lambda report, name, judge: name)
    monkeypatch.setattr(diagnosing, "_unknown", lambda name: Diagnosis(None, f"unknown {name}", name))
    monkeypatch.setattr(diagnosing, "_explained", lambda name, explained: [] if found[name] is None else [Diagnosis(
        found[name][0], f"found {name}", name, lookalikes=tuple(found[name][1:]))])
    recording = Some(contradictions=list(map(Contradiction, contradictions)))
    report = Some(guilty=list(found), recording=recording, checkpoint=None, plan=None,
                  local={name: Some(perhaps_from="x" if name in perhaps else "") for name in found})
    return list(map(what, diagnosing.diagnose_all(report)))


Q0, Q1, K0, ATTN1 = "layers.0.q", "layers.1.q", "layers.0.k", "layers.1.attn"


@pytest.mark.parametrize("found, bugs", [
    ({Q0: ("a",), Q1: ("a",)}, [("a", (), (Q0, Q1))]),
    ({Q0: ("a",), K0: ("b",)}, [("a", (), (Q0,)), ("b", (), (K0,))]),
    ({Q0: ("a", "b"), Q1: ("b",)}, [("b", (), (Q0, Q1))]),  # what both have in common: the sharper one
    ({Q0: ("a", "b"), Q1: ("b", "a")}, [("a", ("b",), (Q0, Q1))]),
    ({Q0: ("a", "b", "c"), Q1: ("b", "c")}, [("b", ("c",), (Q0, Q1))]),
    ({Q0: ("a",), Q1: ("b", "a")}, [("a", (), (Q0, Q1))]),
    ({Q0: ("a",), K0: ("b",), Q1: ("b",)}, [("a", (), (Q0,)), ("b", (), (K0, Q1))]),
    ({Q0: None, Q1: None}, [(None, (), (Q0, Q1))]),  # the same point of each layer
    ({Q0: None, K0: None}, [(None, (), (Q0,)), (None, (), (K0,))]),
    ({Q0: None, Q1: ("a",)}, [(None, (), (Q0,)), ("a", (), (Q1,))]),
    ({Q0: ("a",), ATTN1: ("row_order", "x")}, [("row_order", ("x",), (Q0, ATTN1))])])  # nothing else can be said then
def test_what_is_one_bug(monkeypatch, found, bugs):
    assert all_of(monkeypatch, found) == bugs


@pytest.mark.parametrize("found, sentence", [
    ({Q0: ("a",), Q1: ("a",)}, f"found {Q0}"), ({Q0: ("a", "b"), Q1: ("b",)}, f"found {Q1}"),
    ({Q0: ("a", "b"), Q1: ("b", "a")}, f"found {Q0}"), ({Q0: None, Q1: None}, f"unknown {Q0}")])
def test_a_bug_is_told_as_it_was_first_seen_or_as_the_sharper_one(monkeypatch, found, sentence):
    assert all_of(monkeypatch, found, what=lambda one: one.sentence) == [sentence]


def test_what_may_come_from_somewhere_else_is_no_bug_without_a_name(monkeypatch):
    assert all_of(monkeypatch, {Q0: ("a",), K0: None, Q1: ("b",)}, perhaps=[K0, Q1]) == [
        ("a", (), (Q0,)), ("b", (), (Q1,))]


def test_with_other_ids_on_the_ranks_the_embedding_cannot_be_right(monkeypatch):
    ids = (None, (), ())
    assert all_of(monkeypatch, {"embed": None}, contradictions=["x"]) == [ids]
    assert all_of(monkeypatch, {"embed": None}) == [(None, (), ("embed",))]
    assert all_of(monkeypatch, {"embed": ("a",), Q0: None}, contradictions=["x"]) == [
        ids, ("a", (), ("embed",)), (None, (), (Q0,))]


def test_contradictions_are_sentences_and_come_first():
    report = Some(recording=Some(contradictions=list(map(Contradiction, ("rank 1 holds nothing", "too")))), guilty=[])
    assert [str(one) for one in diagnosing.diagnose_all(report)] == ["Rank 1 holds nothing.", "Too."]
    assert str(diagnosing.diagnose(report)) == "Rank 1 holds nothing."


def test_the_first_that_fits_is_the_name_and_the_others_look_alike(monkeypatch):
    asked = []

    def entry(name, fault, *more):
        def ask(case):
            asked.append((name, case.op))
            return Diagnosis(fault, name, lookalikes=more) if case.op in name else None
        return ask
    first = [entry("one of q", "a", "b"), entry("two of k", "c"), entry("three of q", "b", "d")]
    monkeypatch.setattr(diagnosing, "asked_about", lambda subject, last: [entry("last of v q", "z")] if last
                        else first)
    monkeypatch.setattr(diagnosing, "compound", lambda case: case)

    def explained(*ops):
        asked.clear()
        found = diagnosing._explain(type("Ops", (tuple,), {"on": (), "with_": lambda self, ops: Some(
            op=ops[0])})((op,) for op in ops))
        return found and found.names
    assert explained("q") == ("a", "b", "d") and all(name[0] != "l" for name, _ in asked)
    assert explained("v") == ("z",) and explained("up") is None
    assert explained("q", "k") == ("a", "b", "d", "c"), "op by op, each asked everything"


def test_what_explained_a_point_in_an_earlier_layer_is_asked_first_and_alone(monkeypatch):
    asked = []

    def entry(name, fits):
        def ask(case):
            asked.append(name)
            return Diagnosis(name, name) if case.layer in fits else None
        ask.subjects = ("q",)
        return ask
    every = [entry("a", (0, 1)), entry("b", (0, 2)), entry("c", (3,))]
    monkeypatch.setattr(diagnosing, "asked_about", lambda subject, last: [] if last else every)
    monkeypatch.setattr(diagnosing, "compound", lambda case: [("q",)])
    explained, found = [], []
    for layer in range(4):
        asked.clear()
        one = diagnosing._explain(Some(on=(), with_=lambda ops, layer=layer: Some(
            op=ops[0], layer=layer)), explained)
        found.append((one.names, "".join(asked)))
    assert found == [(("a", "b"), "abc"), (("a",), "ab"), (("b",), "ab"), (("c",), "ababc")]


# An unknown bug in words.

def unknown(monkeypatch, point, local, first=None, seen=("embed",)):
    monkeypatch.setattr(diagnosing, "_surroundings", lambda case: " Around.")
    monkeypatch.setattr(diagnosing, "unseen_before", lambda *_: set() if seen else {"embed"})
    report = Some(local={**dict.fromkeys(seen), point.name: local}, first_divergence=first or point)
    return diagnosing._unknown(Some(first=point, report=report, recording=None, checkpoint=None, diagnosis=lambda fault,
                                    sentence, **numbers: sentence))


def off(name="layers.0.q", relative=0.5, spread=0.0, nan=0, inf=0):
    return PointDiff(name, "q_heads", (1, 2), 0.25, 0.25, relative, nan, inf, 8, spread, False, 2e-5)


LOCAL = LocalDiff("layers.0.q", 0.125, 0, 2e-5, (0,))


@pytest.mark.parametrize("point, what", [
    (off(), "off by 5.0e-01 of its largest value."), (off(nan=2), "2 NaN and 0 infinite entries of 8."),
    (off(inf=3, spread=9.0), "0 NaN and 3 infinite entries of 8."),
    (off(spread=0.3), "off by 2.5e-01 on rank 0, and the ranks differ by up to 3.0e-01."),
    (off(spread=0.2), "off by 5.0e-01 of its largest value.")])
def test_an_unknown_bug_where_it_is_first_seen(monkeypatch, point, what):
    said = f"Unknown cause, first seen at layers.0.q: {what} "
    assert unknown(monkeypatch, point, LOCAL) == said + "Everything before it is right. Around."
    assert unknown(monkeypatch, point, LOCAL, seen=()) == said + "Nothing before it was recorded. Around."


def test_an_unknown_bug_behind_another(monkeypatch):
    said = unknown(monkeypatch, off(), LOCAL, first=off("embed"))
    what = "given its own inputs it is off by 1.2e-01 of its row's largest value."
    assert said == f"Unknown cause at layers.0.q: {what} Around."


@pytest.mark.parametrize("dtype, boundary", [(F64, True), (F32, False)])
def test_where_no_module_is_wrong(dtype, boundary):
    report = Some(first_divergence=off(), dtype=dtype, local={"a": Some(relative=1e-9), "b": Some(relative=3e-7)})
    found = diagnosing._rounding(report)
    assert found.fault is None and found.point == "layers.0.q" and found.numbers == {"relative": 0.5}
    assert "layers.0.q is off by 5e-01 of its scale, but no module by more than 3e-07" in found.sentence
    assert ("float32 rounding boundary" in found.sentence) is boundary


@pytest.mark.parametrize("points, where", [
    (("layers.0.q",), "layer 0: q"), (("layers.1.q", "layers.0.k"), "layers 0–1: q, k"),
    (("layers.0.q", "layers.2.q", "layers.3.q"), "layers 0, 2–3: q"), (("embed", "layers.4.q"), "layer 4: embed, q"),
    (("embed",), "embed"), ((), "layer 7: attn"), (("layers.9.q", "layers.10.q", "layers.11.q"), "layers 9–11: q")])
def test_where_a_bug_is(points, where):
    assert Diagnosis("f", "s", "layers.7.attn", points=points).where == where


# How a guess is measured.

class Ranks:
    """A case of some ranks; a wrong op gives each rank's number."""

    def __init__(self, held, wrong_ranks=None, tolerance=0.01, dtype=F32):
        self.held, self.tolerance, self.ops, self.point = held, tolerance, ("q",), "q"
        self.wrong_ranks = range(len(held)) if wrong_ranks is None else wrong_ranks
        self.report, self.op, self.compared, self.lost = Some(dtype=dtype), "q", None, torch.zeros(1, dtype=torch.bool)
        self.scope, self.on, self.known, self.rows = None, (), {}, slice(None)

    def with_(self, **changed):
        return self

    def shard(self, name, rank):
        return self.held[rank][None]

    def all_or(self, rows):
        return torch.ones(1, dtype=torch.bool)


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(altered, "AlteredFrame", lambda case, ops: ops)
    monkeypatch.setattr(altered, "At", lambda case, rank, frame, op: lambda point: frame(rank)[None])
    return Ranks


def test_the_worst_of_the_wrong_ranks_decides(ranks):
    case = ranks([torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.1]), torch.tensor([9.0, 9.0])], (0, 1))
    assert altered.misfit(case, lambda rank: torch.tensor([1.0, 2.0])) == pytest.approx(0.05)
    assert altered.misfit(case, lambda rank: torch.tensor([1.0, 2.0]), [0]) == 0
    assert altered.misfit(case, lambda rank: torch.tensor([1.0, 2.0]), []) == float("inf")
    asked = []
    altered.misfit(case, lambda rank: asked.append(rank) or torch.tensor([0.1, 0.1]))
    assert asked == [0], "far off: the others cannot make it better"


@pytest.mark.parametrize("more, fits", [(0.0099, True), (0.0101, False), (float("nan"), False)])
def test_a_guess_fits_within_the_tolerance(ranks, more, fits):
    case = ranks([torch.tensor([1.0, 1 + more], dtype=F64)])
    assert altered.explains(case, lambda rank: torch.ones(2)) is fits


@pytest.mark.parametrize("number", [0.0012, 0.9, 1.0, 37.0, 999.0])
def test_a_number_is_found_between_its_ends(ranks, number):
    x = noise(20, seed=1)
    for held, same in (([x * number], True), ([x * number, x * number], True), ([x * number, x * number * 1.1], False),
                       ([x * number + 0.2 * number * x.abs().max() * noise(20, seed=2).sign()], False)):
        found = altered.fitted(ranks(held, tolerance=1e-5), lambda n: lambda rank: x * n, 1e-3, 1e3)
        assert (found == pytest.approx(number, rel=2e-5)) if same else found is None
    assert altered.fitted(ranks([x * 3], tolerance=1e-5), lambda n: lambda rank: x * n, 4, 1e3) is None


def test_a_number_is_looked_for_on_one_rank_and_must_fit_on_all(ranks):
    x, asked = noise(20, seed=1), []
    case = ranks([x * 3, x * 3, x * 3], wrong_ranks=(1, 2), tolerance=1e-5)
    found = altered.fitted(case, lambda n: lambda rank: asked.append(rank) or x * n, 1e-3, 1e3)
    assert found == pytest.approx(3, rel=1e-5) and asked[-2:] == [1, 2] and set(asked[:-1]) == {1} and len(asked) > 60


@pytest.mark.parametrize("number", [0.0123, 1.1, 47.0])
def test_a_number_is_found_where_all_but_the_nearest_are_as_far_off(ranks, number):
    """The gap falls within a step of the grid and is the same everywhere else."""
    right = torch.ones(9, dtype=F64)

    def family(n):
        off = right.clone()
        off[3] += (14 * (torch.tensor(n, dtype=F64) / number).log10()).clamp(-0.9, 0.9)
        return lambda rank: off
    assert altered.fitted(ranks([right], tolerance=1e-4), family, 1e-3, 1e3) == pytest.approx(number, rel=1e-4)


@pytest.mark.parametrize("dtype, fewer", [(F64, [BF16, F16]), (F32, [BF16, F16]), (BF16, []), (F16, [])])
def test_which_dtypes_have_clearly_fewer_digits(ranks, dtype, fewer):
    assert [*altered.coarser(ranks([], dtype=dtype))] == fewer


@pytest.mark.parametrize("held, guess, far", [
    ([[1.0, 2.0]], [[1.0, 4.0]], 0.5), ([[0.0]], [[0.0]], 0.0), ([[1.0]], [[float("inf")]], float("inf")),
    ([[float("nan")]], [[1.0]], float("inf")), ([[1.0, 2.0]], [[1.0]], float("inf")),
    ([[float("nan")], [3.0]], [[float("nan")], [2.0]], 0.5),  # rows that must be NaN say nothing
    ([[1.0], [2.0]], [[float("nan")], [2.0]], float("inf")), ([[float("nan")]], [[float("nan")]], float("inf"))])
def test_how_far_a_guess_is(held, guess, far):
    assert altered.distance(torch.tensor(held), torch.tensor(guess)) == far


@pytest.mark.parametrize("rows, decoded", [
    ([((0, 0), 3), ((0, 1), 3), ((0, 2), 3), ((0, 3), 4)], {(0, 3)}), ([((0, 0), 1)], set()),
    ([((0, 0), 1), ((0, 1), 2), ((1, 0), 2), ((1, 1), 2)], {(0, 1)}),
    ([((0, 1), 3), ((0, 2), 3)], set()),  # two at once
    ([((0, 2), 5)], set())])  # there were later keys beside it
def test_what_was_decoded(rows, decoded):
    places, keys = zip(*rows)
    _, found = calls_of_rows(*torch.tensor(places).T, torch.tensor(keys))
    assert {place for place, alone in zip(places, found) if alone} == decoded


# What a run cost.

def run(computed, needed, preemptions=0, blocks_left=0, texts=2):
    steps = [Some(requests=[Some(segment=Some(start=0, count=n), draft=(), num_draft_tokens=0) for n in step])
             for step in computed]
    return Some(decode=Some(steps=steps, preemptions=preemptions, blocks_left=blocks_left), ids=[[1]] * texts,
                computed=[list(range(n)) for n in needed])


def test_tokens_that_were_computed_again():
    again = steps.tokens_computed_again(run([[3, 2], [4]], [4, 2]))
    assert again.fault == "cache_ignored" and again.numbers == {"computed": 9, "needed": 6}
    assert steps.tokens_computed_again(run([[3, 2], [1]], [4, 2])) is None
    assert steps.tokens_computed_again(run([[3, 2], [4]], [4, 2], preemptions=1)) is None, "it had to begin again"
    assert steps.tokens_computed_again(Some(decode=None)) is None


@pytest.mark.parametrize("left, texts, words", [(1, 1, "1 block of 1 finished sequence "), (
    2, 3, "2 blocks of 3 finished sequences ")])
def test_blocks_that_never_came_back(left, texts, words):
    found = steps.blocks_not_released(run([], [], blocks_left=left, texts=texts))
    assert found.fault == "block_leaked" and found.numbers == {"left": left} and words in found.sentence
    assert steps.blocks_not_released(run([], [])) is None

"""From tensors to shards by hand: padding, repeated heads, whole ones; what is said of those that were left out."""

from collections import Counter
from types import SimpleNamespace as Some

import pytest
import torch

from tplab.align.check.evidence import TABLES
from tplab.align.check.layouts import Layout
from tplab.align.check.names import CONSUMER, DIRECT, PRODUCER
from tplab.align.check.place import _Placing
from tplab.align.check.rows import Texts
from tplab.align.check.shares import Shares
from tplab.align.check.sources import Source, Sources

F32, BF16 = torch.float32, torch.bfloat16


def placing(indices=((0, 1), (2, 3)), q=((0, 1, 2, 3), (4, 5, 6, 7)), **more):
    found = object.__new__(_Placing)
    layouts = {"q": Layout(q, ""), "k": Layout(indices, ", said so"), "v": Layout(indices, "")}
    vars(found).update(shares=Some(layouts=layouts, totals={"k": 4, "q": 8, "v": 4}),
                       config=Some(num_heads=8, num_kv_heads=4), unplaced={}, assumed={}, learnt={})
    vars(found).update(more)
    return found


def heads(*numbers):
    return torch.tensor(numbers, dtype=F32)[None, :, None].repeat(3, 1, 2)


@pytest.mark.parametrize("held, indices, rank, kept, meant", [
    ((2, 3), ((0, 1), (2, 3)), 1, (2, 3), (2, 3)), ((2, -7, 3), ((0, 1), (2, -1, 3)), 1, (2, 3), (2, 3)),
    ((-7, 0), ((-1, 0), (1,)), 0, (0,), (0,)), ((0, 1, 2, 3), ((0, 1), (2, 3)), 1, (0, 1, 2, 3), (0, 1, 2, 3)),
    ((3, 2), ((0, 1), (3, 2)), 1, (3, 2), (3, 2)), ((0, 1, 2, 3), (None, (2, 3)), 0, (0, 1, 2, 3), (0, 1, 2, 3)),
    ((0, 1), (None, (2, 3)), 0, None, None), ((0, 1, 2), ((0, 1), (2, 3)), 0, None, None),
    ((0, 1, 2, 3, 4), ((0, 1), (2, 3)), 0, None, None)])
def test_the_shard_that_a_layout_makes_of_a_tensor(held, indices, rank, kept, meant):
    found = placing(indices, q=((0,), (1,)))._shard(heads(*held), "kv_heads", Layout(indices, ""), rank, "k")
    assert (found and (tuple(found.tensor[0, :, 0].int().tolist()), tuple(found.indices))) == (kept and (kept, meant))
    assert found is None or found.kind == "kv_heads"


@pytest.mark.parametrize("held, q, kept, meant", [
    ((20, 21, 22), (0, 1, 2), (20, 22), (0, 1)),  # query heads 0 and 1 read KV head 0: its first copy counts
    ((20, 21, 22), (4, 2, 5), (21, 20), (1, 2)),  # in their order, wherever they stand
    ((20, 21, 22), (0, 1), None, None), ((20, 21, 22), None, None, None)])
def test_heads_that_every_query_head_has_a_copy_of(held, q, kept, meant):
    layout = Layout(((0, 1), (2, 3)), "")
    found = placing(q=(q, None))._shard(heads(*held), "kv_heads", layout, 0, "k")
    assert (found and (tuple(found.tensor[0, :, 0].int().tolist()), found.indices)) == (kept and (kept, meant))
    assert placing(q=(q, None))._shard(heads(*held), "q_heads", layout, 0, "v") is None, "only of keys and values"


def source(name="layers.1.self_attn.k_proj", kind="out", path="", dtype=F32):
    return Source(name, kind, path, 1, 0, {(0, 0): Some(dtype=dtype)})


@pytest.mark.parametrize("first, second, chosen, said", [
    (((0, 1), (0, 1)), None, 0, []),
    (((0, 1), (0, 1, 2)), ((0, 1), (0, 1)), 1,
     [("layers.{i}.self_attn.k_proj’s output", "3 of kv_heads on rank 1, where its layout has 2")]),
    (((0,), (0, 1)), None, None,
     [("layers.{i}.self_attn.k_proj’s output", "1 of kv_heads on rank 0, where its layout has 2")])])
def test_the_first_source_that_its_layout_explains(first, second, chosen, said):
    """Two sources for the keys; each rank's number of heads."""
    found, kept = placing(), []
    held = [Some(source=source(), sentence=f"source {at}", tensors=dict(enumerate(heads(*one) for one in ranks)))
            for at, ranks in enumerate((first, second)) if ranks]
    found.shares.held = lambda name, look="whole": iter(held)
    found._keep = lambda name, source, sentence, build: kept.append((name, sentence, build()))
    found._dealt("layers.1.k", "k")
    assert [name for name, *_ in kept] == ["layers.1.k"] * (chosen is not None) and list(found.unplaced) == said
    if kept:
        (_, sentence, shards), = kept
        assert sentence == f"source {chosen}, said so" and [tuple(shards[rank].indices) for rank in (0, 1)] == [
            (0, 1), (2, 3)]


def test_what_was_left_out_is_listed_by_pattern_with_its_layers():
    found = placing()
    for layer in (2, 0, 1, 1):
        found._leave_out(source(f"layers.{layer}.mix", "in", "mask.0.1"), "why")
    found._leave_out(source("layers.0.mix", "in", "mask"), "why")
    found._leave_out(source("head"), "other")
    assert found.unplaced == {("layers.{i}.mix’s input mask.*", "why"): [2, 0, 1],
                              ("layers.{i}.mix’s input mask", "why"): [0], ("head’s output", "other"): []}
    assert [found._listed(what, layers) for (what, _), layers in found.unplaced.items()] == [
        "layers.{i}.mix’s input mask.* (layers 0–2)", "layers.{i}.mix’s input mask (layer 0)", "head’s output"]


def test_how_a_point_was_known_is_part_of_what_is_assumed():
    found = placing(points=Some(builders={}), dtypes={F32: 0, BF16: 0})
    found.learnt = {"layers.{i}.mix": "known by what it does: q", ("t", "tensor", ""): "equals Hugging Face's norm"}
    for name, one in (("layers.0.q", source("layers.0.mix")), ("norm", source("t", "tensor", dtype=BF16)),
                      ("layers.0.k", source())):
        found._keep(name, one, "sentence", len)
    assert found.assumed == {
        "layers.0.q": "from layers.0.mix’s output (known by what it does: q); sentence",
        "norm": "from t (equals Hugging Face's norm); sentence",
        "layers.0.k": "from layers.1.self_attn.k_proj’s output; sentence"}
    assert found.dtypes == {F32: 2, BF16: 1} and found.points.builders == dict.fromkeys(found.assumed, len)


@pytest.mark.parametrize("dtypes, most", [({}, F32), ({BF16: 1}, BF16), ({BF16: 3, F32: 2}, BF16), ({F32: 3, BF16: 2},
                                                                                                    F32)])
def test_a_runs_dtype_is_that_of_most_points(dtypes, most, monkeypatch):

    found = placing(dtypes=Counter(dtypes), points={})
    found.config.num_layers = found.config.qk_norm = 0
    vars(found.shares).update(contradictions=["b"])
    found.sources = Some(world_size=2, texts=Some(ids=[[1]]), places=[(0, 0)], num_keys=[1], declared=None, notes=["n"],
                         contradictions=["a"])
    for name in ("_dealt", "_hidden", "_name_unclaimed"):
        monkeypatch.setattr(_Placing, name, lambda *_: None)
    monkeypatch.setattr(_Placing, "_logits", lambda self: [(0, 7)])
    found.unplaced = {("x", "why"): [1], ("t", TABLES): [], ("u", TABLES): [0, 1]}
    made = found.recording()
    assert made.dtype is most and made.logit_places == [(0, 7)] and made.contradictions == ["a", "b"]
    assert made.unplaced == ["x: why (layer 1)"] and made.notes == ["n", f"{TABLES}: t; u (layers 0–1)"]


# Claims and layouts, decided.

def test_of_claims_the_strongest_comes_first():
    """A fused output has to be cut: it stands behind what goes into the next module, and before what is passed on."""
    found = object.__new__(Shares)
    direct, passed, fused = (Some(strength=strength) for strength in (DIRECT, CONSUMER, PRODUCER))
    found.sources = Some(of=lambda name: [fused] if name == "layers.0.qkv" else [passed, direct])
    found._of = lambda source, name, look: source
    found._part = lambda source, fused, point, look: source
    assert list(found.held("layers.0.k")) == [direct, fused, passed]
    assert list(found.held("layers.0.attn")) == [direct, passed]


@pytest.mark.parametrize("count, seen, reset", [
    (2, None, True), (2, (0, 0), True), (2, (0, -1), False), (2, (0, 1), False), (3, None, False), (1, None, False)])
def test_keys_repeated_for_every_query_head_are_as_many_as_these(count, seen, reset):
    """Two query heads and one KV head a rank by the plan; a rank holds ``count`` key heads."""
    planned = {"q": [(0, 1), (2, 3)], "k": [(0,), (1,)], "v": [(0,), (1,)], "mlp": [(0,), (1,)], "vocab": [(0,), (1,)]}
    found, asked = object.__new__(Shares), {}
    vars(found).update(config=Some(num_heads=4, num_kv_heads=2), planned=planned, contradictions=[], _by_weight={},
                       totals=dict.fromkeys(planned, 4), size=2)
    found._votes = lambda which, points: {"q": ([2, 2], [(0, 1), (2, 3)]), "k": ([count] * 2, [seen] * 2)}.get(
        which, ([None] * 2, [None] * 2))
    found._vocabulary = lambda: ([None] * 2, [None] * 2)
    found._decide = lambda which, counts, found, *_: asked.update({which: (counts[which], found[which])}) or Layout(
        tuple(planned[which]), "")
    assert set(found.layouts) == set(planned)
    assert asked["k"] == (([1, 1], [None, None]) if reset else ([count] * 2, [seen] * 2))


def called(*statuses, left_out=()):
    """One rank's calls, each with one tensor."""
    entry = Some(dtype=F32, kind="tensor")
    return {index: Some(index=index, status=status, entries=[entry], left_out=("some",) if index in left_out else (),
                        raised=(), input_ids=torch.tensor([index]), positions=None, sequences=None)
            for index, status in enumerate(statuses)}


@pytest.mark.parametrize("ranks, left_out, used, short", [
    ([("done", "done"), ("done", "done")], (), [0, 1], False), ([("done", "failed: x"), ("done",) * 2], (), [0], False),
    ([("cut off",), ("cut off",)], (), [0], False), ([("failed: x", "cut off")], (), [0], False),
    ([("done",) * 4], (1, 2), [0, 3], True), ([("done", "done"), ("done",)], (), [0], False)])
def test_which_calls_are_looked_at(ranks, left_out, used, short):
    found = object.__new__(Sources)
    recorded = {rank: called(*statuses, left_out=left_out) for rank, statuses in enumerate(ranks)}
    vars(found).update(config=Some(vocab_size=9), notes=[], contradictions=[], ranks=[*recorded], texts=Texts(),
                       calls=[], recorded=recorded)
    found._read_calls(Some(ranks=[Some(rank=rank, calls=list(calls.values())) for rank, calls in enumerate(
        found.recorded.values())]))
    assert found.used == used and ("calls 1–2 lack what call 0 has, and were not looked at" in found.notes) is short

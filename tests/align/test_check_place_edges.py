"""From tensors to shards by hand: padding, repeated heads, whole ones; what is said of those that were left out."""

from collections import Counter
from types import SimpleNamespace as Some

import pytest
import torch

from tplab.align.check.evidence import TABLES
from tplab.align.check.layouts import Layout
from tplab.align.check.place import _Placing
from tplab.align.check.sources import Source

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

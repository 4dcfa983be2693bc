"""How layouts, cuts and summands are found out: votes, fused outputs, vocabularies, on tensors made by hand."""

from types import SimpleNamespace as Some

import pytest
import torch

from tplab.align.check import sources as sources_file
from tplab.align.check.fused import Fused, _follows, _in_turns, _made_of, split
from tplab.align.check.layouts import Layout
from tplab.align.check.names import CONSUMER, OVERRIDE, PRODUCER
from tplab.align.check.place import KEPT, _Points
from tplab.align.check.rows import CallRows
from tplab.align.check.shares import Held, Shares
from tplab.align.check.sources import Source, Sources
from tplab.align.check.sums import Sums
from tplab.align.check.weights import _pieces, _share

A, B = Some(name="a", pattern=("a",)), Some(name="b", pattern=("b",))


def shares(size=2, **more):
    found = object.__new__(Shares)
    vars(found).update(size=size, contradictions=[], _by_weight={}, sampled=["layers.0.", "layers.1.", "layers.2."])
    vars(found).update(more)
    return found


# Which way heads are read.

RIGHT = torch.tensor([[[1.0, 2], [3, 4]], [[5, 6], [7, 8]]])  # [tokens, heads, head_dim]
FULL = torch.cat([torch.full((2, 1, 2), 50.0), RIGHT + 1e-4], 1)  # one head more, and a rounding


def half_right():
    wrong = RIGHT.clone()
    wrong[:, 0] = FULL[:, 1]
    wrong[:, 1] += 1
    return wrong


@pytest.mark.parametrize("wrong", [RIGHT.transpose(0, 1).contiguous(), half_right()])
def test_of_two_ways_to_read_heads_the_one_that_fits(wrong):
    found = shares(reference=Some(point=lambda name: FULL if name == "layers.0.q" else None))
    assert found._way("layers.0.q", {"usual": wrong, "other": RIGHT}) is RIGHT
    assert found._way("layers.0.q", {"usual": RIGHT, "other": wrong}) is RIGHT
    longer = {way: torch.cat([x, x]) for way, x in (("usual", wrong), ("other", RIGHT))}
    assert found._way("layers.0.q", longer) is longer["other"], "the reference has the first rows only"
    assert found._way("layers.0.k", {"usual": wrong, "other": RIGHT}) is wrong, "nothing to tell it by"
    assert found._way("layers.0.q", {}) is None


def test_ways_that_are_alike_or_not_read_need_no_reference():
    found = shares(reference=Some(point=None))
    meta = torch.empty(2, 2, 2, device="meta")
    assert found._way("layers.0.q", {"usual": RIGHT, "other": RIGHT.clone()}) is RIGHT
    assert found._way("layers.0.q", {"usual": RIGHT}) is RIGHT
    assert found._way("layers.0.q", {"usual": meta, "other": RIGHT}) is meta


# Votes.

def voting(held, expected, reference=None):
    """``held``: point → per rank the share that its values show (None: none); ``expected``: points that inputs say."""
    def holding(name, look):
        for ranks in held.get(name, ()):
            yield Held(A, {rank: torch.empty(1, len(share)) for rank, share in ranks.items()}, str(ranks))

    found = shares(reference=Some(point=lambda name: (reference or {}).get(name)))
    found.held = holding
    found._expected = lambda at, point, source, rank: expected.get(at + point, {}).get(rank)
    found.vote = lambda which, tensor, full, rank: full
    return found


def test_most_layers_say_what_a_rank_holds():
    held = {f"layers.{i}.q": [{0: (0, 1), 1: (2,)}] for i in range(3)}
    said = {f"layers.{i}.q": {0: share, 1: (2,)} for i, share in enumerate(((0, 1), (1, 0), (1, 0)))}
    assert voting(held, said)._votes("q", ("q",)) == ([2, 1], [(1, 0), (2,)])


def test_a_point_is_asked_where_the_one_before_says_nothing():
    held = {"layers.0.gate": [{0: (0,)}], "layers.0.mlp_act": [{0: (0, 1), 1: (2, 3, 4)}]}
    said = {"layers.0.gate": {0: (7,)}, "layers.0.mlp_act": {0: (8, 9), 1: (2, 3, 4)}}
    assert voting(held, said)._votes("mlp", ("gate", "mlp_act")) == ([1, 3], [(7,), (2, 3, 4)])
    assert voting(held, {})._votes("mlp", ("gate", "mlp_act")) == ([1, 3], [None, None])


def test_only_the_strongest_claim_is_asked():
    held = {"layers.1.q": [{0: (0,)}, {0: (5, 6), 1: (3, 4)}]}
    said = {"layers.1.q": {0: (0,), 1: (3, 4)}}
    assert voting(held, said)._votes("q", ("q",)) == ([1, None], [(0,), None])


def test_hugging_faces_own_values_are_a_guess_by_the_first_layer():
    held = {f"layers.{i}.attn": [{0: (0,), 1: (1,)}] for i in range(3)}
    guess = {"layers.0.attn": (5,), "layers.1.attn": (6,), "layers.2.attn": (6,)}
    assert voting(held, {}, guess)._votes("q", ("attn",)) == ([1, 1], [(5,), (5,)])
    said = {"layers.2.attn": {1: (1,)}}
    assert voting(held, said, guess)._votes("q", ("attn",)) == ([1, 1], [(5,), (1,)]), "its own input says more"


# The vocabulary.

def vocabulary(logits, norms, complete=(0, 1)):
    """``logits``: per rank ``(places, tensor)``; ``norms``: per source of the norm the same."""
    sources = Some(of=lambda name: [A, B] if name == "logits" else list(norms.values()),
                   complete=lambda source: complete if source is A else getattr(source, "complete", [0, 1]),
                   logits=lambda source, rank, look="whole": logits[rank] if source is A else source.rows)
    evidence = Some(logits=lambda x: ("own", x.tolist()))
    found = shares(sources=sources, evidence=evidence, config=Some(hidden_size=2),
                   reference=Some(logits=lambda places: ("theirs", places)))
    found.vote = lambda which, tensor, full, rank: full
    return found


PLACES = [(0, 0), (0, 1), (1, 0)]
NORM = torch.tensor([[1.0, 1], [2, 2], [3, 3]])


def test_logits_are_held_against_the_norm_that_went_in():
    logits = {0: ([(1, 0), (0, 1)], torch.empty(2, 3)), 1: None}
    norm = Some(name="norm", rows=(PLACES, NORM))
    counts, found = vocabulary(logits, {"n": norm})._vocabulary()
    assert counts == [3, None] and found == [("own", [[3, 3], [2, 2]]), None], "in the order of the logits' rows"
    own = Some(name="a", rows=(PLACES, -NORM))
    assert vocabulary(logits, {"n": norm, "o": own})._vocabulary()[1][0] == ("own", [[-3, -3], [-2, -2]])
    assert vocabulary(logits, {"n": norm}, complete=[1])._vocabulary() == ([None, None], [None, None])


@pytest.mark.parametrize("norm", [
    Some(name="a", rows=(PLACES[:2], NORM[:2])), Some(name="a", rows=(PLACES, NORM[:, :1])),
    Some(name="a", rows=None), Some(name="a", rows=(PLACES, NORM), complete=[1])])
def test_without_the_norm_hugging_faces_logits_must_do(norm):
    logits = {0: ([(1, 0), (0, 1)], torch.empty(2, 3)), 1: None}
    assert vocabulary(logits, {"n": norm})._vocabulary() == ([3, None], [("theirs", [(1, 0), (0, 1)]), None])
    other = Some(name="norm", rows=(PLACES, NORM))
    assert vocabulary(logits, {"n": norm, "o": other})._vocabulary()[1][0][0] == "own", "the next one may do"


# Fused outputs.

WEIGHTS = torch.arange(1.0, 33.0).reshape(2, 16) ** 2  # q: 4 heads of 2, k and v: 2 each
PARTS = {"q": WEIGHTS[:, :8], "k": WEIGHTS[:, 8:12], "v": WEIGHTS[:, 12:]}
IN_ORDER, TURNED = [4, 5, 6, 7, 10, 11, 14, 15], [10, 11, 4, 5, 6, 7, 14, 15]  # rank 1's


def cut(rows, after=None, x=True, layers=("layers.0.",), kind="qkv"):
    """The cut of what these ranks gave as qkv; ``after``: attention's output on rank 1."""
    heads = {"q": 4, "k": 2, "v": 2}
    shares = Some(
        totals=heads, size=2, sampled=layers, config=Some(head_dim=2),
        planned={which: [tuple(range(n // 2)), tuple(range(n // 2, n))] for which, n in heads.items()},
        own_input=lambda source, name, rank: torch.ones(1) if x and name.endswith("input_norm") else None,
        evidence=Some(projection=lambda layer, part, x: PARTS[part]),
        reference=Some(point=lambda name: RIGHT_ATTENTION if name.endswith("attn") else None))
    shares.sources = Some(
        of=lambda name: [A] if name.endswith("qkv") else [B] if name.endswith("attn") and after is not None else [],
        complete=lambda source: [rank for rank, given in enumerate(rows) if given is not None] if source is A else [1],
        rows=lambda source, rank, look: None if isinstance(rows[rank], str) else rows[rank],
        heads=lambda source, rank, look: {} if isinstance(after, str) else {"usual": after})
    return split(shares, Fused(shares, "qkv", ("q", "k", "v"), 2, "input_norm", "attn"))


RIGHT_ATTENTION = torch.arange(16.0).reshape(2, 4, 2) + 3


def test_a_cut_as_planned_says_nothing():
    found = cut([None, WEIGHTS[:, IN_ORDER]])
    assert found.parts == [None, {"q": [0, 1, 2, 3], "k": [4, 5], "v": [6, 7]}]
    assert found.widths == [None, 8] and found.sentence == "" and found.contradiction is None


def test_an_order_of_its_own_counts_if_what_follows_is_right():
    found = cut([None, WEIGHTS[:, TURNED]], RIGHT_ATTENTION[:, 2:])
    assert found.parts[1] == {"q": [2, 3, 4, 5], "k": [0, 1], "v": [6, 7]} and found.contradiction is None
    assert found.sentence == ("columns of qkv on rank 1 in an order of their own, which what follows confirms; ")
    for after in (RIGHT_ATTENTION[:, 2:] + 1, None, "nothing"):
        found = cut([None, WEIGHTS[:, TURNED]], after)
        assert found.parts[1] == {"q": [0, 1, 2, 3], "k": [4, 5], "v": [6, 7]}
        assert found.sentence == "cut as [q|k|v] by size on rank 1; " and found.contradiction is None


def test_where_no_input_was_recorded_the_size_decides():
    assert cut([None, WEIGHTS[:, IN_ORDER]], x=False).sentence == "cut as [q|k|v] by size on rank 1; "
    whole = cut([WEIGHTS[:, :8], WEIGHTS], x=False)
    assert [len(part) for part in whole.parts[1].values()] == [8, 4, 4] and whole.contradiction is None


def test_a_width_that_nothing_explains():
    found = cut([WEIGHTS[:, IN_ORDER], WEIGHTS[:, :6]])
    assert found.parts[1] is None and found.widths == [8, 6]
    assert found.contradiction == "a gives 6 columns on rank 1; no cut into [q|k|v] fits"
    both = cut([WEIGHTS[:, :6], WEIGHTS[:, :10]], x=False)
    assert both.contradiction == "a gives 6 columns on rank 0 and 10 columns on rank 1; no cut into [q|k|v] fits"


def test_parts_in_turns_of_a_width_that_nothing_explains():
    """Query head 2, a key, query head 3, a value, query head 0: no cut by size could have been meant."""
    found = cut([None, WEIGHTS[:, [4, 5, 10, 11, 6, 7, 14, 15, 0, 1]]], RIGHT_ATTENTION[:, 2:] + 1)
    assert found.parts[1] is None and found.contradiction == "a gives 10 columns on rank 1; no cut into [q|k|v] fits"


@pytest.mark.parametrize("parts, turns", [
    ({"gate": [0, 1], "up": [2, 3]}, False), ({"gate": [0, 2], "up": [1, 3]}, True), ({"gate": [0], "up": [1]}, False),
    ({"gate": [0, 1, 3], "up": [2]}, True), ({"gate": [2, 3], "up": [0, 1]}, False)])
def test_parts_that_lie_in_turns(parts, turns):
    assert _in_turns(parts) is turns


def test_what_cannot_be_read_is_not_cut():
    found = cut(["other rows", WEIGHTS[:, IN_ORDER]])
    assert found.parts[0] is None and found.parts[1] and found.widths == [None, 8]
    none = cut(["other rows", None])
    assert none.parts == [None, None] and none.sentence == "" and none.contradiction is None


@pytest.mark.parametrize("x, act, follows", [(True, [1, 2], True), (True, [1, 1.5], False), (False, [1, 2], False)])
def test_gate_and_up_are_confirmed_by_what_is_made_of_them(x, act, follows):
    shares = Some(
        sampled=["layers.0.", "layers.1."], own_input=lambda source, name, rank: torch.ones(1) if x and source is A
        and name == "layers.1.post_norm" else None,
        evidence=Some(projection=lambda layer, part, x: torch.tensor([[1.0, 2, 3, 4]]) * (
            1 if (layer, part) == (1, "mlp_act") else 99)),
        sources=Some(of=lambda name: {"layers.1.mlp_act": [B], "layers.1.gate_up": [A]}.get(name, []),
                     complete=lambda source: [1], rows=lambda source, rank, look: torch.tensor([act])))
    fused = Some(shares=shares, name="gate_up", before="post_norm", after="mlp_act")
    assert _follows(fused, 1) is follows and not _follows(fused, 0)


@pytest.mark.parametrize("act, blocks, turns", [
    ([2.0, 12], True, False), ([3.0, 8], False, True), ([5.0, 5], False, False), (None, True, True)])
def test_what_is_made_of_gate_and_up_tells_where_they_lie(act, blocks, turns):
    """[1, 3 | 2, 4] in blocks, 1·3 and 2·4 in turns; where nothing was recorded, nothing tells."""
    fused, made = torch.tensor([[1.0, 3, 2, 4]]), None if act is None else torch.tensor([act])
    shares = Some(sampled=["layers.0."], config=Some(hidden_act="relu"), sources=Some(
        of=lambda name: [A] if name.endswith("gate_up") else [B], complete=lambda source: [1], places=[(0, 0)],
        rows=lambda source, rank, look: fused if source is A else made))
    about = Some(shares=shares, name="gate_up", before="post_norm", after="mlp_act")
    assert _made_of(about, 1, {"gate": [0, 1], "up": [2, 3]}) is blocks
    assert _made_of(about, 1, {"gate": [0, 2], "up": [1, 3]}) is turns


@pytest.mark.parametrize("first, blocks, turns", [([[7.0, 8], [7, 8]], True, False), ([[3.0, 4], [7, 8]], False, True),
                                                  ([[1.0, 1], [2, 2]], False, False)])
def test_the_first_tokens_attention_is_its_values(first, blocks, turns):
    """Columns 1 to 8 in heads of 2; row 1 stands at position 0, row 0 says nothing."""
    rows = torch.stack([torch.zeros(8), torch.arange(1.0, 9)])
    after = torch.stack([torch.ones(2, 2), torch.tensor(first)])
    shares = Some(sampled=["layers.0."], sources=Some(
        of=lambda name: [A] if name.endswith("qkv") else [B], complete=lambda source: [0], places=[(0, 5), (1, 0)],
        rows=lambda source, rank, look: rows, heads=lambda source, rank, look: {"usual": after}))
    fused = Some(shares=shares, name="qkv", before="input_norm", after="attn", dim=2)
    assert _made_of(fused, 0, {"v": [6, 7]}) is blocks and _made_of(fused, 0, {"v": [2, 3, 6, 7]}) is turns | blocks


# Summands.

def sums(indices, held, dim=2, which="q"):
    found = object.__new__(Sums)

    def summand(layer, which, x, columns):
        return layer, which, x.tolist(), columns
    found.shares = Some(layouts={which: Layout((indices,), "")}, config=Some(head_dim=dim),
                        held=lambda name, look: iter(held.get(name, ())), evidence=Some(summand=summand))
    return found


def test_a_summand_is_made_from_a_ranks_own_heads():
    heads = {"layers.3.attn": [Held(B, {0: torch.tensor([[[9.0, 9], [9, 9]]])}),
                               Held(A, {0: torch.tensor([[[1.0, 2], [3, 4]]])})]}
    assert sums((2, 0), heads)._summand("layers.3.", "o", 0, A) == (3, "o", [[1, 2, 3, 4]], [4, 5, 0, 1])
    assert sums((2, 0), heads)._summand("layers.3.", "o", 0, Some(name="c"))[2] == [[9, 9, 9, 9]]
    assert sums((2, -1), heads)._summand("layers.3.", "o", 0, A) == (3, "o", [[1, 2]], [4, 5]), "padding is dropped"
    for indices, rank in (((2, 0, 1), 0), (None, 0), ((2, 0), 1)):
        assert sums(indices, heads)._summand("layers.3.", "o", rank, A) is None


def test_a_summand_of_the_mlp_is_made_from_columns():
    columns = {"layers.0.mlp_act": [Held(A, {0: torch.tensor([[1.0, 2, 3]])})]}
    assert sums((5, -1, 4), columns, which="mlp")._summand("layers.0.", "down", 0, A) == (0, "down", [[1, 3]], [5, 4])


TABLE = torch.tensor([[1.0, 2], [3, 4], [5, 6], [7, 8]])
OWN = [TABLE[[0, 1, 2]] * torch.tensor([[1.0], [1], [0]]), TABLE[[0, 1, 2]] * torch.tensor([[0.0], [0], [1]])]


@pytest.mark.parametrize("outs, masked", [
    (OWN, True), (OWN[:1], True), ([TABLE[:3], TABLE[:3]], False), ([OWN[0], TABLE[:3]], True),
    ([OWN[0], OWN[1] * 2], False), ([OWN[0], None], False), ([OWN[0], OWN[1][:, :1]], False)])
def test_embeddings_that_hold_a_ranks_own_rows_only(outs, masked):
    def found(size):
        one = object.__new__(Sums)
        one.sources = Some(texts=Some(ids=[[0, 1], [2]]), places=[(0, 0), (0, 1), (1, 0)],
                           complete=lambda source: range(len(outs)), rows=lambda source, rank, look: outs[rank])
        one.shares = Some(size=size, config=Some(hidden_size=2), evidence=Some(weight=lambda name: TABLE))
        return one._is_masked(object())
    assert found(2) is masked and not found(1)


def test_the_points_that_were_asked_for_last_are_kept():
    points, built = _Points(2), []
    for name in range(KEPT + 1):
        points.builders[name] = lambda name=name: built.append(name) or {1: name}
    assert [points[name] for name in points] == [[None, name] for name in range(KEPT + 1)]
    assert points[1] == [None, 1] and built == [*range(KEPT + 1)], "it is there still"
    assert points[0] == [None, 0] and built[-1] == 0, "the first one had to go"
    assert points[1] and points[2] and built[-1] == 2, "and now the one that was asked for longest ago"


# Rows and weights.

def ordered(*calls):
    found = object.__new__(Sources)
    found.calls = [CallRows(index, *call) for index, call in enumerate(calls)]
    found._order_rows()
    return found


PADDED = (2, 3, [0, 1, 2, 4, 5], [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)], [2, 5], [3, 3, 3, 2, 2])


def test_rows_of_several_calls_stand_by_sequence_and_position():
    found = ordered(PADDED, (2, 1, [0, 1], [(0, 3), (1, 2)], [0, 1], [4, 3]))
    assert found.places == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2)]
    assert found._index.tolist() == [0, 1, 2, 6, 4, 5, 7], "padding is a row of its call, too"
    assert found.num_keys == [3, 3, 3, 4, 2, 2, 3] and found.declared is None
    tensors = [torch.arange(6)[:, None] * 10, torch.tensor([[70], [80]])]
    for look in ("whole", "few"):
        assert found._ordered(tensors, look).flatten().tolist() == [0, 10, 20, 70, 40, 50, 80]
    assert found._ordered(tensors, "shape").shape == (7, 1)
    assert found._ordered([tensors[0], torch.empty(2, 2)], "whole") is None


def test_a_row_counts_as_it_was_computed_last():
    found = ordered((1, 2, [0, 1], [(0, 0), (0, 1)], [1], [2, 2], [0, 1]),
                    (1, 3, [0, 1, 2], [(0, 0), (0, 1), (0, 2)], [2], [3, 3, 3], [0, 1, 5]))
    assert found._index.tolist() == [2, 3, 4] and found.num_keys == [3, 3, 3] and found.declared == [0, 1, 5]
    assert ordered((1, 2, [0, 1], [(0, 0), (0, 1)], [1], [2, 2], [0, 1])).declared is None, "as they should be"


@pytest.mark.parametrize("rank, value, kept", [(0, 0.0, True), (0, 1.0, True), (1, 0.0, False), (1, 1.0, True)])
def test_a_bias_of_zeros_is_right_on_every_rank_but_the_first(rank, value, kept):
    entry = Some(shape=(4,), dtype=torch.float32, tensor=lambda: torch.full((4,), value))
    shares = Some(config=Some(num_layers=1, head_dim=2),
                  evidence=Some(weight=lambda name: None if "mlp" in name else name))
    found = dict(_pieces(shares, "model.layers.0.self_attn.o_proj.bias", entry, rank))
    assert [*found] == ["model.layers.0.self_attn.o_proj.bias"] * kept
    assert not dict(_pieces(shares, "model.layers.0.mlp.down_proj.bias", entry, rank)), "the model has no such bias"


@pytest.mark.parametrize("size, dim, indices, each, kept, meant", [
    (3, 0, (4, 0, 2), 1, [0, 1, 2], (4, 0, 2)), (3, 0, (4, -1, 2), 1, [0, 2], (4, 2)),
    (4, 0, (1, -1), 2, [0, 1], (2, 3)), (4, 1, (-1, 1), 2, [2, 3], (2, 3)),
    (5, 0, (1, -1), 2, [0, 1, 2, 3, 4], (2, 3)),  # of another size: handed on whole
    (3, 1, (4, -1, 2), 1, [0, 2], (4, 2))])
def test_a_weight_is_handed_on_without_its_padding(size, dim, indices, each, kept, meant):
    tensor = torch.arange(float(size)).reshape(-1, 1) if dim == 0 else torch.arange(float(size)).reshape(1, -1)
    found = _share(tensor, dim, indices, each)
    assert found.tensor.flatten().tolist() == kept and (found.dim, found.indices) == (dim, meant)


def test_a_weight_of_which_no_share_is_known_is_whole():
    found = _share(torch.ones(3), 0, None, 1)
    assert len(found.tensor) == 3 and found.dim is None


def test_the_best_claim_is_a_persons_then_what_all_ranks_have_then_the_strongest():
    sources = object.__new__(Sources)
    sources.ranks, sources.used = [0, 1], [0]

    def claim(strength, order, *ranks):
        return Source("x", "out", "", strength, order, dict.fromkeys((rank, 0) for rank in ranks))
    person, both, strong, late, one = (claim(OVERRIDE, 9, 0), claim(CONSUMER, 3, 0, 1), claim(PRODUCER, 8, 0, 1),
                                       claim(PRODUCER, 9, 0, 1), claim(PRODUCER, 1, 1))
    sources._points = {"x": dict(enumerate([one, late, both, claim(PRODUCER, 0), strong, person]))}
    assert sources.of("x") == [person, strong, late, both, one] and sources.of("y") == []


def test_heads_are_read_in_a_way_in_which_all_calls_can_be(monkeypatch):
    ways = [{"flat": torch.ones(1, 2, 2), "after": torch.zeros(1, 2, 2)}, {"after": torch.zeros(1, 2, 2)}]
    left = iter(ways)
    monkeypatch.setattr(sources_file, "as_heads", lambda tensor, call, dim: next(left))
    sources = ordered((1, 1, [0], [(0, 0)], [0], [1]), (1, 1, [0], [(0, 1)], [0], [2]))
    sources.config, sources._tensors = Some(head_dim=2), lambda source, rank, look: [None, None]
    found = sources.heads(None, 0)
    assert [*found] == ["after"] and found["after"].shape == (2, 2, 2)

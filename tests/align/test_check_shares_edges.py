"""Fused outputs, shares and sums over ranks at their edges, on tensors made by hand."""

from types import SimpleNamespace as Some

import pytest
import torch

from tplab.align.check.fused import Fused, _by_label, _by_size, _in_order, columns_in, heads_in
from tplab.align.check.layouts import Layout
from tplab.align.check.place import _Placing
from tplab.align.check.shares import Shares
from tplab.align.check.sums import Sums, _any_pair
from tplab.align.recording import Shard


def qkv(planned=(2, 1), total=(4, 2), dim=2, size=2):
    shares = Some(totals=dict(zip("qkv", (total[0], total[1], total[1]))), size=size, planned={
        which: [tuple(range(rank * n, (rank + 1) * n)) for rank in range(size)]
        for which, n in zip("qkv", (planned[0], planned[1], planned[1]))})
    return Fused(shares, "qkv", ("q", "k", "v"), dim, "input_norm", "attn")


def gate_up(total=5, planned=(3, 2)):
    starts = [sum(planned[:rank]) for rank in range(len(planned))]
    shares = Some(totals={"mlp": total}, size=len(planned),
                  planned={"mlp": [tuple(range(at, at + n)) for at, n in zip(starts, planned)]})
    return Fused(shares, "gate_up", ("gate", "up"), 1, "post_norm", "mlp_act")


def test_what_stands_before_and_behind_a_fused_output():
    shares = Some(config=Some(head_dim=6), totals={"q": 4, "k": 2, "v": 2, "mlp": 5})
    assert [(one.name, [*one.sections], one.dim, one.before, one.after) for one in (heads_in(shares), columns_in(
        shares))] == [("qkv", ["q", "k", "v"], 6, "input_norm", "attn"), ("gate_up", ["gate", "up"], 1, "post_norm",
                                                                         "mlp_act")]


def test_labels_number_all_items_of_all_parts():
    assert qkv().sections == {"q": range(0, 4), "k": range(4, 6), "v": range(6, 8)}
    assert gate_up().sections == {"gate": range(0, 5), "up": range(5, 10)}
    assert qkv()._usual(1, 4) == [(2, 3, 5, 7)]
    assert gate_up()._usual(1, 6) == [(3, 4, 8, 9), (3, 4, -1, 8, 9, -1), (1, 3, -1, 6, 8, -1),
                                      (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)]


@pytest.mark.parametrize("width, sizes", [(8, [4, 2, 2]), (16, [8, 4, 4]), (12, None), (7, None)])
def test_a_cut_of_qkv_by_size(width, sizes):
    found = _by_size(width, qkv(), 1)
    assert (found and [len(part) for part in found.values()]) == sizes
    assert found is None or sum(found.values(), []) == list(range(width))


@pytest.mark.parametrize("width, rank, gate", [(6, 0, 3), (4, 1, 2), (10, 1, 5), (6, 1, 3), (8, 0, 4), (7, 0, None)])
def test_a_cut_of_gate_and_up_by_size(width, rank, gate):
    found = _by_size(width, gate_up(), rank)
    assert (found and found["up"][0]) == gate


@pytest.mark.parametrize("labels, parts", [
    ((0, 1, 4, 6), {"q": [0, 1, 2, 3], "k": [4, 5], "v": [6, 7]}),
    ((6, 4, 0), {"q": [4, 5], "k": [2, 3], "v": [0, 1]}),
    ((-1, 0, 4, -1, 6), {"q": [0, 1, 2, 3], "k": [4, 5, 6, 7], "v": [8, 9]}),  # padding belongs to the part before
    ((0, 1, 4), None), ((3, 5, 7), {"q": [0, 1], "k": [2, 3], "v": [4, 5]})])
def test_columns_known_by_their_values(labels, parts):
    assert _by_label(labels, qkv()) == parts
    assert parts is None or _in_order(parts) is (labels[0] != 6)


def test_the_usual_labels_are_tried_and_widths_must_be_whole_heads():
    fused, whole = qkv(), torch.arange(32.0).reshape(2, 16) ** 2 + 1
    fused.shares.evidence = Some(projection=lambda layer, part, x: {"q": whole[:, :8], "k": whole[:, 8:12],
                                                                     "v": whole[:, 12:]}[part])
    assert fused.labels(whole[:, [4, 5, 6, 7, 10, 11, 14, 15]], None, 0, 1) == (2, 3, 5, 7)
    assert fused.labels(whole[:, [14, 15, 10, 11, 4, 5]], None, 0, 1) == (7, 5, 2)
    assert fused.labels(whole[:, :7], None, 0, 1) is None and fused.labels(whole[:, 1:9], None, 0, 0) is None


# Sums over the ranks.

OWN = [torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, -3.0]])]
BIAS = torch.tensor([0.5, 4.0])


class HandSums(Sums):
    """Each rank's output, and what its summand should be (None: not known)."""

    def __init__(self, outs, own=OWN, bias=BIAS, size=2, at=("layers.0.",)):
        self.outs, self.own = outs, own
        sources = Some(complete=lambda source: [rank for rank, out in enumerate(outs) if out is not None],
                       rows=lambda source, rank, look: None if isinstance(outs[rank], str) else outs[rank])
        super().__init__(Some(sources=sources, size=size, sampled=at, totals={"q": 4},
                              evidence=Some(bias=lambda layer, which: bias)))

    def _summand(self, at, which, rank, source):
        return self.own[rank]

    def _input(self, at, which, rank, source):
        """Not recorded."""

    @property
    def partial(self):
        return self._looks_partial(Some(), "o", "layers.0.")


def plus(*more, scale=1.0):
    return [own * scale + add for own, add in zip(OWN, more)]


TOTAL = sum(OWN)
OTHER = [torch.tensor([[7.0, 7.0]]), torch.tensor([[-5.0, 6.0]])]


@pytest.mark.parametrize("outs, partial", [
    (plus(0, 0), True), (plus(BIAS, 0), True), (plus(0, BIAS), True), (plus(BIAS / 2, BIAS / 2), True),
    (plus(BIAS, BIAS), True), ([TOTAL, TOTAL], False), ([TOTAL + BIAS] * 2, False), ([OTHER[0]] * 2, False),
    ([TOTAL, OTHER[1]], False), ([OTHER[0], TOTAL + BIAS], False), ([TOTAL + BIAS / 2, OTHER[1]], False),
    ([OWN[0], TOTAL], False),  # one rank went on without the sum
    (OTHER, True),  # neither, and no two alike: not the sum
    ([OWN[0], None], True), (["gone", OWN[1]], False),
    ([TOTAL, None], False), ([None, TOTAL + BIAS], False), ([OTHER[0], None], False)])  # of one rank: perhaps the sum
def test_what_is_a_summand(outs, partial):
    assert HandSums(outs, OWN).partial is partial


def test_of_three_ranks_two_that_are_alike_are_no_summands():
    own = [*OWN, OWN[0] * 3]
    assert not HandSums([OTHER[0], OTHER[0], OTHER[1]], own, size=3).partial
    assert HandSums([OTHER[0], OTHER[1], OTHER[1] * 5], own, size=3).partial


def test_what_is_a_summand_where_nothing_says_what_it_should_be():
    assert HandSums(OTHER, [None, OWN[1]]).partial and not HandSums([OTHER[0]] * 2, [None, None]).partial
    assert not HandSums([OTHER[0], None], [None, None]).partial, "one rank alone: nothing to tell it by"
    assert not HandSums(OWN[:1], OWN[:1], size=1).partial and HandSums(plus(0, 0), bias=None).partial
    three = [OTHER[0], OTHER[0], OTHER[1]]
    assert not HandSums(three, [None] * 3, size=3).partial, "two are alike"


@pytest.mark.parametrize("votes, summand", [([True], True), ([True, False], False), ([True, True, False], True),
                                            ([False, False, True], False), ([], False)])
def test_most_layers_say_what_is_a_summand(votes, summand):
    source = Some(pattern=("a",))
    sums = HandSums(OTHER, at=tuple(range(len(votes))))
    sums.shares.sampled = [f"layers.{i}." for i in range(len(votes))]
    sums.sources.of = lambda name: [source, Some(pattern=("b",))]
    sums._looks_partial = lambda same, which, at: votes[int(at.split(".")[1])]
    assert sums._is_summand(source, "o") is summand
    sums._looks_partial = None
    assert sums._is_summand(source, "o") is summand, "decided once"


def test_any_two_that_are_alike():
    a, b = OTHER
    assert _any_pair({0: a, 1: b, 2: b}) and _any_pair({0: a, 1: b, 3: a}) and not _any_pair({0: a, 1: b})
    assert not _any_pair({0: a})


# Shares.

def shares(size=2, layers=(), **more):
    found = object.__new__(Shares)
    vars(found).update(size=size, sources=Some(layers=lambda: list(layers)), contradictions=[], _by_weight={}, **more)
    return found


@pytest.mark.parametrize("layers, asked", [([], []), ([4], [4]), ([0, 1], [0, 1]), ([0, 1, 2], [0, 1, 2]),
                                           (range(2, 9), [2, 5, 8]), (range(4), [0, 2, 3])])
def test_the_first_the_middle_and_the_last_layer_are_asked(layers, asked):
    assert shares(layers=layers).sampled == [f"layers.{i}." for i in asked]


def test_a_vocabulary_is_never_searched():
    found = shares(planned={"vocab": [(0, 1), (2, 3)], "mlp": [(0, 1), (2, 3)]}, totals={"vocab": 4, "mlp": 4})
    full = torch.tensor([[1.0, 20.0, 300.0, 4000.0]])
    assert found.vote("vocab", full[:, [3, 1]], full, 0) is None
    assert found.vote("mlp", full[:, [3, 1]], full, 0) == (3, 1)
    assert found.vote("vocab", full[:, 2:], full, 1) == (2, 3) and found.vote("vocab", full, full, 1) == (0, 1, 2, 3)
    found.vote_by_weight("mlp", 1, full[:, :1], full)
    assert found._by_weight == {"mlp": ([None, 1], [None, (0,)])}


def decided(q, k, v=None, mlp=((2, 2), ((0, 1), (2, 3))), ups=None, by_weight=None, heads=4, kv_heads=2):
    """The layouts where these ``(counts, indices)`` were seen."""
    planned = {"q": [tuple(range(heads // 2)), tuple(range(heads // 2, heads))], "k": [(0,), (1,)], "v": [(0,), (1,)],
               "mlp": [(0, 1), (2, 3)], "vocab": [(0,), (1,)]}
    found = shares(config=Some(num_heads=heads, num_kv_heads=kv_heads), planned=planned,
                   totals={"q": heads, "k": kv_heads, "v": kv_heads, "mlp": 4, "vocab": 2})
    seen = {"q": q, "k": k, "v": v or k, "mlp": mlp}
    found._votes = lambda which, points: (tuple(map(list, ups)) if ups and points == ("up",) else
                                          tuple(map(list, seen[which])))
    found._vocabulary = lambda: ([None, None], [None, None])
    found._by_weight = by_weight or {}
    return found.layouts, found.contradictions


PLAN_Q, PLAN_K = ((2, 2), ((0, 1), (2, 3))), ((1, 1), ((0,), (1,)))
NONE = ((None, None), (None, None))


def test_decisions_about_heads():
    done, wrong = decided(PLAN_Q, PLAN_K)
    assert done["q"].indices == PLAN_Q[1] and done["v"].indices == PLAN_K[1] and not wrong
    assert done["vocab"] == Layout(((0,), (1,)), ""), "nothing was seen: the plan's, and nothing is said"
    done, wrong = decided(((2, 2), ((2, 3), (0, 1))), ((1, 1), ((1,), (0,))))
    assert done["q"].indices == ((2, 3), (0, 1)) and done["k"].indices == done["v"].indices == ((1,), (0,))
    done, wrong = decided(((2, 2), ((0, 2), (1, 3))), PLAN_K)
    assert done["q"].indices == PLAN_Q[1], "query heads whose keys are elsewhere are no layout"
    apart = (0, 1, 4, 5), (2, 3, 6, 7)
    done, wrong = decided(((4, 4), apart), ((2, 2), ((0, 1), (0, 1))), heads=8)
    assert done["q"].indices == apart and done["k"].indices == ((0, 1), (0, 1)) and not wrong


def test_values_lie_where_their_keys_do():
    both = ((2, 2), ((0, 1), (0, 1)))
    queries = (4, 4), ((0, 1, 2, 3), (4, 5, 6, 7))
    done, wrong = decided(queries, both, ((2, 2), ((1, 0), (0, 1))), heads=8)
    assert len(wrong) == 1 and "value heads" in wrong[0] and "the keys are dealt out otherwise" in wrong[0]
    assert not decided(queries, both, both, heads=8)[1]


def test_keys_repeated_for_every_query_head_are_taken_as_planned():
    done, wrong = decided(PLAN_Q, ((2, 2), (None, None)))
    assert done["k"].indices == PLAN_K[1] and not wrong


def test_where_only_numbers_speak_a_ranks_keys_begin_with_its_first_query_heads():
    queries = (4, 4), ((0, 1, 2, 3), (4, 5, 6, 7))
    done, wrong = decided(queries, ((3, 1), (None, None)), heads=8, kv_heads=4)
    assert done["k"].indices == done["v"].indices == ((0, 1, 2), (2,))
    assert len(wrong) == 2 and wrong[0].endswith("rank 1: 2: the query heads of rank 1 read 2–3")


def test_gate_and_up_must_agree_where_both_say_something():
    turned = ((2, 2), ((2, 3), (0, 1)))
    assert decided(PLAN_Q, PLAN_K, mlp=turned, ups=turned)[0]["mlp"].indices == turned[1]
    assert decided(PLAN_Q, PLAN_K, mlp=turned, ups=((2, 2), (None, None)))[0]["mlp"].indices == turned[1]
    assert decided(PLAN_Q, PLAN_K, mlp=turned, ups=PLAN_Q)[0]["mlp"].indices == PLAN_Q[1]


def test_weights_speak_where_no_activation_does():
    turned = ((2, 2), ((2, 3), (0, 1)))
    weights = {"mlp": tuple(map(list, turned))}
    assert decided(PLAN_Q, PLAN_K, mlp=NONE, by_weight=weights)[0]["mlp"].indices == turned[1]
    assert decided(PLAN_Q, PLAN_K, by_weight=weights)[0]["mlp"].indices == PLAN_Q[1]


def test_the_input_of_the_same_module_comes_first():
    given = {"a": torch.ones(1), "b": torch.zeros(1), "c": None}
    first, second = Some(name="a"), Some(name="b")
    found = shares()
    found.sources = Some(of=lambda name: [first, second], complete=lambda source: [0] if source is second else [0, 1],
                         rows=lambda source, rank, look: given[source.name])
    assert found.own_input(Some(name="b"), "x", 0) is given["b"] and found.own_input(first, "x", 0) is given["a"]
    assert found.own_input(Some(name="b"), "x", 1) is given["a"] and found.own_input(second, "x", 2) is None


# The model's own output beside its head's.

WHOLE = torch.arange(18.0).reshape(3, 6) ** 2
TURNED = WHOLE[:, [3, 4, 5, 0, 1, 2]]
PLACES = [(0, 0), (0, 1), (1, 0)]


def joined(*outputs, places=PLACES, size=2, shards=None):
    """What is said where the ranks' joined logits are these (None: this rank has none)."""
    placing, kept, whole = object.__new__(_Placing), "the head", "the model"
    placing.config, placing.shares = Some(vocab_size=6), Some(contradictions=[])
    placing.sources = Some(
        world_size=size, of=lambda name: [kept, whole], complete=lambda source: range(len(outputs)),
        logits=lambda source, rank: None if outputs[rank] is None else (places, outputs[rank]))
    placing._check_joined(kept, PLACES, shards or {
        rank: Shard(WHOLE[:, 3 * rank:3 * rank + 3], "vocab", range(3 * rank, 3 * rank + 3)) for rank in (0, 1)})
    return placing.shares.contradictions


def padded(tensor):
    return torch.cat([tensor, torch.full((3, 2), -1e9)], 1)


WRONG = "those of token 3 stand where those of token 0 belong"


@pytest.mark.parametrize("outputs, rank", [
    ([WHOLE, WHOLE], None), ([TURNED, WHOLE], 0), ([WHOLE, TURNED], 1), ([None, TURNED], 1), ([None, None], None),
    ([padded(WHOLE)] * 2, None), ([padded(TURNED)] * 2, 0), ([WHOLE[:, :3], WHOLE[:, 3:]], None),
    ([2 * WHOLE, WHOLE], None), ([TURNED * torch.tensor([1, 1, 1, 1, 1, 2.0])], None),  # other numbers, not these
    ([WHOLE.double(), TURNED.double()], 1)])
def test_joined_logits_stand_in_the_vocabularys_order(outputs, rank):
    said = joined(*outputs)
    assert len(said) == (rank is not None)
    assert not said or said[0].startswith(f"the model on rank {rank} holds") and said[0].endswith(WRONG)


def test_joined_logits_of_other_rows():
    assert len(joined(TURNED[[2]], places=[(1, 0)])) == 1 and not joined(WHOLE[[2]], places=[(1, 0)])
    assert not joined(TURNED, places=[(2, 0), (2, 1), (2, 2)]), "rows that the head has not"
    assert not joined(TURNED, size=1), "one rank has nothing to join"
    first = {0: Shard(WHOLE[:, :3], "vocab", range(3))}
    assert not joined(TURNED, shards=first), "half of the vocabulary is on a rank that is missing"
    lost = WHOLE.clone()
    lost[1, 2] = float("nan")
    both = {rank: Shard(lost, "vocab", range(6)) for rank in (0, 1)}
    assert not joined(lost, shards=both), "a number that is lost on both sides"
    assert not joined(WHOLE, shards={0: Shard(TURNED, "vocab", range(6)), 1: Shard(WHOLE, "vocab", range(6))})


def test_a_point_of_the_hidden_size_has_it_on_every_rank():
    placing, rows = object.__new__(_Placing), {0: WHOLE, 1: WHOLE + 1, 2: WHOLE[:, :3], 3: None}
    placing.config = Some(hidden_size=6)
    placing.sources = Some(complete=lambda ranks: ranks, rows=lambda ranks, rank, look: rows[rank])
    found = placing._rows([0, 1], "whole", "partial")
    assert [*found] == [0, 1] and found[1].tensor is rows[1] and found[1].kind == "partial"
    assert placing._rows([0, 2], "whole", "partial") is placing._rows([3, 0], "whole", "partial") is None

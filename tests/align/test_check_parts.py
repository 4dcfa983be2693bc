"""The parts of a check at their very edges, on tensors made by hand: equal sizes, one token, one rank, padding."""

from types import SimpleNamespace as Some

import pytest
import torch

from tplab.align.check.match import decide, match, near, not_a_partition, not_serving, span, tolerance, usual_shares
from tplab.align.check.rows import AFTER, BEFORE, FLAT, CallRows, Texts, _spread, as_heads, as_rows, call_inputs
from tplab.align.check.shares import Shares
from tplab.align.recording import PlacementError

NAN = float("nan")
DTYPES = [(torch.float64, 1e-4), (torch.float32, 1e-3), (torch.bfloat16, 5e-2), (torch.float16, 5e-2)]


# Layouts.

@pytest.mark.parametrize("dtype, tol", DTYPES)
def test_how_far_a_column_may_stand(dtype, tol):
    assert tolerance(dtype) == tol
    one = torch.tensor([[64.0, 64.0]])
    for part, same in ((0.8, True), (1.25, False)):
        off = one.double() * (1 + part * tol)
        if dtype in (torch.float32, torch.float64):
            assert near(off.to(dtype), one.to(dtype)) is same and (match(off.to(dtype), one.to(dtype), [(0, 1)])
                                                                   == (0, 1)) is same
        else:  # the recorded tensor's dtype decides, the other may be wider
            assert near(off.to(dtype), one) is same


def test_near_knows_shapes_and_what_is_no_number():
    a = torch.tensor([[1.0, NAN]])
    assert near(a, a) and not near(a, a[0]) and not near(a, torch.tensor([[1.0, 2.0]]))
    assert near(torch.zeros(1, 2), torch.zeros(1, 2)) and not near(torch.ones(1, 2), torch.zeros(1, 2))


@pytest.mark.parametrize("given, shares", [
    ((10, 4, 2, 3), [(8, 9, -1, -1), (2, 5, 8, -1), tuple(range(10))]),
    ((6, 3, 1, 2), [(3, 4, 5), (1, 3, 5), tuple(range(6))]), ((3, 5, 0, 1), [(0, 1, 2, -1, -1)] * 3),
    ((5, 3, 2, 3), [(-1, -1, -1), (2, -1, -1), tuple(range(5))]), ((1, 1, 0, 1), [(0,)] * 3)])
def test_usual_shares(given, shares):
    assert usual_shares(*given) == shares


def test_a_fit_is_the_first_share_that_fits_else_what_is_found():
    full = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 1.0, 2.0, 6.0]])
    local = full[:, [2, 0]]
    assert match(local, full, [(0, 1), (2, 0)]) == (2, 0) == match(local, full, [])
    assert match(local, full, [(0, 1)], search=False) is None and match(local + 1, full, []) is None
    assert match(torch.cat([local, torch.zeros(2, 1)], 1), full, []) == (2, 0, -1)
    assert match(full[:, :1], full[:, [0, 0]], [(1,), (0,)]) == (1,), "two that are alike: the first asked"
    assert match(full[:, [0, 1]], full, [(0,), (0, 1, 2)], search=False) is None, "shares of another size"
    assert match(full[:, [0, 0]], full, [(0,)], search=False) is None, "one item is not two alike"


def test_rows_that_are_not_finite_say_nothing_in_a_fit():
    full = torch.tensor([[1.0, 2.0], [NAN, 1.0], [3.0, 9.0]])
    local = torch.tensor([[2.0, 1.0], [7.0, 7.0], [9.0, 3.0]])
    assert match(local, full, []) == (1, 0)
    local[2, 0] = float("inf")
    assert match(local, full, []) == (1, 0)
    assert match(local[1:2], full[1:2], [(0, 1)]) is None


@pytest.mark.parametrize("off, dtype, fits", [(1, torch.bfloat16, True), (2, torch.bfloat16, False),
                                              (1, torch.float32, False)])
def test_one_of_a_hundred_columns_may_be_off_in_bfloat16(off, dtype, fits):
    full = torch.linspace(1, 2, 100)[None].to(dtype)
    local = full.clone()
    local[0, :off] *= 2
    assert (match(local, full, [tuple(range(100))], search=False) is not None) is fits


@pytest.mark.parametrize("off, fits", [(0.8e-4, True), (1.2e-4, False)])
def test_a_small_column_is_measured_by_a_tenth_of_the_usual_one(off, fits):
    full = torch.tensor([[1.0, 1.0, 0.0]])
    assert (match(full + torch.tensor([0, 0, off]), full, [(0, 1, 2)], search=False) is not None) is fits


def test_most_layers_decide():
    a, b = (0, 1), (2, 3)
    votes = {"0": {0: a}, "1": {0: b}, "2": {0: b, 1: a}, "3": {0: None, 1: None}}
    shares = Some(sampled_layers=[*votes], sources=Some(world_size=3))
    assert Shares.majority(shares, votes.get) == [b, a, None], "a layer without labels is not counted"


@pytest.mark.parametrize("indices, total, words", [
    ([(0, 1), (2,)], 3, ""), ([(0, 1, 2), (2, 1, 0)], 3, ""), ([(0, 1, 2), (2,)], 3, "2 more than once"),
    ([(0,), (2,)], 3, "1 on no rank"),
    ([(0, 1), (1, 2)], 3, "1 more than once"), ([(0, 0), (2,)], 3, "1 on no rank and 0 more than once"),
    ([(0, 1), None], 3, ""), ([(0, 1, -1), (2, -1, -1)], 3, ""), ([(0, 0), None], 3, "0 more than once")])
def test_what_is_a_partition(indices, total, words):
    assert not_a_partition(indices, total) == words


@pytest.mark.parametrize("kv, q, group, words", [
    ([(0,), (1,)], [(0, 1), (2, 3)], 2, ""),
    ([(0,), (0,)], [(0, 1), (2, 3)], 2, "rank 1 holds 0, but its query heads read 1"),
    ([(0, 0)], [(0, 1)], 2, "rank 0 holds one twice"), ([(0,), None], [(0,), (5,)], 2, ""),
    ([(0,), (1,)], [(0,), None], 2, ""), ([(0,)], [(0, -1)], 1, ""), ([(0, 1)], [(0,)], 1, ""),
    ([(0, -1, -1)], [(0, 1)], 2, ""), ([(0, -1, 0)], [(0, 1)], 2, "rank 0 holds one twice")])
def test_who_serves_whose_query_heads(kv, q, group, words):
    assert not_serving(kv, q, group) == words


@pytest.mark.parametrize("indices, words", [
    ((), "none"), ((-1,), "none and padding"), ((3,), "3"), ((0, 1, 2), "0–2"), ((0, 2, 4), "0, 2, 4"),
    ((0, 1, 3, -1), "0–1, 3 and padding"), (range(0, 16, 2), "0, 2, 4, 6, 8, 10, 12, 14"),
    (range(0, 18, 2), "0, 2, 4, 6, 8, 10, …, 16"), ((2, 1), "2, 1")])
def test_spans_in_words(indices, words):
    assert span(indices) == words


@pytest.mark.parametrize("counts, plan, found, total, shares, wrong", [
    ([2, 2], [(0, 1), (2, 3)], [(0, 1), (2, 3)], 4, [(0, 1), (2, 3)], False),  # as planned
    ([2, 2], [(0, 1), (2, 3)], [(2, 3), (0, 1)], 4, [(2, 3), (0, 1)], False),  # proven otherwise
    ([2, 2], [(0, 1), (2, 3)], [(0, 1), (0, 1)], 4, [(0, 1), (2, 3)], False),  # a flaw: the plan stands
    ([2, 2], [(0, 1), (2, 3)], [(0, 1), None], 4, [(0, 1), (2, 3)], False),  # one unproven: the plan
    ([2, None], [(0, 1), (2, 3)], [(0, 1), None], 4, [(0, 1), None], False),  # a rank that was not recorded
    ([3, 1], [(0, 1), (2, 3)], [(0, 1, 2), (3,)], 4, [(0, 1, 2), (3,)], False),
    ([3, 1], [(0, 1), (2, 3)], [(0, 1, 2), (2,)], 4, [(0, 1, 2), (2,)], True),  # proven, and no layout at all
    ([4, 4], [(0, 1), (2, 3)], [None, None], 4, [(0, 1, 2, 3)] * 2, False),  # all of them everywhere
    ([3, 3], [(0, 1), (2, 3, 4)], [None, None], 5, [(0, 1, 2), (3, 4, -1)], False),  # equal and padded
    ([3, 3, 3], [(0, 1), (2, 3), (4, 5)], [None] * 3, 6, [None] * 3, True),  # the last one would be empty
    ([3, 1], [(0, 1), (2, 3)], [None, None], 4, [(0, 1, 2), (3,)], False),  # contiguous by number
    ([1, 1], [(0, 1), (2, 3)], [None, None], 4, [(0,), (1,)], True),  # some on no rank
    ([3, 2], [(0, 1), (2, 3)], [None, None], 4, [None, None], True),  # beyond the end
    ([1], [(0,)], [(0,)], 1, [(0,)], False)])
def test_a_decision(counts, plan, found, total, shares, wrong):
    done = decide("heads", counts, plan, found, total, lambda held: not_a_partition(held, total))
    assert list(done.indices) == shares and bool(done.contradiction) is wrong, done


def test_numbers_alone_begin_where_they_are_told():
    done = decide("heads", [1, 2], [(0, 1), (2, 3)], [None, None], 4, lambda held: "", [0, 2])
    assert done.indices == ((0,), (2, 3)) and not done.contradiction
    done = decide("heads", [None, 1], [(0, 1), (2, 3)], [None, None], 4, lambda held: "")
    assert done.indices == (None, (2,)), "a rank that is missing is taken to hold the plan's share"


# Shapes.

def call(batch, tokens, ends=None, keys=None, rows=None):
    found = CallRows(0, batch, tokens)
    found.rows = list(range(batch * tokens)) if rows is None else rows
    found.ends, found.keys = list(range(batch)) if ends is None else ends, keys or [tokens] * len(found.rows)
    return found


def test_last_rows_are_as_many_as_the_texts_of_a_flat_call():
    flat = call(1, 5, ends=[1, 4])
    assert as_rows(torch.ones(2, 8), flat).shape == (2, 8) and as_rows(torch.ones(1, 8), flat) is None


@pytest.mark.parametrize("shape, batch, tokens, first", [
    ((2, 3, 4), 2, 3, [0, 4, 8]), ((3, 2, 4), 2, 3, [0, 8, 16]),  # tokens first: the second row is the next token
    ((2, 2, 4), 2, 2, [0, 4, 8]), ((3, 1, 4), 1, 3, [0, 4, 8]), ((6, 4), 2, 3, [0, 4, 8]), ((2, 4), 2, 3, [0, 4]),
    ((1, 2, 4), 2, 3, [0, 4]), ((4,), 1, 4, None), ((5, 4), 2, 3, None), ((3, 4), 2, 3, None), ((1, 4), 1, 1, [0])])
def test_rows_of_any_shape(shape, batch, tokens, first):
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found = as_rows(numbers, call(batch, tokens))
    assert (None if found is None else found[:3, 0].tolist()) == first


@pytest.mark.parametrize("shape, batch, tokens, keys, ways", [
    ((6, 8), 2, 3, None, {FLAT: 2}), ((2, 3, 8), 2, 3, None, {FLAT: 2}), ((6, 4), 2, 3, None, {FLAT: 1}),
    ((2, 3, 2, 4), 2, 3, None, {AFTER: 2}), ((2, 2, 3, 4), 2, 3, None, {BEFORE: 2}),
    ((2, 3, 3, 4), 2, 3, None, {AFTER: 3, BEFORE: 3}),  # as many tokens as heads
    ((3, 5, 4), 1, 3, None, {AFTER: 5}), ((5, 3, 4), 1, 3, None, {BEFORE: 5}),
    ((6, 5, 4), 2, 3, None, {AFTER: 5}),  # flat rows of a batch
    ((1, 5, 4), 1, 1, None, {AFTER: 5}), ((1, 1, 1, 4), 1, 1, None, {FLAT: 1, AFTER: 1, BEFORE: 1}),
    ((1, 7, 2, 4), 1, 3, 7, {AFTER: 2}), ((1, 2, 7, 4), 1, 3, 7, {BEFORE: 2}),  # the cache's keys
    ((1, 6, 2, 4), 1, 3, 7, {}), ((4,), 1, 1, None, {}), ((3, 6), 1, 3, None, {}), ((0, 4), 1, 0, None, {}),
    ((3, 2, 3, 4), 2, 3, None, {})])
def test_heads_of_any_shape(shape, batch, tokens, keys, ways):
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found = as_heads(numbers, call(batch, tokens, keys=[keys] * batch * tokens if keys else None), 4)
    assert {way: heads.shape[1] for way, heads in found.items()} == ways
    assert all(len(heads) == batch * tokens and heads.shape[2] == 4 for heads in found.values())
    for heads in found.values():  # the last row is the last token's: the last number is in it, in the last head
        assert heads[-1, -1, -1] == numbers.max()


def test_the_caches_keys_are_its_last_rows_where_all_texts_are_as_long():
    keys = torch.arange(2 * 5 * 1 * 4).reshape(2, 5, 1, 4)
    assert as_heads(keys, call(2, 2, keys=[5] * 4), 4)[AFTER][:, 0, 0].tolist() == [12, 16, 32, 36]
    assert not as_heads(keys, call(2, 2, keys=[5, 5, 4, 4]), 4), "texts of other lengths"
    assert not as_heads(keys, call(2, 2, rows=[1, 2, 3], keys=[5] * 3), 4), "padding"


# Rows.

def add(texts, ids, positions=None, sequences=None):
    ids = torch.tensor(ids)
    return texts.add_call(len(texts.notes), ids, None if positions is None else torch.tensor(positions), sequences)


@pytest.mark.parametrize("before, ids, positions, sequences, places", [
    ([], [7], None, None, [(0, 0)]), ([], [7, 8], [0, 0], None, [(0, 0), (1, 0)]),
    ([], [7, 8, 9], [0, 1, 0], None, [(0, 0), (0, 1), (1, 0)]), ([], [[-1, 7], [8, 9]], None, None,
                                                                 [(0, 0), (1, 0), (1, 1)]),
    ([], [[7, 7], [8, 9]], [[-1, 0], [0, 1]], None, [(0, 0), (1, 0), (1, 1)]),
    ([[1, 2]], [3], [2], None, [(0, 2)]), ([[1, 2]], [3], None, None, [(0, 2)]),
    ([[1, 2], [4]], [3, 5], None, None, [(0, 2), (1, 1)]),  # one new token for every text
    ([[1, 2], [4]], [3, 5], [2, 1], None, [(0, 2), (1, 1)]), ([[1, 2], [4]], [3, 5], [0, 1], None, [(2, 0), (2, 1)]),
    ([[1, 2], [4]], [5, 3], [1, 2], None, [(1, 1), (0, 2)]),  # told by where they begin
    ([[1, 2]], [1, 2, 3], None, None, [(0, 0), (0, 1), (0, 2)]),  # the same text once more
    ([[1, 2]], [1, 3], None, None, [(1, 0), (1, 1)]), ([[1, 2]], [3, 4], [2, 3], None, [(0, 2), (0, 3)]),
    ([[1, 2, 3]], [1, 2], [0, 1], None, [(0, 0), (0, 1)]),
    ([], [7, 8, 9], None, [5, 6, 5], [(0, 0), (1, 0), (0, 1)]), ([], [[7], [8]], None, [3, 3], [(0, 0), (0, 1)]),
    ([], [[7, 8], [9, 1]], None, [3, 4], [(0, 0), (0, 1), (1, 0), (1, 1)])])
def test_which_token_each_row_is(before, ids, positions, sequences, places):
    texts = Texts()
    if before:
        add(texts, sum(before, []), [position for text in before for position in range(len(text))])
    found = add(texts, ids, positions, sequences)
    assert [place for _, place in sorted(zip(found.rows, found.places))] == places and not texts.notes
    assert all(texts.ids[number][:len(text)] == text for number, text in enumerate(before)), "nothing is forgotten"
    assert found.keys == [max(p for s, p in found.places if s == number) + 1 for number, _ in found.places]


def test_a_sequence_with_a_number_goes_on_or_comes_again():
    texts = Texts()
    add(texts, [1, 2], sequences=[9, 9])
    assert add(texts, [3], sequences=[9]).places == [(0, 2)] and texts.ids == [[1, 2, 3]] and not texts.again
    assert add(texts, [1, 2, 3, 4], sequences=[9] * 4).places[0] == (0, 0) and texts.again == {0: {0: 3}}
    assert add(texts, [1, 2], [4, 5], [9, 9]).places == [(0, 4), (0, 5)], "said to begin behind"
    assert add(texts, [1], sequences=[9]).places == [(0, 6)], "one token is never the text once more"


def test_numbers_that_fit_nothing_and_texts_without_a_beginning():
    for ids, sequences in (([1, 2], [1]), ([[1, 2], [3, 4]], [1, 2, 3]), ([[1, 2], [3, 4]], [1])):
        with pytest.raises(PlacementError, match="sequence numbers for"):
            add(Texts(), ids, sequences=sequences)
    texts = Texts()
    assert add(texts, [5, 6], [3, 4]).places == [(0, 0), (0, 1)] and "begins at position 3" in texts.notes[0]
    texts = Texts()
    add(texts, [1, 2, 4], [0, 1, 0])
    assert add(texts, [3, 5, 6], [7, 8, 9]).places == [(2, 0), (2, 1), (2, 2)] and len(texts.notes) == 1, "which one?"
    assert add(texts, [3], [9]).places == [(0, 2)], "one token goes on with the first"
    texts = Texts()
    assert add(texts, [5, 6], [3, 4, 5]).declared is None and "were ignored" in texts.notes[0]


@pytest.mark.parametrize("shape, spread", [(None, None), ((2, 3), [0, 1, 2, 3, 4, 5]), ((6,), [0, 1, 2, 3, 4, 5]),
                                           ((3,), [0, 1, 2, 0, 1, 2]), ((1, 3), [0, 1, 2, 0, 1, 2]), ((2,), None)])
def test_positions_of_any_shape(shape, spread):
    assert _spread(shape and torch.arange(torch.Size(shape).numel()).reshape(shape), 2, 3) == spread


def test_the_inputs_of_a_call_are_those_at_its_door():
    def entry(path, tensor, kind="in"):
        return Some(name="inner" * (path in ("x", "positions")), kind=kind, path=path, dtype=tensor.dtype,
                    shape=tensor.shape, tensor=lambda: tensor)
    ids, positions, flags = torch.tensor([3, 4]), torch.tensor([0, 1]), torch.tensor([True, True])
    door = [entry("attention_mask", flags), entry("input_ids", ids), entry("position_ids", positions)]
    inner = [entry("x", torch.ones(2, 4)), entry("positions", positions + 5)]

    def asked(*entries, given=(None, None)):
        return call_inputs(Some(input_ids=given[0], positions=given[1], entries=entries))[:2]
    assert asked(*door, *inner) == (ids, positions) and asked(inner[0]) == (None, None)
    assert asked(door[1], inner[0]) == (ids, None) and asked(entry("cache", ids), door[1])[0] is ids
    assert asked(*door, given=(positions, None))[0] is positions and asked(*door, given=(None, ids))[1] is ids
    assert asked(entry("input_ids", torch.ones(1, 1, 2).long()))[0] is None


@pytest.mark.parametrize("ids", [torch.tensor(3), torch.zeros(1, 2, 3, dtype=torch.long)])
def test_token_ids_of_another_shape_are_refused(ids):
    with pytest.raises(PlacementError, match=r"token ids of shape \[.*\]; they are \[tokens\] or \[batch, tokens\]"):
        Texts().add_call(0, ids, None, None)

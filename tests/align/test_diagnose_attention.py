"""What attention makes of right queries, keys and values: each mistake by its name and its numbers, a near miss not."""

from functools import partial

import pytest
import torch
from helpers import real_cases
from helpers.real_cases import AT, RealRun, asks_for

DIM, GROUP = 6, 2
KEYS = [4] * 4 + [5, 6, 7] + [3] * 3 + [4, 5]  # prompts of 4 and of 3 tokens; the others were decoded one by one
asked = partial(real_cases.asked, name=AT + "attn")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """8 query heads and 4 KV heads over 2 ranks; a head has 6 numbers, the hidden size is 48."""
    return RealRun(tmp_path_factory.mktemp("model") / "m", layers=3, heads=8, kv_heads=4, head_dim=DIM, hidden=48)


def attend(run, *, scale=DIM ** -0.5, sees=lambda q, k, keys: k <= q, reads=lambda h: h // GROUP, reads_v=None,
           weigh=None, v_of=lambda run, rank: run.x(AT + "v", rank), keys=KEYS, across=False):
    """Attention by hand, head by head and row by row; ``sees(position, key's position, keys there were)``."""
    every = {part: torch.cat([run.x(AT + "k_rope", r) if part == "k" else v_of(run, r) for r in range(run.tp)], 1)
             for part in "kv"}
    places, held = run.recording.places, []
    for rank in range(run.tp):
        q, out = run.x(AT + "q_rope", rank), []
        for row, (s, p) in enumerate(places):
            mine = [i for i, (t, _) in enumerate(places) if across or t == s]
            visible = torch.tensor([(i <= row) if across else bool(sees(p, places[i][1], keys[row])) for i in mine])
            heads = []
            for local, head in enumerate(run.own(AT + "attn", rank)):
                k, v = every["k"][mine][:, reads(head)], every["v"][mine][:, (reads_v or reads)(head)]
                scores = (k @ q[row, local]) * scale
                if weigh is None:
                    heads.append(torch.softmax(scores.masked_fill(~visible, float("-inf")), 0) @ v)
                else:
                    heads.append(weigh(scores, visible) @ v)
            out.append(torch.stack(heads))
        held.append(torch.stack(out))
    return held


def test_the_run_itself_is_right(run):
    assert not any(diff.guilty for diff in run.diffs().values())
    for rank, held in enumerate(attend(run)):
        assert torch.allclose(held, run.x(AT + "attn", rank), atol=1e-5)


SOFTMAX = asks_for("softmax_scale")


@pytest.mark.parametrize("scale", [1.0, 1 / 6, 6 ** 0.5, 48 ** -0.5, 0.3, 0.11, 2.0])
def test_another_scale_is_read_off(run, scale):
    found = asked(run, SOFTMAX, attend(run, scale=scale))
    assert found.fault == "softmax_scale" and found.numbers == {"scale": pytest.approx(scale, rel=1e-4)}


def test_the_right_scale_of_hidden_size_by_heads_is_no_other(run):
    """Here hidden / heads is the head's size: it must not be named, whatever is wrong."""
    found = asked(run, SOFTMAX, attend(run, scale=6 ** -0.5 * 1.1))
    assert found.numbers["scale"] == pytest.approx(0.449, rel=1e-3)
    for scale in (6 ** -1.5 * 0.9, 6 ** 0.5 * 1.1):  # beyond what any mistake makes of it
        assert SOFTMAX(run.case(AT + "attn", attend(run, scale=scale))) is None


@pytest.mark.parametrize("size", [1, 2, 5, 6])
def test_a_window_by_its_size(run, size):
    found = asked(run, asks_for("sliding_window"), attend(run, sees=lambda q, k, keys: q - size < k <= q))
    assert found.fault == "sliding_window" and found.numbers == {"window": size}


def softmax(scores):
    return torch.softmax(scores, 0)


@pytest.mark.parametrize("weigh", [lambda s, visible: softmax(s * visible), lambda s, visible: softmax(s) * visible,
    lambda s, visible: softmax(s + (~visible).float()), lambda s, visible: softmax(s - (~visible).float())])
def test_a_mask_of_which_something_else_was_made(run, weigh):
    found = asked(run, asks_for("mask_misused"), attend(run, weigh=weigh))
    assert found.fault == "mask_misused"


def right_weights(scores, visible):
    return softmax(scores.masked_fill(~visible, float("-inf")))


@pytest.mark.parametrize("how, fault", [(dict(weigh=lambda s, visible: s * visible), "softmax_missing"),
    (dict(weigh=lambda s, visible: right_weights(s / 6 ** -0.5, visible) * 6 ** -0.5), "softmax_scale"),
    (dict(v_of=lambda run, rank: run.x(AT + "k_rope", rank)), "keys_for_values")])
def test_weights_and_values_of_another_kind(run, how, fault):
    found = asked(run, asks_for("softmax_missing"), attend(run, **how))
    assert found.fault == fault


def test_queries_that_come_out_as_they_went_in(run):
    held = [run.x(AT + "q_rope", rank) for rank in range(2)]
    found = asked(run, asks_for("softmax_missing"), held)
    assert found.fault == "attention_missing"


def test_sequences_that_see_each_other(run):
    found = asked(run, asks_for("cross_sequence_attention"), attend(run, across=True))
    assert found.fault == "cross_sequence_attention"


@pytest.mark.parametrize("inside", [False, True])
def test_right_numbers_in_other_places(run, inside):
    held = []
    for x in attend(run):
        parts = [x.transpose(1, 2).reshape(x.shape)] if inside else [
            part.transpose(0, 1).reshape(part.shape) for part in x.split([7, 5])]
        held.append(torch.cat(parts))
    found = asked(run, asks_for("heads_not_transposed"), held)
    assert found.fault == "heads_not_transposed"


OWN = [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("reads, both", [([0, 1, 2, 3, 0, 1, 2, 3], "kv"), ([0] * 8, "kv"),
    ([0, 0, 1, 1, 2, 3, 3, 3], "kv"), ([0, 1, 2, 3, 0, 1, 2, 3], "v"), ([0] * 8, "k")])
def test_query_heads_that_read_other_keys_or_values(run, reads, both):
    def mine(part):
        return (reads if part in both else OWN).__getitem__
    found = asked(run, asks_for("query_to_kv"), attend(run, reads=mine("k"), reads_v=mine("v")))
    assert found.fault == "query_to_kv"
    head = next(h for h in range(8) if reads[h] != OWN[h])
    assert found.numbers == {"head": head, "reads": reads[head]}


# The mask.

def test_no_mask_at_all(run):
    keys = [7] * 7 + [5] * 5
    found = asked(run, asks_for("no_mask", "mask_off_by_one"), attend(run, sees=lambda q, k, keys: k < keys, keys=keys))
    assert found.fault == "no_mask"
    found = asked(run, asks_for("no_mask"), attend(run, sees=lambda q, k, keys: k < keys), num_keys=KEYS)
    assert found.fault == "no_mask", "of what there was: the later tokens are not there yet"


@pytest.mark.parametrize("shift", [1, -1])
def test_a_mask_that_is_a_step_off(run, shift):
    keys = [7] * 7 + [5] * 5
    held = attend(run, sees=lambda q, k, keys: k < keys and k <= q + shift or q + k == 0, keys=keys)
    found = asked(run, asks_for("no_mask", "mask_off_by_one"), held)
    assert found.fault == "mask_off_by_one" and found.numbers == {"shift": shift}


def test_copies_of_repeated_heads_in_the_place_of_others(run):
    """A rank's four copies 0 0 1 1 stand in the cache, of which the first two are read as its KV heads 0 and 1."""
    found = asked(run, asks_for("repeated_kv_stored"), attend(run, reads=lambda h: h // 4 * 2))
    assert found.fault == "repeated_kv_stored"
    case = run.case(AT + "attn", attend(run, reads=lambda h: h // 4 * 2))
    case.indices = lambda name, rank: (range(4) if rank == 0 else range(4, 8)) if name == "attn" else (
        (0, 1) if rank == 0 else (0, 3))
    assert asks_for("repeated_kv_stored")(case) is None, "query heads 4 and 5 read a KV head that is not here"


# Several calls: prompts of 3 and 2 tokens, then two at once, then one by one.

CALLS = [3, 3, 3, 5, 5, 6, 7, 2, 2, 4, 4, 5]
BEGIN = [0, 0, 0, 3, 3, 5, 6, 0, 0, 2, 2, 4]
PROMPT = [3] * 7 + [2] * 5


def by_row(run, see):
    """Attention in which row ``row`` at position q sees key k if ``see(row, q, k)``."""
    every = [attend(run, sees=lambda q, k, keys, row=row: see(row, q, k)) for row in range(12)]
    return [torch.stack([every[row][rank][row] for row in range(12)]) for rank in range(2)]


RULES = {
    "own": lambda row, q, k: BEGIN[row] <= k <= q, "diagonal": lambda row, q, k: k <= q - BEGIN[row],
    "unmasked": lambda row, q, k: k < CALLS[row] if BEGIN[row] else k <= q,
    "decoded": lambda row, q, k: k <= q and (k < (5 if row < 7 else 4) or k >= BEGIN[row]),
    "first": lambda row, q, k: k <= q and (k < PROMPT[row] or k >= BEGIN[row])}


@pytest.mark.parametrize("rule, fault", [("own", "cache_not_read"), ("diagonal", "mask_without_past"),
    ("unmasked", "no_mask"), ("decoded", "cache_rows_lost"), ("first", "cache_rows_lost")])
def test_what_later_calls_see_of_the_past(run, rule, fault):
    asks, held = asks_for("cache_not_read"), by_row(run, RULES[rule])
    found = asked(run, asks, held, num_keys=CALLS)
    assert found.fault == fault
    assert asks(run.case(AT + "attn", held)) is None, "of one call nothing is past"


def test_a_softmax_over_the_queries_of_a_call(run):
    held = [torch.zeros_like(run.x(AT + "attn", rank)) for rank in range(2)]
    for rank in range(2):
        for rows in (range(3), (3, 4), (5,), (6,), (7, 8), (9, 10), (11,)):
            first = 0 if rows[0] < 7 else 7
            for local, head in enumerate(run.own(AT + "attn", rank)):
                whole = {part: torch.cat([run.x(AT + name, r) for r in range(2)], 1)[first:rows[-1] + 1, head // GROUP]
                         for part, name in (("k", "k_rope"), ("v", "v"))}
                scores = run.x(AT + "q_rope", rank)[list(rows), local] @ whole["k"].T * DIM ** -0.5
                hidden = torch.arange(len(whole["k"]))[None] > run.positions[list(rows)][:, None]
                weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), 0).nan_to_num()
                held[rank][list(rows), local] = weights @ whole["v"]
    found = asked(run, asks_for("softmax_dim"), held, num_keys=CALLS)
    assert found.fault == "softmax_dim"


# In one call with token 5 of prompt 0 token 4 of prompt 1 is decoded, behind it or before it.
TOGETHER = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (3, 0), (0, 3), (0, 4), (1, 2), (1, 3), (2, 1)]
OTHERS = [*TOGETHER[:5], (2, 1), *TOGETHER[6:11], (2, 0)]
APART = [*TOGETHER[:11], (4, 0)]


@pytest.mark.parametrize("fault", ["mask_inverted", "softmax_dim"])
def test_in_decode_calls_a_sequence_that_is_filled_up_may_be_nan(run, fault):
    """Token 4 of prompt 1 is decoded beside token 5 of prompt 0, which has one key more."""
    held = attend(run)
    for rank in range(2):
        values = torch.cat([run.x(AT + "v", r) for r in range(2)], 1)
        for local, head in enumerate(run.own(AT + "attn", rank)):
            own = {row: values[first:row + 1, head // GROUP] for row, first in ((5, 0), (6, 0), (11, 7))}
            lost = torch.full((DIM,), float("nan"))
            for row, v in own.items():
                held[rank][row, local] = {"mask_inverted": v[-1] if row == 11 else lost,
                                          "softmax_dim": lost if row == 11 else v.sum(0)}[fault]
    case = run.case(AT + "attn", held, num_keys=CALLS, origins=TOGETHER, nan=9)
    assert asks_for(fault)(case.with_(scope=case.decoded)).fault == fault
    assert asks_for(fault)(case) is None, "the prompts are right"
    held[0][11] += 1
    case = run.case(AT + "attn", held, num_keys=CALLS, origins=TOGETHER, nan=9)
    assert (asks_for(fault)(case.with_(scope=case.decoded)) is None) is (fault == "mask_inverted")


def test_a_mask_the_wrong_way_round(run):
    held = attend(run, sees=lambda q, k, keys: q < k < keys, keys=[7] * 7 + [5] * 5)
    assert held[0][[6, 11]].isnan().all() and held[0][:6].isfinite().all()
    assert asked(run, asks_for("mask_inverted"), held, nan=24).numbers == {"nan_share": 0.24, "nan": 24}


def seen(run, keys):
    """Token 5 of prompt 0 or token 4 of prompt 1 sees so many keys; a newer one than its own is its own once more."""
    right, rows = attend(run), {}
    for row, count in keys.items():
        first = 0 if row < 7 else 7
        own = row - first
        mine = [first + min(key, own) for key in range(count)]
        for rank in range(2):
            whole = {name: torch.cat([run.x(AT + name, r) for r in range(2)], 1) for name in ("k_rope", "v")}
            out = []
            for local, head in enumerate(run.own(AT + "attn", rank)):
                k, v = (whole[name][mine, head // GROUP] for name in ("k_rope", "v"))
                out.append(torch.softmax(k @ run.x(AT + "q_rope", rank)[row, local] * DIM ** -0.5, 0) @ v)
            rows[rank, row] = torch.stack(out)
    for (rank, row), one in rows.items():
        right[rank][row] = one
    return right


@pytest.mark.parametrize("origins, keys, position", [
    (TOGETHER, {11: 6}, 4), (OTHERS, {5: 5}, 5), (TOGETHER, {5: 5}, None), (TOGETHER, {6: 5}, None), (OTHERS, {}, None),
    (APART, {11: 6}, None)])
def test_a_row_of_a_batch_that_sees_as_many_keys_as_the_first(run, origins, keys, position):
    held = seen(run, keys)
    held[0][0, 0] += 0 if keys else 1
    found = (asked if position else lambda run, asks, *held, **more: asks(run.case(AT + "attn", *held, **more)))(
        run, asks_for("mask_of_another_row"), held, num_keys=CALLS, origins=origins)
    assert (found and found.numbers) == (position and {"position": position})


def early(run, row, holds):
    """Row ``row`` of prompt 0 finds the keys of these tokens in its slots (None: nothing was ever written there)."""
    held = attend(run)
    for rank in range(2):
        whole = {name: torch.cat([run.x(AT + name, r) for r in range(2)], 1) for name in ("k_rope", "v")}
        for local, head in enumerate(run.own(AT + "attn", rank)):
            k, v = (torch.stack([torch.zeros(DIM) if at is None else whole[name][at, head // GROUP] for at in holds])
                    for name in ("k_rope", "v"))
            held[rank][row, local] = torch.softmax(k @ run.x(AT + "q_rope", rank)[row, local] * DIM ** -0.5, 0) @ v
    return held


def test_a_decoded_token_that_was_written_one_slot_too_early(run):
    held = early(run, 5, [0, 1, 2, 3, 5, None])  # its own key lies over its predecessor's, its own slot is empty
    found = asked(run, asks_for("slot_off_by_one"), held, num_keys=CALLS)
    assert found.fault == "slot_off_by_one" and found.numbers == {"position": 5}
    for holds in ([0, 1, 2, 3, 4, None], [0, 1, 2, 3, 5, 5], [0, 1, 2, 4, 5, None]):
        assert asks_for("slot_off_by_one")(run.case(AT + "attn", early(run, 5, holds), num_keys=CALLS)) is None
    assert asks_for("slot_off_by_one")(run.case(AT + "attn", held)) is None, "no token was decoded"


def test_a_slot_that_a_decoded_token_left_to_the_one_behind_it(run):
    """Token 4 was decoded, too: its key lies at 3, and that of 5 at 4."""
    alone = [4, 4, 4, 4, 5, 6, 7, 2, 2, 4, 4, 5]
    held = early(run, 4, [0, 1, 2, 4, None])
    found = asked(run, asks_for("slot_off_by_one"), held, num_keys=alone)
    assert found.numbers == {"position": 4}


# Keys and values that were exchanged or turned.

def rotated(run, x, positions=None):
    positions = run.positions if positions is None else positions
    theta = run.config.hf.rope_parameters["rope_theta"]
    angles = positions[:, None] * theta ** (-torch.arange(0, DIM, 2) / DIM)
    cos, sin = (torch.cat([table, table], 1)[:, None] for table in (angles.cos(), angles.sin()))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def test_values_that_were_rotated_too(run):
    held = attend(run, v_of=lambda run, rank: rotated(run, run.x(AT + "v", rank)))
    assert asked(run, asks_for("rope_on_values"), held).fault == "rope_on_values"


def test_keys_and_values_that_change_places_behind_the_projection(run):
    asks = asks_for("qkv_order")
    turned = [rotated(run, run.x(AT + "v", rank)) for rank in range(2)]
    found = asked(run, asks, turned, name=AT + "k_rope")
    assert found.fault == "qkv_order"
    # Seen at attention: the keys were recorded as they came in, and only the values are others.
    held = attend(run, v_of=lambda run, rank: run.x(AT + "k", rank))
    assert asked(run, asks, held).fault == "qkv_order"
    assert asks(run.case(AT + "attn", held, num_keys=CALLS)) is None, "what lies in a cache before it is turned?"

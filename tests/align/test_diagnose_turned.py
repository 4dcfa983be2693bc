"""Rotations of a real run with something else in them: each by its name and its words, a near miss not."""

import pytest
import torch
from helpers.checkpoints import ROPES
from helpers.real_cases import AT, TEXTS, RealRun, asked, asks_for

from tplab.align.diagnose.altered import unaltered

DIM, HIDDEN = 8, 24
TURNED = pytest.mark.parametrize("part", ["q", "k"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """6 query heads and 3 KV heads over 3 ranks, each of 8 numbers; queries and keys are normed."""
    return RealRun(tmp_path_factory.mktemp("model") / "m", "qwen3", 3, layers=2, heads=6, kv_heads=3, head_dim=DIM,
                   hidden=HIDDEN, attention_bias=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """4 query heads and 2 KV heads over 2 ranks, nothing normed."""
    return RealRun(tmp_path_factory.mktemp("model") / "m", layers=2, heads=4, kv_heads=2, head_dim=DIM, hidden=HIDDEN)


def turned(run, part, *, theta=None, positions=None, frequencies=None, scale=1.0, swap=None, source=None, size=DIM):
    """q or k after RoPE, pair by pair; ``swap(x, other, cos, sin)`` puts the terms together otherwise."""
    theta = theta or theta_of(run)
    positions = run.positions if positions is None else positions
    if frequencies is None:
        frequencies = theta ** (-torch.arange(0, size, 2) / size)
    angles = positions[:, None] * frequencies
    cos, sin = (torch.cat([table, table], 1)[:, None] * scale for table in (angles.cos(), angles.sin()))
    held = []
    for rank in range(run.tp):
        x = before(run, part, rank) if source is None else source(rank)
        a, b = x.chunk(2, -1)
        other = torch.cat([-b, a], -1)
        held.append(x * cos + other * sin if swap is None else swap(x, other, cos, sin))
    return held


def before(run, part, rank):
    return run.x(AT + (f"{part}_norm" if run.config.qk_norm else part), rank)


def theta_of(run):
    return run.config.hf.rope_parameters["rope_theta"]


@TURNED
def test_the_rotation_by_hand_is_right(run, plain, part):
    for one in (run, plain):
        for rank, held in enumerate(turned(one, part)):
            assert torch.allclose(held, one.x(f"{AT}{part}_rope", rank), atol=1e-5)


@TURNED
def test_what_was_not_rotated_or_in_pairs_or_by_head(run, plain, part):
    for one in (run, plain):
        point, cos = f"{part}_rope", [before(one, part, rank) for rank in range(one.tp)]
        found = asked(one, asks_for("rope_missing"), cos, AT + point)
        assert found.names == ("rope_missing", "rope_swallowed")
        angles = one.positions[:, None] * theta_of(one) ** (-torch.arange(0, DIM, 2) / DIM)
        c, s = angles.cos()[:, None], angles.sin()[:, None]
        held = [torch.stack((x[..., 0::2] * c - x[..., 1::2] * s, x[..., 0::2] * s + x[..., 1::2] * c), -1).flatten(-2)
                for x in cos]
        found = asked(one, asks_for("rope_pairs"), held, AT + point)
        assert found.fault == "rope_pairs"


def test_angles_of_heads(plain):
    """Head h of a rank is turned as if it stood at position h."""
    held = []
    for rank in range(2):
        x = before(plain, "q", rank)
        angles = torch.arange(x.shape[1])[:, None] * theta_of(plain) ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = (torch.cat([t, t], 1)[None] for t in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, -1)
        held.append(x * cos + torch.cat([-b, a], -1) * sin)
    assert asked(plain, asks_for("rope_over_heads"), held, AT + "q_rope").fault == "rope_over_heads"


def test_angles_of_more_heads_than_rows(tmp_path):
    """Two rows and four heads: heads 2 and 3 are turned as 0 and 1, since the tables begin again."""
    run = RealRun(tmp_path / "m", layers=2, heads=8, kv_heads=2, head_dim=DIM, hidden=HIDDEN, texts=[[5, 6]])
    held = []
    for rank in range(2):
        x = before(run, "q", rank)
        angles = torch.tensor([0, 1, 0, 1])[:, None] * theta_of(run) ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = (torch.cat([t, t], 1)[None] for t in (angles.cos(), angles.sin()))
        a, b = x.chunk(2, -1)
        held.append(x * cos + torch.cat([-b, a], -1) * sin)
    assert asked(run, asks_for("rope_over_heads"), held, AT + "q_rope").fault == "rope_over_heads"


@TURNED
@pytest.mark.parametrize("swap", [lambda x, other, cos, sin: x * sin + other * cos, lambda x, other, cos, sin: x * cos,
    lambda x, other, cos, sin: other * sin, lambda x, other, cos, sin: x * cos + x.roll(4, -1) * sin,
    lambda x, other, cos, sin: x * cos[..., :4].repeat_interleave(2, -1) + other * sin[..., :4].repeat_interleave(
        2, -1)])
def test_terms_that_are_others(run, part, swap):
    found = asked(run, asks_for("rope_terms"), turned(run, part, swap=swap), AT + f"{part}_rope")
    assert found.fault == "rope_terms"


@TURNED
def test_exponents_with_the_wrong_sign(run, part):
    held = turned(run, part, frequencies=theta_of(run) ** (torch.arange(0, DIM, 2) / DIM))
    found = asked(run, asks_for("rope_terms"), held, AT + f"{part}_rope")
    assert found.fault == "rope_terms"


@pytest.mark.parametrize("first, back", [(True, True), (True, False), (False, True)])
def test_a_view_where_heads_and_tokens_are_exchanged(plain, first, back):
    def view(x):
        return x.reshape(x.shape[1], x.shape[0], DIM).transpose(0, 1) if first else x
    held = turned(plain, "q", source=lambda rank: view(before(plain, "q", rank)))
    held = [x.transpose(0, 1).reshape(x.shape) if back else x for x in held]
    found = asked(plain, asks_for("rope_viewed"), held, AT + "q_rope")
    assert found.fault == "rope_viewed"


FREQUENCIES = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)


@TURNED
@pytest.mark.parametrize("how, fault", [(dict(frequencies=-FREQUENCIES), "rope_direction"),
    (dict(frequencies=2 * FREQUENCIES), "rope_twice"),
    (dict(frequencies=FREQUENCIES * torch.tensor([1, 0, 0, 0])), "rope_partial"),
    (dict(frequencies=FREQUENCIES * torch.tensor([1, 1, 0, 0])), "rope_partial"),
    (dict(frequencies=FREQUENCIES / 3), "rope_scaling"), (dict(frequencies=FREQUENCIES * 1.5), "rope_scaling")])
def test_frequencies_that_are_others(run, part, how, fault):
    found = asked(run, asks_for("rope_twice"), turned(run, part, **how), AT + f"{part}_rope")
    assert found.fault == fault


@TURNED
@pytest.mark.parametrize("theta", [5e5, 123.0])
def test_another_theta(run, part, theta):
    found = asked(run, asks_for("rope_theta"), turned(run, part, theta=theta), AT + f"{part}_rope")
    assert found.fault == "rope_theta" and found.numbers == {"theta": pytest.approx(theta, rel=1e-3)}


@pytest.mark.parametrize("size", [4, 24])
def test_another_size_in_the_exponent(run, size):
    held = turned(run, "q", frequencies=10000.0 ** (-torch.arange(0, DIM, 2) / size))
    found = asked(run, asks_for("rope_theta"), held, AT + "q_rope")
    assert found.fault == "rope_theta" and found.numbers == {"size": size}


@pytest.mark.parametrize("size, whole", [(4, 4), (4, 8), (2, 2), (2, 8)])
def test_only_the_front_of_a_head(plain, size, whole):
    frequencies = 10000.0 ** (-torch.arange(0, size, 2) / whole)
    front = turned(plain, "q", frequencies=frequencies, source=lambda rank: before(plain, "q", rank)[..., :size])
    held = [torch.cat([x, before(plain, "q", rank)[..., size:]], -1) for rank, x in enumerate(front)]
    found = asked(plain, asks_for("rope_partial"), held, AT + "q_rope")
    assert found.fault == "rope_partial"


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """cos and sin have a factor of their own; theta is no default."""
    return RealRun(tmp_path_factory.mktemp("model") / "m", "llama", 2, layers=2, heads=4, kv_heads=2, head_dim=DIM,
                   hidden=HIDDEN, rope=ROPES["yarn"] | {"rope_theta": 5e4})


def tables(run, **changed):
    """cos and sin ``[rows, dim]`` as transformers has them for the run's positions."""
    case = run.case(AT + "q_rope", [run.x(AT + "q_rope", rank) for rank in range(run.tp)])
    return [table[0] for table in unaltered(case, 0).rotary(**changed).values()]


@pytest.mark.parametrize("power", [0, 2])
def test_a_factor_of_cos_and_sin(scaled, power):
    cos, sin = tables(scaled)
    factor = (cos[0] ** 2 + sin[0] ** 2).sqrt()[0]
    assert factor > 1.01
    held = [x / factor ** (1 - power) for x in (scaled.x(AT + "q_rope", rank) for rank in range(2))]
    found = asked(scaled, asks_for("rope_twice"), held, AT + "q_rope")
    assert found.fault == "rope_attention_factor"


@pytest.mark.parametrize("changed, fault", [({"rope_theta": 10000.0}, "rope_default_theta"),
    ({"rope_type": "default"}, "rope_scaling_ignored")])
def test_parameters_that_were_left_out(scaled, changed, fault):
    cos, sin = (table[:, None] for table in tables(scaled, **changed))
    held = []
    for rank in range(2):
        x = scaled.x(AT + "q", rank)
        a, b = x.chunk(2, -1)
        held.append(x * cos + torch.cat([-b, a], -1) * sin)
    asks = asks_for("rope_default_theta") if fault == "rope_default_theta" else asks_for("rope_scaling_ignored")
    found = asked(scaled, asks, held, AT + "q_rope")
    assert found.fault == fault


@pytest.mark.parametrize("dtype, name, most", [(torch.bfloat16, "bfloat16", 256), (torch.float16, "float16", 2048)])
@pytest.mark.parametrize("what", ["tables", "frequencies", "angles", "all"])
def test_tables_of_too_few_digits(plain, dtype, name, most, what):
    frequencies = FREQUENCIES.to(dtype).float() if what in ("frequencies", "all") else FREQUENCIES
    angles = plain.positions[:, None].float() * frequencies
    if what in ("angles", "all"):
        angles = angles.to(dtype).float() if what == "angles" else (
            plain.positions[:, None].to(dtype) * FREQUENCIES.to(dtype)).float()
    cos, sin = (torch.cat([t, t], 1)[:, None] for t in (angles.cos(), angles.sin()))
    if what in ("tables", "all"):
        cos, sin = cos.to(dtype).float(), sin.to(dtype).float()
    held = []
    for rank in range(2):
        a, b = before(plain, "q", rank).chunk(2, -1)
        held.append(torch.cat([a, b], -1) * cos + torch.cat([-b, a], -1) * sin)
    found = asks_for("rope_dtype")(plain.case(AT + "q_rope", held))
    assert found.fault == "rope_dtype"


@pytest.mark.parametrize("dtype, name, most", [(torch.bfloat16, "bfloat16", 256), (torch.float16, "float16", 2048)])
def test_positions_of_too_few_digits(plain, dtype, name, most):
    """The rows are taken to stand behind the last position that the dtype counts."""
    positions = torch.arange(most - 3, most + 9)
    frequencies = 1 / 10000.0 ** (torch.arange(0, DIM, 2).float() / DIM)  # as transformers has them, to the last bit
    held = turned(plain, "q", positions=positions.to(dtype).float(), frequencies=frequencies)
    case = plain.case(AT + "q_rope", held)
    assert case.wrong_ranks == (0, 1) and case.tolerance  # by where the rows stand in truth
    case.frame.positions = positions
    found = asks_for("rope_dtype")(case)
    assert found.fault == "rope_dtype"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_a_smaller_dtype_that_are_not_the_right_ones(plain, dtype):
    """Each one of the dtype's, and off by more than its last digits."""
    held = plain.changed(AT + "q", lambda x, rank: x.to(dtype).float())
    assert asks_for("low_precision")(plain.case(AT + "q", held)).fault == "low_precision"
    off = [(x + 8 * torch.finfo(dtype).eps * x.abs().max()).to(dtype).float() for x in held]
    assert asks_for("low_precision")(plain.case(AT + "q", off)) is None


def test_frequencies_that_depend_on_the_length_are_not_tried_with_fewer_digits(tmp_path):
    run = RealRun(tmp_path / "m", layers=2, heads=4, kv_heads=2, head_dim=DIM, hidden=HIDDEN, rope="dynamic")
    assert run.config.hf.rope_parameters["rope_type"] == "dynamic"
    cos, sin = (table[:, None].to(torch.bfloat16).float() for table in tables(run))
    held = []
    for rank in range(2):
        a, b = run.x(AT + "q", rank).chunk(2, -1)
        held.append(torch.cat([a, b], -1) * cos + torch.cat([-b, a], -1) * sin)
    assert asks_for("rope_dtype")(run.case(AT + "q_rope", held)) is None


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "bfloat16"), (torch.float16, "float16")])
def test_queries_of_too_few_digits(plain, dtype, name):
    held = turned(plain, "q", source=lambda rank: before(plain, "q", rank).to(dtype).float())
    found = asked(plain, asks_for("low_precision"), held, AT + "q_rope")
    assert found.fault == "low_precision"
    held = [plain.x(AT + "q", rank).to(dtype).float() for rank in range(2)]
    found = asked(plain, asks_for("low_precision"), held, AT + "q")
    assert found.fault == "low_precision"


@pytest.mark.parametrize("shift, whole", [(1, False), (-1, False), (1, True), (-1, True)])
def test_rows_of_the_token_beside(plain, shift, whole):
    parts = [12] if whole else list(map(len, TEXTS))
    held = plain.changed(AT + "q", lambda x, rank: torch.cat([p.roll(shift, 0) for p in x.split(parts)]))
    found = asked(plain, asks_for("ids_shifted", "rows_shifted"), held, AT + "q")
    assert found.fault == "rows_shifted" and found.numbers == {"shift": shift}


def test_of_two_rows_it_is_unknown_which_is_the_one_before(tmp_path):
    run = RealRun(tmp_path / "m", layers=2, heads=4, kv_heads=2, head_dim=DIM, hidden=HIDDEN, texts=[[5, 6]])
    held = run.changed(AT + "q", lambda x, rank: x.roll(1, 0))
    assert asks_for("ids_shifted", "rows_shifted")(run.case(AT + "q", held)) is None


# Positions.

CALLS = [3, 3, 3, 5, 5, 6, 7, 2, 2, 4, 4, 5]  # prompts of 3 and 2 tokens, two at once, then one by one
ALONE = torch.tensor([5, 6, 11])


def moved(kind, positions):
    positions = positions.clone()
    if kind == "one too far":
        positions[ALONE] += 1
    elif kind == "from 0":
        positions[ALONE] = 0
    elif kind == "per call":
        positions -= torch.tensor([0, 0, 0, 3, 3, 5, 6, 0, 0, 2, 2, 4])
    elif kind == "prompts":
        positions[[row for row in range(12) if row not in ALONE]] = 0
    elif kind == "one":
        positions[4] = 2
    return positions


@pytest.mark.parametrize("kind, fault, first, used", [("one too far", "decode_position_off_by_one", 5, 6),
    ("from 0", "decode_position_restarted", 5, 0), ("per call", "rope_positions", 3, 0),
    ("prompts", "rope_missing", 1, 0), ("one", "rope_positions", 4, 2)])
def test_as_which_positions_tokens_were_turned(run, kind, fault, first, used):
    held = turned(run, "q", positions=moved(kind, run.positions))
    found = asked(run, asks_for("rope_positions"), held, AT + "q_rope", num_keys=CALLS)
    assert found.fault == fault
    assert found.numbers == {"first_token": first, "position": first, "used": used}
    found = asked(run, asks_for("rope_positions"), held, AT + "q_rope")
    assert found.fault in ("rope_positions", None), "nothing was decoded"


@pytest.mark.parametrize("kind, fault", [("one too far", "decode_position_off_by_one"),
    ("from 0", "decode_position_restarted"), ("per call", "rope_positions")])
def test_wrong_positions_that_only_attention_shows(plain, kind, fault):
    """Queries and keys were not recorded behind the rotation."""
    q, k = (turned(plain, part, positions=moved(kind, plain.positions)) for part in "qk")
    keys, values = torch.cat(k, 1), torch.cat([plain.x(AT + "v", rank) for rank in range(2)], 1)
    held = []
    for rank in range(2):
        out = torch.zeros_like(q[rank])
        for row, (s, p) in enumerate(plain.recording.places):
            mine = [i for i, (t, at) in enumerate(plain.recording.places) if t == s and at <= p]
            for local, head in enumerate(plain.own(AT + "attn", rank)):
                scores = keys[mine, head // 2] @ q[rank][row, local] * DIM ** -0.5
                out[row, local] = torch.softmax(scores, 0) @ values[mine, head // 2]
        held.append(out)
    case = plain.case(AT + "attn", held, hide=("q_rope", "k_rope"), num_keys=CALLS)
    found = asks_for("decode_position_restarted")(case.with_(ops=("q_rope", "k_rope")))
    assert found.fault == fault
    case = plain.case(AT + "attn", [x * 1.0003 for x in held], hide=("q_rope", "k_rope"), num_keys=CALLS)
    assert asks_for("decode_position_restarted")(case.with_(ops=("q_rope", "k_rope"))) is None

"""Rotations made by hand: as which positions, by which frequencies; how an unknown difference is described."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.hand_cases import NEAR, TOLERANCE, HandCase, named, noise

from tplab.align.diagnose import rope, rope_frequencies
from tplab.align.diagnose.wrong import distance

DIM, HEADS, THETA = 8, 2, 100.0
FREQUENCIES = THETA ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)


def tables(at, positions=None, **changed):
    angles = (at.frame.positions if positions is None else positions)[:, None] * FREQUENCIES.repeat(2)[None]
    return angles.cos()[None], angles.sin()[None]


def rotated(case, x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos[0, :, None] + torch.cat([-b, a], -1) * sin[0, :, None]


def turn(x, angles):
    return rotated(None, x, angles.cos()[None], angles.sin()[None])


class Turned(HandCase):
    """Rows that were turned as if they stood at ``used``; ``decoded`` are those computed alone."""

    def __init__(self, used, places, decoded=(), near=1.0, point="q_rope"):
        self.places, self.decoded = places, set(decoded)
        self.positions = torch.tensor([position for _, position in places])
        self.before = noise(len(places), HEADS, DIM, seed=5)
        held = turn(self.before, torch.as_tensor(used)[:, None] * FREQUENCIES.repeat(2)[None]) * near
        super().__init__(point, [held], [{}])
        self.lengths = [len(places)]
        self.frame = Some(positions=self.positions, dtype=torch.float64, before_rope=lambda part: part)
        self.config.hf = Some(rope_parameters={"rope_theta": THETA, "rope_type": "default"})
        vars(self.config).update(head_dim=DIM, num_heads=HEADS, hidden_size=24)

    def ours(self, name):
        return self.held[0]

    def reference(self, name):
        assert name == self.op[0]
        return self.before


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    from tplab.align.diagnose import wrong
    for module in (rope, rope_frequencies):
        monkeypatch.setattr(module, "tables", tables)
        monkeypatch.setattr(module, "rotated", rotated)
        monkeypatch.setattr(module, "right", lambda case, rank: Some(frame=case.frame))
        monkeypatch.setattr(module, "before_rope", lambda at, op: at.case.before)
    monkeypatch.setattr(wrong, "misfit", lambda case, change, ranks=None: distance(
        case.held[0], change(Some(case=case, frame=case.frame), case.op)))


ONE = [(0, position) for position in range(8)]
LAST = [(0, 5), (0, 6), (0, 7)]


@pytest.mark.parametrize("used, decoded, fault, numbers", [
    ([0, 1, 2, 3, 4, 6, 7, 8], LAST, "decode_position_off_by_one", (5, 5, 6)),
    ([0, 1, 2, 3, 4, 0, 0, 0], LAST, "decode_position_restarted", (5, 5, 0)),
    ([0, 0, 0, 0, 0, 5, 6, 7], LAST, "rope_missing", (1, 1, 0)),  # right where tokens came alone
    ([0, 0, 0, 0, 0, 5, 6, 7], [], "rope_positions", (1, 1, 0)),
    ([0] * 8, [], "rope_positions", (1, 1, 0)), ([0, 1, 2, 3, 4, 6, 7, 8], LAST[1:], "rope_positions", (5, 5, 6)),
    ([0, 1, 2, 3, 4, 5, 7, 8], LAST, "rope_positions", (6, 6, 7)),
    ([0, 1, 2, 3, 4, 0, 0, 0], LAST[:2], "rope_positions", (5, 5, 0)),
    ([0, 1, 2, 3, 4, 0, 1, 2], LAST, "rope_positions", (5, 5, 0)),
    ([1, 2, 3, 4, 5, 6, 7, 8], [], "rope_positions", (0, 0, 1)),
    ([-1, 0, 1, 2, 3, 4, 5, 6], [], "rope_positions", (0, 0, -1)),
    ([0, 1, 2, 3, 4, 5, 6, 9], LAST, "rope_positions", (7, 7, 9)),
    ([7, 6, 5, 4, 3, 2, 1, 0], [], "rope_positions", (0, 0, 7)),
    (range(8), LAST, None, None), (range(0, 16, 2), [], None, None),  # turned twice has a name of its own
    ([0, 1, 2, 3, 4, 5, 6, 7.5], LAST, None, None), ([0, 1, 2, 3, 4, 5, 6, 20], LAST, None, None)])
def test_as_which_positions_tokens_were_turned(used, decoded, fault, numbers):
    for point in ("q_rope", "k_rope"):
        found = rope.other_positions(Turned(used, ONE, decoded, point=point))
        assert named(found) == fault
        assert not found or found.numbers == dict(zip(("first_token", "position", "used"), numbers))
    if found:
        wrong = sum(a != b for a, b in zip(used, range(8)))
        first, position, one = numbers
        assert fault == "rope_missing" or f"token {first}, at position {position}, was rotated as if it stood at " \
            f"{one} ({wrong} of 8 tokens are misplaced)" in found.sentence
        alike = {"rope_missing": ("rope_swallowed",), "decode_position_restarted": ("rope_missing", "rope_swallowed")}
        assert found.lookalikes == alike.get(fault, ())
        assert rope.other_positions(Turned(used, ONE, decoded, near=1 + 60 * TOLERANCE)) is None


def test_positions_of_several_sequences_are_told_by_row():
    places = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    found = rope.other_positions(Turned([0, 1, 2, 3, 4], places))
    assert found.numbers == {"first_token": 3, "position": 0, "used": 3}, "positions run on"


def test_only_of_the_rotated_point_itself():
    case = Turned([0, 1, 2, 3, 4, 6, 7, 8], ONE, LAST)
    case.point = "attn"
    assert rope.other_positions(case) is None and rope_frequencies._measured(case) is None


# Frequencies, read off.

def by(frequencies, positions=range(8), near=1.0, scale=1.0):
    case = Turned([0] * len(positions), [(0, p) for p in positions])
    angles = torch.tensor(list(positions))[:, None] * frequencies.repeat(2)[None]
    case.held = [turn(case.before, angles) * near * scale]
    return case


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 3.0, -1.0])
def test_frequencies_are_read_off_however_often_they_go_round(factor):
    for positions in (range(8), range(40), [0, 1, 5, 6, 20, 300], [1, 2, 3]):
        if max(b - a for a, b in zip(positions, positions[1:])) * abs(factor) < 4 or factor <= 1:
            found = rope_frequencies._measured(by(FREQUENCIES * factor * 0.9, positions))
            assert found == pytest.approx(FREQUENCIES * factor * 0.9, abs=1e-9)


@pytest.mark.parametrize("positions", [range(2, 9), range(1), [0, 2, 3]])
def test_without_the_tokens_at_0_and_1_nothing_says_how_often_it_went_round(positions):
    assert rope_frequencies._measured(by(FREQUENCIES, positions)) is None


def test_nothing_is_read_off_nan():
    case = by(FREQUENCIES)
    case.held[0][3] = float("nan")
    assert rope_frequencies._measured(case) is None


@pytest.mark.parametrize("theta", [20.0, 1000.0, 12345.0])
def test_another_theta_is_read_off(theta):
    found = rope_frequencies.another_theta(by(theta ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)))
    assert found.fault == "rope_theta" and found.numbers["theta"] == pytest.approx(theta, rel=1e-4)
    assert "the checkpoint says 100" in found.sentence


@pytest.mark.parametrize("size", [12, 24, 16, 4])  # hidden / heads, hidden, two heads, half of one
def test_another_size_of_the_head_in_the_exponent(size):
    found = rope_frequencies.another_theta(by(THETA ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / size)))
    assert found.fault == "rope_theta" and found.numbers == {"size": size}
    assert f"a head of {size} numbers" in found.sentence and "this model's heads have 8" in found.sentence


@pytest.mark.parametrize("frequencies", [FREQUENCIES * 1.01, FREQUENCIES.flip(0), 0 * FREQUENCIES])
def test_what_is_no_theta(frequencies):
    assert rope_frequencies.another_theta(by(frequencies)) is None


@pytest.mark.parametrize("times, fault, says", [
    (0.25, "rope_scaling", "multiplied by 0.25."), (4.0, "rope_scaling", "multiplied by 4."),
    (1 / 3, "rope_scaling", "multiplied by 0.3333."), (-1.0, "rope_direction", "the sign of sin"),
    (2.0, "rope_twice", "it was turned twice."),
    (torch.tensor([1.0, 1, 0, 0]), "rope_partial", "only the first 2 of 4 pairs"),
    (torch.tensor([1.0, 0, 0, 0]), "rope_partial", "only the first 1 of 4 pairs"),
    (torch.tensor([1.0, 1, 1, 0.5]), None, "")])
def test_frequencies_of_another_kind(times, fault, says):
    found = rope_frequencies.other_frequencies(by(FREQUENCIES * times))
    assert named(found) == fault and (not found or says in found.sentence)
    wild = by(FREQUENCIES * times)
    wild.held = [wild.held[0] + 4 * TOLERANCE * wild.held[0].abs().max() * noise(8, HEADS, DIM, seed=8).sign()]
    assert rope_frequencies.other_frequencies(wild) is None
    assert rope_frequencies.other_frequencies(by(FREQUENCIES * times, near=NEAR)) is None

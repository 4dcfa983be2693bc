"""What is said of a difference that nothing explains, which ops may be wrong, what angles were used, and which
block tables: on tensors made by hand."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.reports import config_with

from tplab.align.diagnose.altered import compound, sources
from tplab.align.diagnose.case import Case
from tplab.align.diagnose.rope import measured_frequencies
from tplab.align.diagnose.steps import stale_block_table
from tplab.align.diagnose.traits import traits

PLACES = [(0, 0), (0, 1), (2, 5), (2, 6)]
RIGHT = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def case(*held, right=RIGHT, wrong=None, heads=((4, 7, 9), (1, 2, 3))):
    return Some(point="q", expected=lambda rank: right, indices=lambda name, rank: heads[rank], tolerance=1e-4,
                places=PLACES, wrong_ranks=tuple(range(len(held))) if wrong is None else wrong,
                recording=Some(world_size=len(held)), shard=lambda name, rank: held[rank])


def changed(*where, by=1.0):
    held = RIGHT.clone()
    held[where] += by
    return held


def test_whose_it_is():
    assert "only on rank 1 of 2" in traits(case(RIGHT, 2 * RIGHT, wrong=(1,)))
    assert "only on ranks 0, 2 of 3" in traits(case(2 * RIGHT, RIGHT, 2 * RIGHT, wrong=(0, 2)))
    assert not any("only on rank" in said for said in traits(case(2 * RIGHT, 2 * RIGHT)))


@pytest.mark.parametrize("held, said", [
    (0 * RIGHT, "it is all zeros"), (1.5 * RIGHT, "it is 1.5 times what it should be"),
    (-2 * RIGHT, "it is -2 times what it should be"), (RIGHT.flip(0), "its correlation with what it should be is ")])
def test_a_multiple_of_what(held, said):
    assert traits(case(held))[0].startswith(said)
    assert traits(case(held, RIGHT.flip(1)))[0].startswith("its correlation"), "not on every rank"


def test_how_alike():
    other = RIGHT.flip(2)
    likeness = (other * RIGHT).sum() / (RIGHT * RIGHT).sum()
    assert traits(case(other))[0].endswith(f" is {likeness:z.2f}")
    assert traits(case(3 * other))[0].endswith(f" is {likeness:z.2f}"), "whatever its size"


def test_where_it_begins():
    assert "2 of 4 rows are off, the first at position 5 of sequence 2" in traits(case(changed(slice(2, 4))))
    assert "1 of 4 rows are off, the first at position 1 of sequence 0" in traits(case(changed(1)))
    assert not any("rows are off" in said for said in traits(case(changed(slice(None)))))
    both = traits(case(changed(1), changed(3)))
    assert "2 of 4 rows are off, the first at position 1 of sequence 0" in both, "on any rank"
    tiny = RIGHT.clone()
    tiny[2] += 0.5e-4 * RIGHT.abs().max()
    tiny[3] += 1
    assert "1 of 4 rows are off, the first at position 6 of sequence 2" in traits(case(tiny))


def test_which_heads():
    assert "on rank 0 only the heads 7" in traits(case(changed(slice(None), 1)))
    assert "on rank 0 only the heads 4, 9" in traits(case(changed(slice(None), 0) + changed(slice(None), 2) - RIGHT))
    assert "on rank 1 only the heads 3" in traits(case(RIGHT, changed(slice(None), 2), wrong=(1,)))
    assert not any("heads" in said for said in traits(case(changed(1))) + traits(case(changed(1).flatten(1),
                                                                                      right=RIGHT.flatten(1))))


def test_nothing_is_said_of_numbers_that_are_lost_or_of_another_shape():
    lost = RIGHT.clone()
    lost[0, 0, 0] = float("nan")
    assert traits(case(lost)) == [] == traits(case(RIGHT[:, :2])) == traits(case())
    assert traits(case(lost, RIGHT, wrong=(0,))) == ["only on rank 0 of 2"]


# Which ops may be wrong.

def unseen(name, recorded, qk_norm=False):
    layer, _, point = name.rpartition(".")
    case = object.__new__(Case)
    case.point, case.layer, case.first, case.has = point, layer, Some(name=name), lambda point: point in recorded
    case.config = config_with(num_layers=3, qk_norm=qk_norm)
    return case


@pytest.mark.parametrize("name, recorded, ops, made_from", [
    ("layers.1.q", {"input_norm"}, [("q",)], ["layers.1.input_norm"]),
    ("layers.1.q", (), [("q",), ("input_norm",)], ["layers.0.output"]),  # never those of the layer before
    ("layers.0.q", (), [("q",), ("input_norm",)], ["embed"]), ("norm", (), [("norm",)], ["layers.2.output"]),
    ("logits", (), [("logits",), ("norm",)], ["layers.2.output"]),
    ("layers.1.attn", {"k_rope", "v", "q"}, [("attn",), ("q_rope",)], ["layers.1.k_rope", "layers.1.q", "layers.1.v"]),
    ("layers.1.attn", {"v", "input_norm", "q", "k"}, [("attn",), ("q_rope",), ("k_rope",), ("q_rope", "k_rope")],
     ["layers.1.k", "layers.1.q", "layers.1.v"]),
    ("layers.1.mlp_act", {"post_norm"}, [("mlp_act",), ("gate",), ("up",), ("gate", "up")], ["layers.1.post_norm"])])
def test_which_ops_may_be_wrong(name, recorded, ops, made_from):
    case = unseen(name, recorded)
    assert [*compound(case)] == ops and sources(case) == made_from


# Angles.

def angles(positions, frequencies, **more):
    """Rows turned by position × frequency, as halves of heads of four."""
    before = torch.randn(len(positions), 2, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    turn = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    pairs = torch.complex(*before.chunk(2, -1)) * torch.exp(1j * turn)[:, None]
    after = torch.cat([pairs.real, pairs.imag], -1)
    return Some(**{"op": "q_rope", "point": "q_rope", "has": lambda name: name == "q", "shard": lambda *at: after,
                   "config": config_with(), "turned": before.shape[-1], "made_from": lambda op: ("q",),
                   "wrong_ranks": (0,), "looked_at": lambda x: x,
                   "frame": Some(given=lambda *at: before), "layer": "layers.0",
                   "positions": torch.tensor(positions)} | more)


@pytest.mark.parametrize("positions", [[0, 1, 2, 3], [1, 2, 3], [0, 1, 0, 1, 2, 7, 30], [5, 6, 9]])
@pytest.mark.parametrize("frequencies", [(1.0, 0.01), (2.9, -0.3)])
def test_angles_are_read_off_from_one_position_to_the_next(positions, frequencies):
    assert measured_frequencies(angles(positions, frequencies)).tolist() == pytest.approx(frequencies, abs=1e-9)


def test_where_no_angle_can_be_read_off():
    assert measured_frequencies(angles([5, 7, 9], (2.9, 0.1))) is None, "nothing says how often it went round between"
    assert measured_frequencies(angles([0, 0], (1.0, 0.1))) is None
    assert measured_frequencies(angles([0, 1], (1.0, 0.1), point="attn")) is None
    assert measured_frequencies(angles([0, 1], (1.0, 0.1), has=lambda name: False)) is None
    assert measured_frequencies(angles([0, 1], (float("nan"), 0.1))) is None


# Block tables.

@pytest.mark.parametrize("at_ranks, true, stale", [
    ([[1, 2]], [[1, 2]], None), ([[1, 3]], [[1, 2]], 0), ([[1]], [[1, 2]], 0), ([[1, 2, 3]], [[1, 2]], None),
    ([[1, 2], [4, 3]], [[1, 2], [4, 5]], 1), ([[2, 1]], [[1, 2]], 0)])
def test_a_table_is_stale_where_the_schedulers_blocks_are_not_its_own(at_ranks, true, stale):
    steps = [Some(step_number=10 + i, requests=[(7, Some(block_ids=table))]) for i, table in enumerate(at_ranks)]
    said = stale_block_table(Some(decode=Some(steps=steps, tables=[{7: tuple(table)} for table in true])))
    assert said == "" if stale is None else said.startswith(
        f"In step {10 + stale} the ranks were told that sequence 7 has the blocks {at_ranks[stale]}; the scheduler had "
        f"given it {true[stale]}.")
    assert stale_block_table(Some(decode=None)) == ""


# How far a rank is off.

@pytest.mark.parametrize("held, should, off", [
    ([3.0, -8.0], [3.0, -4.0], 1.0), ([0.0, 0.0], [0.0, 0.0], 0.0), ([float("nan"), 1.0], [1.0, 1.0], float("inf"))])
def test_how_far_a_rank_is_off(held, should, off):
    case = object.__new__(Case)
    case.point, case.expected = "q", lambda rank: torch.tensor(should)
    case.shard = lambda name, rank: torch.tensor(held)
    assert case._off(0) == off

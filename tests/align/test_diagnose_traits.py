"""What is said of a difference that no hypothesis explains, and of rows and digits, on tensors made by hand."""

from types import SimpleNamespace as Some

import pytest
import torch

from tplab.align.diagnose import anything
from tplab.align.diagnose.anything import traits

PLACES = [(0, 0), (0, 1), (2, 5), (2, 6)]
RIGHT = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    def at(case, rank):
        class At:
            indices = staticmethod(lambda name: case.heads[rank])

            def __call__(self, name):
                return case.right[rank]
        return At()
    monkeypatch.setattr(anything, "right", at)


def case(*held, right=RIGHT, wrong=None, heads=((4, 7, 9), (1, 2, 3))):
    return Some(point="q", held=held, right=[right] * len(held), heads=heads, tolerance=1e-4, places=PLACES,
                wrong_ranks=tuple(range(len(held))) if wrong is None else wrong, recording=Some(world_size=len(held)),
                shard=lambda name, rank: held[rank])


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

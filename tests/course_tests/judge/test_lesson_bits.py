"""The table of notebook 14: log probabilities in every way that an engine has, and what it would see."""

import pytest
from helpers.checkpoints import make_checkpoint

from course.judge.bits import bits, others
from tplab.checkpoint import open_checkpoint

PROMPTS = [list(range(3, 15)), list(range(20, 43)), [40, 41, 42, 43, 44, 45]]


@pytest.fixture(scope="module")
def ckpt(tmp_path_factory):
    return open_checkpoint(make_checkpoint(tmp_path_factory.mktemp("bits") / "m", heads=4, kv_heads=2))


def test_with_the_option_all_ways_are_the_same_bits_on_one_rank_and_on_three(ckpt):
    found = {n: bits(ckpt, PROMPTS, n, "float32") for n in (1, 3)}
    assert list(found[1]) == list(found[3]) and len(found[1]) == 6
    assert {others(found[1]["alone"], values) for ways in found.values() for values in ways.values()} == {0}
    assert all(60 <= len(one) <= 63 for one in found[1]["alone"]), "three tokens, twenty each and the drawn one"


def test_without_it_two_ranks_are_other_bits(ckpt):
    one, two = (bits(ckpt, PROMPTS, n, "float32", batch_invariant=False)["alone"] for n in (1, 2))
    assert others(one, one) == 0 < others(one, two)

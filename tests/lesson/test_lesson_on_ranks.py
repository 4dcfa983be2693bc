"""A learner's function on logical ranks: one sentence whatever happens there, and its collectives counted."""

import pytest
import torch

from tplab.lesson.mine import Mine, NotYet
from tplab.lesson.on_ranks import count_ops, on_ranks
from tplab.ranks import all_gather, all_reduce, rank


def test_results_and_collectives_of_every_rank():
    results, ops = on_ranks(3, lambda r: (r, all_reduce(torch.ones(2)).tolist()))
    assert results == [(r, [3, 3]) for r in range(3)]
    count_ops(ops, {"all_reduce": 1})
    with pytest.raises(NotYet, match=r"on rank 0 of 3 it calls all_reduce; 2 all_gathers must be enough"):
        count_ops(ops, {"all_gather": 2})
    with pytest.raises(NotYet, match=r"calls all_reduce; no collective must be enough"):
        count_ops(ops, {})


def fails(x):
    return x[5]


def fails_on_one(x):
    return x[5] if rank() == 1 else all_reduce(x)


def meets_another(x):
    return all_gather(x) if rank() else all_reduce(x)


def stays_away(x):
    return x if rank() else all_reduce(x)


@pytest.mark.parametrize("wrong, words", [
    (fails, "^IndexError: index 5 is out of bounds"), (fails_on_one, "^on rank 1 of 2: IndexError: index 5"),
    (meets_another, "the ranks meet in different collectives: rank 0 calls all_reduce"),
    (stays_away, "rank 1 returned; rank 0 waits in all_reduce")])
def test_whatever_goes_wrong_is_one_not_yet(wrong, words):
    mine = Mine(wrong, "x")
    with pytest.raises(NotYet, match=words) as error:
        on_ranks(2, lambda r: mine(torch.ones(2)))
    assert str(error.value).count("\n") <= 2

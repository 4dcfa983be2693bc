"""What attention shows of its calls, made by hand: where they begin; rows that are NaN."""

from types import SimpleNamespace as Some

import pytest
import torch
from helpers.sentences import hold

from tplab.align.diagnose.attention import calls, nothing_to_see, zero_times_infinity
from tplab.align.diagnose.case import Diagnosis

HEADS, DIM = 4, 3


def diagnosis(fault, sentence, *lookalikes, **numbers):
    return Diagnosis(fault, sentence, "layers.0.attn", numbers, lookalikes)


# What later calls see: a prompt of three tokens, two more at once, then one, and one.

QUERY, KEY = torch.arange(7)[:, None], torch.arange(7)[None]
NUM_KEYS = torch.tensor([3, 3, 3, 5, 5, 6, 7])[:, None]


def test_where_calls_begin_and_how_long_they_are():
    starts, sizes = calls(QUERY, NUM_KEYS)
    assert starts.flatten().tolist() == [0, 0, 0, 3, 3, 5, 6] and sizes.flatten().tolist() == [3, 3, 3, 2, 2, 1, 1]
    starts, sizes = calls(QUERY[4:], NUM_KEYS[4:])
    assert starts.flatten().tolist() == [4, 5, 6], "the first rows were found in a cache"


# Attention that is NaN.

class Nan:
    """Two sequences of three and two tokens; ``nan`` are the rows that are lost."""

    point = "attn"

    def __init__(self, nan, decoded=()):
        self.sequences, self.held = torch.tensor([0, 0, 0, 1, 1]), torch.ones(5, HEADS, DIM)
        self.decoded = torch.isin(torch.arange(5), torch.tensor(decoded, dtype=torch.long))
        self.held[nan, 1, 2] = float("nan")
        self.first = Some(nan=len(nan), size=self.held.numel())

    def ours(self, name):
        return self.held

    diagnosis = staticmethod(diagnosis)


@pytest.mark.parametrize("nan, decoded, fault", [([0, 1, 2, 3, 4], (), "nan_mask"), ([2, 4], (), None),
    ([0, 1, 3], (), None), ([2, 3], (), None), ([1, 2, 3, 4], (), "nan_mask"), ([0, 1], (2,), None),
    ([0, 1, 3, 4], (2,), "nan_mask"), ([0, 1, 3], (2, 4), "nan_mask"), ([1, 3], (2, 4), None)])
def test_which_rows_are_nan(nan, decoded, fault):
    case = Nan(nan, decoded)
    found = hold(zero_times_infinity(case))
    assert (found and found.fault) == fault
    for one in filter(None, (found, nothing_to_see(case))):
        assert one.numbers == {"nan_share": len(nan) / 60, "nan": len(nan)}
    assert hold(nothing_to_see(case)).fault is None


def test_where_nothing_is_nan():
    assert zero_times_infinity(Nan([])) is nothing_to_see(Nan([])) is None

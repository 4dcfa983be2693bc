"""The two functions of rows that whole steps hardly show: exp far from 0, and rounding to bfloat16."""

import numpy as np
import torch

from tplab.fast import rowwise
from tplab.fast.compiled import entry


@entry
def _exp(x, y):
    for i in range(len(x)):
        y[i] = rowwise.exp(x[i])


@entry
def _copy(x, y):
    rowwise.copy(x, y)


def test_exp_is_within_some_roundings_of_float64():
    x = np.linspace(-87, 88, 100_001, dtype=np.float32)
    y = np.empty_like(x)
    _exp(x, y)
    assert np.abs(y / np.exp(x.astype(np.float64)) - 1).max() < 2 ** -21
    x = np.array([0, -88, -1e30, -np.inf, 89, np.nan], np.float32)
    y = np.empty_like(x)
    _exp(x, y)
    assert y[0] == 1 and not y[1:4].any() and y[4] > 1e38 and np.isnan(y[5])


def test_bfloat16_is_rounded_as_torch_does():
    """Ties to even, either sign, beyond the largest number, NaN of any payload."""
    words = torch.cat([torch.randint(-2 ** 31, 2 ** 31, (200_000,), generator=torch.Generator().manual_seed(0)),
                       torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800001, -1, 0x7FFFFFFF, 0])])
    x = words.to(torch.int32).view(torch.float32)
    y, right = np.empty(len(x), np.uint16), x.to(torch.bfloat16)
    _copy(x.numpy(), y)
    found = torch.from_numpy(y.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.equal(found[~x.isnan()], right[~x.isnan()])

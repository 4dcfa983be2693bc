"""Row by row: each function beside the reference's of the same dtype, and what bfloat16 and NaN become."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from tplab.fast import rowwise
from tplab.fast.compiled import entry
from tplab.model.norm import RMSNorm


@entry
def _exp(x, y):
    for i in range(len(x)):
        y[i] = rowwise.exp(x[i])


@entry
def _copy(x, y):
    rowwise.copy(x, y)


@entry
def _rms_norm(x, weight, eps, y):
    rowwise.rms_norm(x, weight, eps, y)


@entry
def _rotate(x, cos, sin, y):
    rowwise.apply_rotary_pos_emb(x, cos, sin, y)


@entry
def _silu_and_mul(gate, up, y):
    rowwise.silu_and_mul(gate, up, y)


@entry
def _softmax(x, scaling, y):
    rowwise.scale(y, rowwise.softmax(x, scaling, y), y)


def numbers(count: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (torch.randn(count, generator=torch.Generator().manual_seed(seed)) * scale).numpy()


def distance(y: np.ndarray, exact: torch.Tensor) -> float:
    return ((torch.from_numpy(y).double() - exact).norm() / exact.norm()).item()


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


@pytest.mark.parametrize("size", [1, 7, 64, 577])
def test_rms_norm(size):
    x, weight = numbers(size, 1, 3.0), numbers(size, 2)
    norm, y = RMSNorm(size, 1e-5, torch.float32), np.full(size + 3, np.nan, np.float32)
    norm.weight.data = torch.from_numpy(weight)
    _rms_norm(x, weight, np.float32(1e-5), y)
    wide = torch.from_numpy(x).double()
    exact = torch.from_numpy(weight).double() * wide / (wide.square().mean() + 1e-5).sqrt()
    assert distance(y[:size], exact) <= 4 * distance(norm(torch.from_numpy(x)).detach().numpy(), exact) + 2 ** -23
    assert not y[size:].any()


@pytest.mark.parametrize("head_dim", [2, 8, 10, 64])
def test_rotation(head_dim):
    """The second half turns with the first; other cosines in both halves show which one is read."""
    x, cos, sin = (torch.from_numpy(numbers(head_dim, seed)) for seed in range(3))
    y = np.empty(head_dim, np.float32)
    _rotate(x.numpy(), cos.numpy(), sin.numpy(), y)
    first, second = x.double().chunk(2)
    exact = x.double() * cos.double() + torch.cat((-second, first)) * sin.double()
    assert distance(y, exact) < 2 ** -22


@pytest.mark.parametrize("size", [1, 9, 130])
def test_silu_and_mul(size):
    gate, up, y = numbers(size, 3, 6.0), numbers(size, 4), np.full(size + 1, np.nan, np.float32)
    _silu_and_mul(gate, up, y)
    exact = functional.silu(torch.from_numpy(gate).double()) * torch.from_numpy(up).double()
    assert distance(y[:size], exact) < 2 ** -21
    assert y[size] == 0


@pytest.mark.parametrize("size", [1, 5, 300])
def test_softmax(size):
    """Large scores do not overflow; what is far below the largest one becomes zero; NaN spoils the row."""
    for scale in (1.0, 300.0):
        x, y = numbers(size, 5, scale), np.empty(size, np.float32)
        exact = (torch.from_numpy(x).double() * 0.3).softmax(0)
        _softmax(x.copy(), np.float32(0.3), y)
        torchs = distance((torch.from_numpy(x) * 0.3).softmax(0).numpy(), exact)
        assert distance(y, exact) <= 4 * torchs + 2 ** -22
    x[size // 2] = np.nan
    _softmax(x, np.float32(1), y)
    assert np.isnan(y).all()

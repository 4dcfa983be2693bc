"""The largest number of a row, against PyTorch's argmax: of equals the first, NaN above all."""

import pytest
import torch

from tplab.kernels.largest import largest
from tplab.kernels.product import torch_threads

NAN, INF = float("nan"), float("inf")
pytestmark = [pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])]


def by_torch(x, first):
    ids = x.argmax(dim=-1, keepdim=True)
    return torch.cat([x.gather(-1, ids).double(), (ids + first).double()], dim=-1)


def same(found, right):
    return torch.equal(found.isnan(), right.isnan()) and torch.equal(found.nan_to_num(7.5), right.nan_to_num(7.5))


@pytest.mark.parametrize("size", [16, 32, 24576])
@pytest.mark.parametrize("rows", [0, 1, 16, 33])
def test_as_argmax(rows, size, dtype):
    """In bfloat16 many are equal."""
    x = torch.randn(rows, size + 16, generator=torch.Generator().manual_seed(size)).to(dtype)
    for threads in (1, 2, 3):
        with torch_threads(threads):
            for part in (x[:, :size], x[:, 16:], x[:, :size].contiguous()):
                assert same(largest(part, 49152), by_torch(part, 49152))


@pytest.mark.parametrize("put", [
    {}, {3: 1.0, 17: 1.0}, {31: 2.0}, {16: 2.0, 15: 1.0}, {5: NAN}, {30: NAN, 4: INF}, {20: NAN, 2: NAN, 1: 9.0},
    {7: INF, 8: INF}, dict.fromkeys(range(32), -INF), dict.fromkeys(range(32), NAN), {9: 0.0, 4: -0.0},
    {**dict.fromkeys(range(32), -INF), 19: -3e38}, {6: 1e-45}], ids=str)
def test_equals_nan_and_infinity(put, dtype):
    """``{place: number}`` among zeros and below; above and below the row stands what is larger."""
    x = torch.full((3, 32), 1e30, dtype=dtype)
    x[1] = -torch.arange(32)
    for place, number in put.items():
        x[1, place] = number
    assert same(largest(x, 5)[1:2], by_torch(x[1:2], 5))
    assert same(largest(x[1:2], 0), by_torch(x[1:2], 0))


def test_what_is_left_to_others(dtype):
    x = torch.zeros(2, 64, dtype=dtype)
    assert largest(x, 0) is not None
    assert largest(x.double(), 0) is largest(x[:, :63], 0) is largest(x[:, :0], 0) is largest(x[:, ::2], 0) is None
    assert largest(x.clone().requires_grad_(), 0) is None

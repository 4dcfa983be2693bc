"""Rows looked up in a packed weight, against places by hand; what a library's packing makes of it: test_kernels_packed.
"""

import pytest
import torch

from tplab.kernels import mkl
from tplab.kernels.lookup import Lookup
from tplab.kernels.product import torch_threads

ROWS, COUNTS = 300, [5, 192, 3]
BLOCKS = torch.arange(3).repeat_interleave(torch.tensor(COUNTS))
OFFSETS = torch.cat([torch.arange(count) for count in COUNTS])


def places(seed=0):
    """Steps of several sizes, and blocks anywhere."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(0, 5000, (ROWS, 3), generator=generator), torch.randint(1, 65, (ROWS,), generator=generator),
            torch.randn(5000 + 64 * 192, generator=generator))


def by_torch(starts, steps, values, indices):
    return values[starts[indices][..., BLOCKS] + steps[indices][..., None] * OFFSETS]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (400,), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_by_hand(shape, dtype):
    starts, steps, values = places()
    indices = torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(7))
    lookup = Lookup(values.data_ptr() + 4 * starts, 4 * steps, COUNTS)
    right = by_torch(starts, steps, values, indices)
    for threads in (1, 2, 3):
        with torch_threads(threads):
            found = lookup.rows(indices, dtype)
            assert found.dtype == dtype and found.shape[:-1] == indices.shape
            assert torch.equal(found.contiguous().view(torch.float32).view(right.shape), right)
    assert torch.equal(lookup.rows(indices.int(), torch.float32), right)
    assert torch.equal(lookup.rows(indices[..., None].expand(*shape, 2), torch.float32)[..., 1, :], right)


@pytest.mark.parametrize("wrong", [-1, ROWS, 1 << 40])
def test_a_row_that_is_not_there(wrong):
    starts, steps, values = places()
    lookup = Lookup(values.data_ptr() + 4 * starts, 4 * steps, COUNTS)
    with pytest.raises(IndexError, match=f"not one of {ROWS}.*{wrong}"):
        lookup.rows(torch.tensor([3, wrong, 5]), torch.float32)
    assert torch.equal(lookup.rows(torch.tensor([3, 5]), torch.float32), by_torch(starts, steps, values, [3, 5]))


def test_a_weight_of_mkls_in_any_such_order(monkeypatch):
    """Where MKL packs in an order that is not known here, too."""
    starts, steps, values = places(1)
    monkeypatch.setattr(mkl, "_places", lambda *shape: mkl._Places(starts, steps, BLOCKS, OFFSETS))
    order = object.__new__(mkl.MKL)
    order.shape, order.values = torch.Size([ROWS, sum(COUNTS)]), values
    assert torch.equal(order.plain(), by_torch(starts, steps, values, torch.arange(ROWS)))
    some = torch.tensor([[4], [299]])
    assert torch.equal(order.rows(some), by_torch(starts, steps, values, some))

"""Products of the fast path beside PyTorch's of the same dtype, both held against float64 on this machine."""

import numpy as np
import pytest
import torch

from tplab.fast.compiled import entry
from tplab.fast.linear import linear, pack_weight, padded, panels, per_word, unpack_weight
from tplab.fast.simd import WIDTH

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 3, 4, 7, 15, 16, 17, 31, 33, 64, 130]


@entry
def _linear(x, x_row, rows, steps, weight, panel, count, y, y_row):
    linear(x, x_row, rows, steps, weight, 0, panel, 0, count, 1, y, y_row)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` by the room's product."""
    (rows, inputs), outputs, dtype = x.shape, len(weight), x.dtype
    width, count = padded(inputs, dtype), panels(outputs)
    full = torch.zeros(-(-rows // 16) * 16, width, dtype=dtype)
    full[:rows, :inputs] = x
    words = full.flatten() if dtype == torch.float32 else full.flatten().view(torch.int32)
    given, steps = words.numpy() if dtype == torch.float32 else words.numpy().view(np.uint32), width // per_word(dtype)
    y = np.full(len(full) * count * WIDTH, np.nan, np.float32)
    _linear(given, steps, rows, steps, pack_weight(weight), steps * WIDTH, count, y, count * WIDTH)
    return torch.from_numpy(y).view(len(full), -1)[:rows, :outputs]


def random(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """The largest error of a row against float64, relative to the row's largest product of lengths."""
    exact = x.double() @ weight.double().T
    return ((y.double() - exact).abs() / (x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1))
            ).max().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (5, 3), (63, 31), (64, 64), (65, 33), (129, 130), (200, 576)])
def test_products_are_as_close_to_float64_as_torchs(outputs, inputs, dtype):
    weight = random(outputs, inputs, dtype, 1)
    for rows in ROWS:
        x = random(rows, inputs, dtype, rows)
        # Torch's own sums in float32, or what adding one by one may err by (2 ** -24 a sum, some up and some down).
        torchs = error(torch.nn.functional.linear(x.float(), weight.float()), x, weight)
        assert error(product(x, weight), x, weight) <= max(4 * torchs, 2 ** -23 * inputs ** 0.5), rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_numbers_are_exact(dtype):
    """Of whole numbers up to 8 each sum is exact: one input left out or taken twice shows."""
    for outputs, inputs, rows in [(70, 37, 5), (64, 300, 40), (131, 257, 19)]:
        draw = torch.Generator().manual_seed(outputs)
        weight, x = (torch.randint(-8, 9, size, generator=draw).to(dtype) for size in (
            (outputs, inputs), (rows, inputs)))
        assert torch.equal(product(x, weight), x.float() @ weight.float().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_sum_does_not_depend_on_the_others_values(dtype):
    """NaN and infinity in one row stay there."""
    x, weight = random(37, 65, dtype, 4), random(80, 65, dtype, 5)
    spoilt = x.clone()
    spoilt[3], spoilt[36, 0] = float("nan"), float("inf")
    given, right = product(spoilt, weight), product(x, weight)
    others = [row for row in range(37) if row not in (3, 36)]
    assert torch.equal(given[others], right[others])
    assert given[3].isnan().all() and not given[36].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (7, 5), (64, 32), (100, 33), (130, 257)])
def test_packing_loses_nothing(outputs, inputs, dtype):
    weight = random(outputs, inputs, dtype, 6)
    weight[0, 0] = -0.0
    assert torch.equal(unpack_weight(pack_weight(weight), outputs, inputs, dtype).view(torch.int16),
                       weight.view(torch.int16))
    assert not pack_weight(torch.zeros_like(weight)).any()  # what fills a panel up is zero too

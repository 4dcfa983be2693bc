"""Products of few rows with a plain weight, by the lab's own loops for sixteen registers."""

import pytest
import torch
from torch.nn import functional as F

from tplab.kernels import product
from tplab.kernels.compiled import has
from tplab.kernels.dots import dots, suits
from tplab.kernels.product import Kernels, empty_weight, linear, torch_threads

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not (has("fma") and has("avx2")), reason="loops are for x86 processors with AVX2")


def exact_and_bound(x, weight, bias):
    """Rounded once, from sums in float32."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    sums = F.linear(x.double().abs(), weight.double().abs()) * 2 ** -22
    return exact, sums + exact.abs() * (2 ** -8 if x.dtype == torch.bfloat16 else 2 ** -23)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_features,in_features", [(4, 16), (576, 576), (100, 48), (12, 1536)])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_of_any_number_of_rows(dtype, out_features, in_features, threads):
    weight, bias = torch.randn(out_features, in_features).to(dtype), torch.randn(out_features).to(dtype)
    wide = torch.randn(34, in_features + 3).to(dtype)
    with torch_threads(threads):
        for rows in (*range(1, 17), 21, 34):
            for x in (wide[:rows, :in_features], wide[:rows, 3:].contiguous(), wide[::2, 3:][:rows]):
                for b in (None, bias):
                    y, (exact, bound) = dots(x, weight, b), exact_and_bound(x, weight, b)
                    assert y.dtype == dtype and y.shape == exact.shape
                    assert ((y.double() - exact).abs() <= bound).all(), (rows, b is None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_the_outputs(dtype):
    """What one of them adds up is what it would be alone."""
    weight, x = torch.randn(2052, 320).to(dtype), torch.randn(7, 320).to(dtype)
    found = []
    for threads in (1, 2, 3):
        with torch_threads(threads):
            found.append(dots(x, weight, None))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_only_its_own_row_and_output_see_a_number(dtype, fill):
    weight, x = torch.randn(64, 64).to(dtype), torch.randn(9, 64).to(dtype)
    weight[5, 63], x[3, 0] = fill, fill
    expected = torch.zeros(9, 64, dtype=torch.bool)
    expected[3], expected[:, 5] = True, True
    assert torch.equal(~dots(x, weight, None).isfinite(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_do_not_suit(dtype):
    assert suits(torch.empty(8, 32, dtype=dtype))
    for weight in (torch.empty(9, 32, dtype=dtype), torch.empty(8, 33, dtype=dtype), torch.empty(8, 8, dtype=dtype),
                   torch.empty(32, 8, dtype=dtype).t(), torch.empty(8, 32).double()):
        assert not suits(weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_features", [512, 513])
def test_a_plain_weight_meets_so_many_rows_in_them(dtype, out_features, monkeypatch):
    kernels, used = Kernels(None, 0, 0, product.NEVER, 4), []
    monkeypatch.setattr(product, "fastest", lambda asked: {dtype: kernels}[asked])
    monkeypatch.setattr(product, "dots", lambda *given: used.append(len(given[0])) or dots(*given))
    weight = empty_weight(out_features, 256, dtype).copy_(torch.randn(out_features, 256))
    for rows in (1, 4, 5):
        x = torch.randn(rows, 256).to(dtype)
        exact, bound = exact_and_bound(x, weight, None)
        assert ((linear(x, weight).double() - exact).abs() <= bound).all()
    assert used == ([1, 4] if out_features == 512 else [])
    assert not linear(torch.empty(0, 256, dtype=dtype), weight).numel()

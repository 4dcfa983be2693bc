"""Weights in the order of a library: products with them, and every other way to read and write them."""

import llvmlite.binding as llvm
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tplab.kernels import mkl, onednn, product
from tplab.kernels.product import Kernels, empty_weight, linear, pack


def packed(plain, library="oneDNN", streamed_rows=0):
    weight = nn.Parameter(empty_weight(*plain.shape, plain.dtype).copy_(plain), requires_grad=False)
    weight.ranges = "kept"
    pack(weight, Kernels(library, streamed_rows, 0, product.NEVER, 0))
    if not isinstance(weight, product.PackedWeight):
        cpu, is_amd = torch.backends.cpu.get_cpu_capability(), llvm.get_host_cpu_name().startswith("znver")
        # On AMD's, MKL keeps the parts of its loops for AVX2 in an order of their own.
        has_none = library == "MKL" and (is_amd or not torch.backends.mkl.is_available())
        assert has_none or plain.dtype == torch.bfloat16 or "AVX512" not in cpu, "known to be packed"
        pytest.skip(f"{library} packs nothing on this processor")
    assert type(weight.order).__name__ == {"MKL": "MKL", "oneDNN": "OneDNN"}[library]
    return weight


LIBRARIES = [("oneDNN", torch.float32), ("oneDNN", torch.bfloat16), ("MKL", torch.float32)]


@pytest.mark.parametrize("library, dtype", LIBRARIES)
@pytest.mark.parametrize("streamed_rows", [0, 32])
@pytest.mark.parametrize("rows", [1, 2, 7, 65])
@pytest.mark.parametrize("out_features, in_features", [(576, 576), (577, 129), (1000, 901)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_with_a_packed_weight(library, dtype, streamed_rows, rows, out_features, in_features, bias):
    plain = torch.randn(out_features, in_features).to(dtype)
    weight = packed(plain, library, streamed_rows)
    b = torch.randn(out_features).to(dtype) if bias else None
    before = None if b is None else b.clone()
    wide = torch.randn(rows, in_features + 3).to(dtype)
    for x in (wide[:, :in_features].contiguous(), wide[:, 3:]):
        exact = F.linear(x.double(), plain.double(), None if b is None else b.double())
        bound = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype] * (in_features ** 0.5 + 1) * 4
        assert linear(x, weight, b).dtype == dtype
        assert (linear(x, weight, b).double() - exact).abs().max() <= bound
        assert (linear(x[:, None], weight, b)[:, 0].double() - exact).abs().max() <= bound  # by a plain copy
    assert b is None or torch.equal(b, before)


@pytest.mark.parametrize("library", ["oneDNN", "MKL"])
@pytest.mark.parametrize("rows", [1, 3, 17, 511, 512, 513, 600])
def test_any_number_of_rows_meets_a_packed_weight(library, rows):
    """Also more than the libraries are told while they pack; sums of small integers are exact."""
    plain, x = (torch.randint(-9, 10, size).float() for size in ((1000, 901), (rows, 901)))
    assert torch.equal(linear(x, packed(plain, library)).double(), F.linear(x.double(), plain.double()))


@pytest.mark.parametrize("library, dtype", LIBRARIES)
@pytest.mark.parametrize("outputs, inputs", [(577, 500), (1001, 2000), (131, 501), (600, 110)])
def test_a_packed_weight_is_read_and_written_bit_for_bit(library, dtype, outputs, inputs):
    plain = torch.randn(outputs, inputs).to(dtype)
    plain[0, 0], plain[1, 1], plain[2, 2] = -0.0, float("inf"), float("nan")
    weight = packed(plain, library)
    integer = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    assert isinstance(weight, nn.Parameter) and weight.ranges == "kept" and weight.shape == plain.shape
    assert not weight.requires_grad and weight.dtype == dtype
    assert torch.equal(weight.data.clone().view(integer), plain.view(integer)), "the sign of a zero, too"
    plain = torch.randn(outputs, inputs).to(dtype)
    weight.data.copy_(plain)
    assert torch.equal(weight, plain) and torch.equal(weight.data.split([77, outputs - 77])[1], plain[77:])
    ids = torch.tensor([[0, outputs - 1], [63, 64]])
    assert torch.equal(F.embedding(ids, weight), plain[ids])
    weight.data[3] = 7
    assert (weight[3] == 7).all() and torch.equal(weight[4:], plain[4:]) and torch.equal(weight[:3], plain[:3])
    weight.data.copy_(plain.double() * 2)
    assert torch.equal(weight, plain * 2)
    weight.data.copy_((plain * 3).T.contiguous().T)
    assert torch.equal(weight, plain * 3), "written from columns"
    x = torch.randn(3, inputs, dtype=dtype, requires_grad=True)
    linear(x, weight).float().sum().backward()
    torch.testing.assert_close(x.grad, (3 * plain).sum(0).expand(3, inputs), rtol=1e-2, atol=1e-1)


def test_onednn_sums_float32_in_parts_and_bfloat16_at_once():
    for dtype, columns in ((torch.float32, [192, 192, 116]), (torch.bfloat16, [500])):
        assert packed(torch.randn(577, 500).to(dtype)).order.columns == columns


@pytest.mark.parametrize("library, dtype", LIBRARIES)
@pytest.mark.parametrize("outputs", [576, 640, 1008])
def test_the_order_of_a_packed_weight_is_not_read_off_its_values(library, dtype, outputs):
    """Blocks of 64 outputs and of 32 fit the same memory, and zeros look alike in both."""
    weight = nn.Parameter(torch.zeros(outputs, 576, dtype=dtype), requires_grad=False)
    pack(weight, Kernels(library, 0, 0, product.NEVER, 0))
    filled = torch.randn(outputs, 576).to(dtype)
    weight.data.copy_(filled)
    assert torch.equal(weight, filled)
    x = torch.randn(5, 576).to(dtype)
    atol = {torch.float32: 1e-4, torch.bfloat16: 0.5}[dtype]  # of sums around 24
    torch.testing.assert_close(linear(x, weight), F.linear(x, filled), rtol=2e-2, atol=atol)


def test_a_weight_that_mkl_packs_has_a_place_of_its_own():
    """Also while others come and go: what a freed one leaves is not what another one reads."""
    plain = [torch.randn(256, 256 + number) for number in range(6)]
    weights = [packed(each, "MKL") for each in plain]
    del weights[1], weights[3], plain[1], plain[3]
    again = packed(torch.randn(256, 256), "MKL")
    again.data.fill_(3)
    assert all(torch.equal(weight, each) for weight, each in zip(weights, plain, strict=True))


@pytest.mark.parametrize("outputs, inputs", [(70000, 1), (40000, 2), (1, 70000), (2, 70000), (16, 5000)])
def test_a_narrow_weight_is_packed_right_or_not_at_all(outputs, inputs):
    plain = torch.randn(outputs, inputs)
    weight = nn.Parameter(plain.clone(), requires_grad=False)
    pack(weight, Kernels("MKL", 0, 0, product.NEVER, 0))
    assert torch.equal(weight, plain)
    x = torch.randn(3, inputs)
    torch.testing.assert_close(linear(x, weight), F.linear(x, plain), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("wrong", [lambda rows: 2 * rows, lambda rows: rows[:, [1, 0, *range(2, 400)]]])
def test_a_library_that_multiplies_wrongly_here_packs_nothing(wrong, monkeypatch):
    right = mkl.MKL.product
    monkeypatch.setattr(mkl.MKL, "product", lambda self, x, bias: wrong(right(self, x, bias)))
    mkl._places.cache_clear()
    try:
        assert mkl.MKL.of(torch.randn(400, 300)) is None
    finally:
        mkl._places.cache_clear()


@pytest.mark.parametrize("library, functions", [("MKL", True), ("MKL", False), ("oneDNN", True)])
def test_what_cannot_be_packed_stays_plain(library, functions, monkeypatch):
    monkeypatch.setattr(mkl, "_places", lambda outputs, inputs: None)
    monkeypatch.setattr(onednn, "_block_size", lambda *given: None)
    if not functions:
        monkeypatch.setattr(mkl, "_functions", None)
    weight = nn.Parameter(torch.ones(256, 257), requires_grad=False)
    pack(weight, Kernels(library, 0, 0, product.NEVER, 0))
    assert type(weight) is nn.Parameter


@pytest.mark.parametrize("library", ["oneDNN", "MKL"])
def test_what_stays_in_the_cache_is_not_packed(library):
    small = nn.Parameter(torch.ones(255, 257), requires_grad=False)  # one value fewer than are worth it
    pack(small, Kernels(library, 0, 0, product.NEVER, 0))
    double = nn.Parameter(torch.ones(256, 257).double(), requires_grad=False)
    pack(double, Kernels(library, 0, 0, product.NEVER, 0))
    assert type(small) is type(double) is nn.Parameter

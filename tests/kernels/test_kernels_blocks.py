"""Products of many rows in blocks: any rows, panels and inputs, exact where sums of small integers are."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tplab.kernels import product, stream
from tplab.kernels.block_loops import PART
from tplab.kernels.panel_loops import multiplies_tiles
from tplab.kernels.product import Kernels, linear, pack
from tplab.kernels.stream import LONGEST_BLOCKED, Panel, Stream

BFLOAT16 = torch.bfloat16
needs_tiles = pytest.mark.skipif(not multiplies_tiles(), reason="a processor with AMX is needed")


def blocked(weight, widths=(64,)):
    """A weight as panels of these widths; what fills the last one up is NaN."""
    memory, output = [], 0
    while output < len(weight):
        width = widths[len(memory) % len(widths)]
        part = weight[output:output + width]
        part = F.pad(part, (0, 0, 0, width - len(part)), value=float("nan"))
        memory.append((output, part.reshape(width, -1, 2).transpose(0, 1).contiguous()))
        output += width
    panels = [Panel(part.data_ptr(), part.shape[1], len(part), output, 0) for output, part in memory]
    made = Stream.of(panels, weight.shape, weight.dtype)
    made.memory = memory
    return made


def integers(*size):
    return torch.randint(-9, 10, size).to(BFLOAT16)


def rounded(x, weight, bias=None):
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(BFLOAT16)


@needs_tiles
@pytest.mark.parametrize("rows", [33, 47, 48, 63, 64, 65, 96, 127, 128, 200, 512, 513])
@pytest.mark.parametrize("bias", [False, True])
def test_any_number_of_rows(rows, bias):
    weight, wide = integers(160, 192), integers(rows, 230)
    b = integers(160) if bias else None
    made = blocked(weight)
    assert made.has_blocks
    for x in (wide[:, :192].contiguous(), wide[:, 6:198], wide[:, :192].T.contiguous().T):
        y = made.product(x, b)
        assert torch.equal(y, rounded(x, weight, b)) and y.dtype == BFLOAT16, "each sum is rounded once"


@needs_tiles
@pytest.mark.parametrize("widths", [(16,), (32,), (64,), (128,), (64, 16)])
@pytest.mark.parametrize("outputs", [1, 16, 33, 576, 577])
@pytest.mark.parametrize("inputs", [32, 2 * PART, 2 * PART + 32, 4 * PART - 32, 1536])
def test_any_panels_and_parts_of_the_inputs(inputs, outputs, widths):
    weight, x = integers(outputs, inputs), integers(70, inputs)
    assert torch.equal(blocked(weight, widths).product(x, None), rounded(x, weight))


@needs_tiles
@pytest.mark.parametrize("threads", [1, 2, 3, 7, 40])
def test_threads_share_the_outputs(threads):
    weight, x, b = integers(577, 320), integers(100, 320), integers(577)
    made, exact = blocked(weight), rounded(x, weight, b)
    with product.torch_threads(threads):
        assert all(torch.equal(made.product(x, b), exact) for _ in range(20))


@needs_tiles
def test_what_is_not_finite_stays_where_it_is():
    weight, x = integers(100, 64), integers(50, 64) + 20
    weight[7, 3], x[41, 5] = float("inf"), float("nan")
    y = blocked(weight).product(x, None)
    assert y[41].isnan().all() and y[:, 7].isfinite().sum() == 0
    rest = [row for row in range(50) if row != 41]
    assert y[rest][:, [n for n in range(100) if n != 7]].isfinite().all()


@needs_tiles
def test_sums_are_float32():
    weight, x = torch.randn(64, 4096).to(BFLOAT16), torch.randn(64, 4096).to(BFLOAT16)
    torch.testing.assert_close(blocked(weight).product(x, None), rounded(x, weight), rtol=2 ** -7, atol=1e-3)


@needs_tiles
def test_panels_that_no_block_fits_are_multiplied_row_by_row():
    for widths in ((48,), (96, 16)):
        weight, x = integers(96, 64), integers(65, 64)
        made = blocked(weight, widths)
        assert not made.has_blocks and not made.suits(64)
        assert torch.equal(made.product(x, None), rounded(x, weight))


@needs_tiles
@pytest.mark.parametrize("outputs, inputs, rows, threads, suits", [
    (3072, 576, 128, 1, True), (3072, 576, 129, 1, False), (1024, 576, 512, 1, True), (1025, 576, 512, 2, False),
    (576, 1024, 512, 1, True), (576, 1056, 512, 1, False), (576, 1536, 512, 2, True),
    (64, 64, LONGEST_BLOCKED, 1, True), (64, 64, LONGEST_BLOCKED + 1, 8, False)])
def test_who_is_quicker(outputs, inputs, rows, threads, suits):
    made = blocked(torch.zeros(64, 64, dtype=BFLOAT16))
    made.shape = outputs, inputs
    with product.torch_threads(threads):
        assert made.suits(rows) == suits


@needs_tiles
@pytest.mark.parametrize("rows, way", [(8, "stream"), (9, "order"), (32, "order"), (33, "stream"), (128, "stream"),
                                       (129, "order")])
def test_a_packed_weight_asks_who_is_quicker(rows, way, monkeypatch):
    weight = nn.Parameter(torch.randn(2048, 576).to(BFLOAT16), requires_grad=False)
    pack(weight, Kernels("oneDNN", 8, 0, product.NEVER, 0))
    if weight.stream is None or not weight.stream.has_blocks:
        pytest.skip("oneDNN has another order here")
    x = integers(rows, 576)
    torch.testing.assert_close(linear(x, weight), rounded(x, weight.data.clone()), rtol=2 ** -7, atol=0.1)
    for name in ("order", "stream"):
        monkeypatch.setattr(type(getattr(weight, name)), "product", lambda self, x, bias, name=name: name)
    assert linear(x, weight) == way


def test_without_tiles_there_are_no_blocks(monkeypatch):
    monkeypatch.setattr(stream.panel_loops, "multiplies_tiles", lambda: False)
    weight = integers(64, 64)
    memory = weight.reshape(64, -1, 2).transpose(0, 1).contiguous()
    made = Stream([Panel(memory.data_ptr(), 64, 32, 0, 0)], (64, 64), BFLOAT16)
    assert not made.has_blocks and not made.suits(64)

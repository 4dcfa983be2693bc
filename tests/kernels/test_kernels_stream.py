"""Loops over panels: any panels, any rows, exact where sums of small integers are."""

import platform

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tplab.kernels import compiled, product, stream
from tplab.kernels.product import Kernels, linear, pack
from tplab.kernels.stream import Panel, Stream

DTYPES = [torch.float32, torch.bfloat16]


def laid_out(weight, widths, inputs):
    """A weight as panels of these widths, each for so many inputs; what fills the last one up is NaN."""
    memory, panels, output, pair = [], [], 0, 4 // weight.itemsize
    while output < len(weight):
        width = widths[len(panels) % len(widths)]
        for first in range(0, weight.shape[1], inputs):
            part = weight[output:output + width, first:first + inputs]
            part = F.pad(part, (0, part.shape[1] % pair, 0, width - len(part)), value=float("nan"))
            memory.append(part.reshape(width, -1, pair).transpose(0, 1).contiguous())
            panels.append(Panel(memory[-1].data_ptr(), width, len(memory[-1]), output, first))
        output += width
    return memory, panels


def streamed(weight, widths=(48,), inputs=128):
    memory, panels = laid_out(weight, widths, inputs)
    made = Stream.of(panels, weight.shape, weight.dtype)
    if made is None:
        assert platform.machine() != "x86_64" or not stream.has(
            {torch.float32: "avx512f", torch.bfloat16: "avx512bf16"}[weight.dtype])
        pytest.skip("this processor has no instruction for it")
    made.memory = memory
    return made


@pytest.fixture(params=["tiles", "vectors"])
def instructions(request, monkeypatch):
    """By tiles where there are, and by vectors."""
    if request.param != "tiles":
        monkeypatch.setattr(stream.panel_loops, "multiplies_tiles", lambda: False)
    return request.param


def integers(*size, dtype):
    return torch.randint(-9, 10, size).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [*range(1, 20), 31, 32, 33, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_any_number_of_rows(dtype, rows, bias, instructions):
    weight, wide = integers(144, 192, dtype=dtype), integers(rows, 198, dtype=dtype)
    b = integers(144, dtype=dtype) if bias else None
    before = None if b is None else b.clone()
    made = streamed(weight, inputs=64)
    for x in (wide[:, :192].contiguous(), wide[:, 6:], wide[:, :192].T.contiguous().T):
        y = made.product(x, b)
        exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
        assert torch.equal(y, exact.to(dtype)) and y.dtype == dtype, "each sum is rounded once"
        assert torch.equal(made.product(x, b), y)
    assert bias is False or torch.equal(b, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("widths", [(16,), (32,), (48,), (64,), (48, 48, 16), (80, 16), (96, 32)])
@pytest.mark.parametrize("outputs, inputs, part", [(577, 130, 130), (576, 96, 32), (33, 514, 100), (1, 2, 2)])
def test_any_panels(dtype, rows, widths, outputs, inputs, part, instructions):
    weight, x = integers(outputs, inputs, dtype=dtype), integers(rows, inputs, dtype=dtype)
    y = streamed(weight, widths, part).product(x, None)
    assert torch.equal(y, F.linear(x.double(), weight.double()).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [33, 36, 101, 130])
@pytest.mark.parametrize("widths, steps, by_fours", [((64,), 64, True), ((64,), 65, False), ((64, 48), 64, False)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_prompts_rows(dtype, rows, widths, steps, by_fours, threads, instructions):
    """In fours and two steps at a time, where all panels have 64 outputs and an even number of steps."""
    part = steps * (4 // dtype.itemsize)
    inputs = 2 * part + 4
    weight, x = integers(200, inputs, dtype=dtype), integers(rows, inputs, dtype=dtype)
    made = streamed(weight, widths, part)
    assert made.takes_few == by_fours
    b = integers(200, dtype=dtype)
    with product.torch_threads(threads):
        for bias in (None, b):
            exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            assert torch.equal(made.product(x, bias), exact.to(dtype))


@pytest.mark.parametrize("rows, loop", [
    (4, (4, 4, 1)), (8, (2, 8, 1)), (32, (2, 8, 1)), (33, (4, 4, 2)), (512, (4, 4, 2))])
def test_how_many_rows_meet_how_many_outputs(rows, loop, monkeypatch):
    """Vectors of outputs, rows and steps at once: a batch's weights come from memory, a prompt's from a cache."""
    made = streamed(integers(128, 64, dtype=torch.float32), (64,))
    asked, by_vectors = [], stream.panel_loops.by_vectors
    monkeypatch.setattr(stream.panel_loops, "by_vectors", lambda *given: asked.append(given) or by_vectors(*given))
    made.product(integers(rows, 64, dtype=torch.float32), None)
    assert [(vectors, rows, steps) for _, vectors, _, _, rows, _, _, steps in asked] == [loop]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_sums_are_as_good_as_their_dtype(dtype, rows, instructions):
    weight, x = torch.randn(576, 1536).to(dtype), torch.randn(rows, 1536).to(dtype)
    y, exact = streamed(weight).product(x, None), F.linear(x.double(), weight.double())
    if dtype == torch.float32:
        assert (y.double() - exact).abs().max() <= 2 * (F.linear(x, weight).double() - exact).abs().max()
    else:
        torch.testing.assert_close(y, exact.to(dtype), rtol=2 ** -7, atol=1e-4)  # rounded once


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_where_it_is(dtype, instructions):
    weight, x = integers(100, 64, dtype=dtype), integers(3, 64, dtype=dtype) + 20
    weight[7, 3], x[1, 5] = float("inf"), float("nan")
    y = streamed(weight).product(x, None)
    assert y[0].isinf().nonzero().flatten().tolist() == y[2].isinf().nonzero().flatten().tolist() == [7]
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


def test_what_the_loops_cannot_read_has_none(monkeypatch):
    def of(outputs, inputs, dtype):
        weight = torch.zeros(outputs, inputs, dtype=dtype)
        memory, panels = laid_out(weight, (outputs,), inputs)
        return Stream.of(panels, weight.shape, dtype)

    for dtype in DTYPES:
        assert of(24, 64, dtype) is None, "half a vector"
    assert of(32, 65, torch.bfloat16) is None, "the last input has no pair"
    panels = [Panel(0, 32, 64, 0, 0), Panel(0, 32, 32, 32, 0), Panel(0, 32, 32, 32, 32)]
    assert Stream.of(panels, (64, 64), torch.float32) is None, "threads cannot share what differs from output to output"
    asked = []
    monkeypatch.setattr(stream, "has", lambda feature: asked.append(feature))
    for dtype in DTYPES:
        assert of(48, 64, dtype) is None, "no such processor"
    assert asked == ["avx512f", "avx512bf16"]


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_the_outputs(dtype, threads, instructions):
    """More of them than there are panels, too; and none meets another's sums, whatever their number."""
    for outputs, part in ((576, 64), (97, 192), (33, 32)):
        weight, x = integers(outputs, 192, dtype=dtype), integers(9, 192, dtype=dtype)
        made, exact = streamed(weight, (48, 16), part), F.linear(x.double(), weight.double()).to(dtype)
        with product.torch_threads(threads):
            assert all(torch.equal(made.product(x, None), exact) for _ in range(20))
            assert torch.equal(made.product(x[:1], None), exact[:1])


def test_without_threads_to_share_it_one_does_it_all(monkeypatch):
    loops = stream.panel_loops
    monkeypatch.setattr(compiled, "has_threads", lambda: False)
    loops.by_vectors.cache_clear()
    try:
        weight, x = integers(144, 192, dtype=torch.float32), integers(3, 192, dtype=torch.float32)
        with product.torch_threads(2):
            assert torch.equal(streamed(weight).product(x, None), F.linear(x, weight))
    finally:
        loops.by_vectors.cache_clear()


@pytest.mark.parametrize("rows, wide, narrow", [
    (1, (4, 1, 256, 1, 4), (1, 1, 64, 1, 1)), (3, (4, 1, 256, 4, 4), (1, 1, 64, 4, 1)),
    (4, (4, 1, 256, 4, 4), (1, 1, 64, 4, 1)), (5, (2, 2, 256, 8, 2), (1, 1, 64, 8, 1)),
    (16, (2, 2, 256, 8, 1), (1, 1, 64, 8, 1)), (24, (2, 2, 256, 8, 1), (1, 1, 64, 8, 1))])
def test_a_pass_asks_for_its_share_of_the_next_panel(rows, wide, narrow, monkeypatch):
    """Vectors, parts, bytes of a step, rows at once, and lines that are asked for in each step."""
    asked, right = [], stream.panel_loops.by_vectors

    def by_vectors(dtype, *kind):
        asked.append(kind[:5])
        return right(dtype, *kind)

    monkeypatch.setattr(stream.panel_loops, "by_vectors", by_vectors)
    weight, x = integers(144, 192, dtype=torch.float32), integers(rows, 192, dtype=torch.float32)
    assert torch.equal(streamed(weight, (64, 64, 16), 192).product(x, None), F.linear(x, weight))
    assert asked == [wide, narrow]


@pytest.mark.parametrize("rows, threads, shares", [(1, 2, 1), (5, 2, 2), (5, 3, 2), (16, 3, 3), (16, 1, 1), (65, 4, 4)])
def test_passes_are_dealt_out_where_panels_do_not_come_out_even(rows, threads, shares, monkeypatch):
    """Of nine panels of 64 outputs, one of two threads would have five."""
    given, right = [], stream.panel_loops.by_vectors
    monkeypatch.setattr(stream.panel_loops, "by_vectors",
                        lambda *kind: lambda *call: given.append(call) or right(*kind)(*call))
    weight, x = integers(576, 192, dtype=torch.float32), integers(rows, 192, dtype=torch.float32)
    with product.torch_threads(threads):
        assert torch.equal(streamed(weight, (64,), 64).product(x, None), F.linear(x, weight))
    (call,) = given
    assert (call[4], *call[-2:]) == (shares, 9 * shares, threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [64, 192])
def test_what_stood_in_the_memory_does_not_matter(dtype, inputs, monkeypatch):
    """The first sum of an output is stored, the others are added: of one panel, or of three."""
    weight, x = integers(144, 192, dtype=dtype), integers(9, 192, dtype=dtype)
    made, exact = streamed(weight, (48,), inputs), F.linear(x.double(), weight.double()).to(dtype)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda *size, dtype: torch.full(size, float("nan"), dtype=dtype))
        found = made.product(x, None)
    assert torch.equal(found, exact)


@pytest.mark.parametrize("widths", [(64,), (96,), (128, 96)])
def test_no_two_threads_add_to_the_same_outputs(widths):
    """Wide panels are cut; what has the same outputs stands together, and is one thread's."""
    made = streamed(integers(640, 192, dtype=torch.float32), widths, 64)
    for tables in (made.tables, made.tiled_tables):
        for _, _, table in tables:
            outputs = table[:-1, 3].reshape(-1, 3)
            assert (outputs == outputs[:, :1]).all() and len({*outputs[:, 0]}) == len(outputs)


@pytest.mark.parametrize("rows, way", [(1, "stream"), (8, "stream"), (9, "order")])
def test_few_rows_meet_the_loops(rows, way, monkeypatch):
    weight = nn.Parameter(torch.randn(576, 576), requires_grad=False)
    pack(weight, Kernels("oneDNN", 8, 0, product.NEVER, 0))
    if weight.stream is None:
        pytest.skip("no loops for this processor")
    for name in ("order", "stream"):
        monkeypatch.setattr(type(getattr(weight, name)), "product", lambda self, x, bias, name=name: name)
    assert linear(torch.ones(rows, 576), weight) == way


@pytest.mark.parametrize("library, dtype", [("MKL", torch.float32), ("oneDNN", torch.float32),
                                            ("oneDNN", torch.bfloat16)])
@pytest.mark.parametrize("outputs, inputs", [(577, 500), (1001, 2000), (600, 110), (640, 576)])
def test_the_loops_read_what_a_library_has_packed_also_after_it_is_overwritten(library, dtype, outputs, inputs):
    weight = nn.Parameter(integers(outputs, inputs, dtype=dtype), requires_grad=False)
    pack(weight, Kernels(library, 32, 0, product.NEVER, 0))
    if getattr(weight, "stream", None) is None:
        pytest.skip(f"no loops for {library}'s order on this processor")
    for rows in (1, 5, 32):
        weight.data.copy_(integers(outputs, inputs, dtype=dtype))
        x = integers(rows, inputs, dtype=dtype)
        assert torch.equal(linear(x, weight), F.linear(x.double(), weight.double()).to(dtype))

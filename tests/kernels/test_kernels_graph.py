"""Calls that are noted and repeated: the same bits from other numbers, memory that nobody else gets, and a refusal of
whatever would be forgotten."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tplab.kernels import graph, product
from tplab.kernels.compiled import compiled, has, noting
from tplab.kernels.fused import rms_norm
from tplab.kernels.graph import Arena, Recording
from tplab.kernels.product import Kernels, empty_weight, linear, pack

DTYPES = [torch.float32, torch.bfloat16]


def numbers(*size, dtype=torch.float32, seed=0):
    return (3 * torch.randn(*size, generator=torch.Generator().manual_seed(seed))).to(dtype)


def repeats(work, *given):
    """Whether ``work`` can be recorded, and a replay with other numbers gives what it would."""
    given = [each.clone() for each in given]
    with torch.inference_mode():
        with Recording() as recording:
            found = work(*given)
        assert recording.refused is None, recording.refused
        found = found if isinstance(found, tuple) else (found,)
        assert all(torch.equal(one, other) for one, other in zip(found, as_tuple(work(*given))))
        for seed in (1, 2):
            for each in given:
                each.copy_(numbers(*each.shape, dtype=each.dtype, seed=seed) if each.is_floating_point() else each)
            right = as_tuple(work(*[each.clone() for each in given]))
            recording.graph.replay()
            assert all(torch.equal(one, other) for one, other in zip(found, right))
    return recording.graph


def as_tuple(found):
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_what_stands_between_products(rows, dtype):
    x, y = numbers(rows, 96, dtype=dtype), numbers(rows, 96, dtype=dtype, seed=5)
    bias, other = numbers(96, dtype=dtype), {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32}[dtype]
    repeats(lambda x, y: x + y, x, y)
    repeats(lambda x: x[:, 32:].contiguous(), x)
    repeats(lambda x: F.pad(x, (0, 0, 0, 5)), x)
    repeats(lambda x: x.to(other), x)
    repeats(lambda x: x.view(rows, 3, 32)[:, 1:].clone(), x)
    repeats(lambda x: x.view(rows, 3, 32).transpose(0, 1)[1:].contiguous() if rows == 1 else x, x)
    repeats(lambda x, y: torch.cat([x[:, 32:64], y], 1), x, y)
    repeats(lambda x, y: torch.cat([x.view(rows, 3, 1, 32), y.view(rows, 3, 1, 32)], dim=1), x, y)

    def biased(bias):
        sums = torch.zeros(rows + 2, 128, dtype=dtype)
        sums[:rows, :96].copy_(bias)
        return sums

    repeats(biased, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_stored_where_an_index_says(dtype):
    cache, rows = torch.zeros(9, 2, 32, dtype=dtype), numbers(4, 6, 32, dtype=dtype)
    index = torch.tensor([7, 0, 8, 3])

    def stored(rows):
        cache.index_copy_(0, index, rows[:, 2:4])
        return cache

    repeats(stored, rows)
    assert not cache[[1, 2, 4, 5, 6]].any()
    with torch.inference_mode():
        with Recording() as recording:
            stored(rows)
        cache.zero_()
        index.copy_(torch.tensor([1, 2, 0, 4]))
        recording.graph.replay()
        assert torch.equal(cache[[1, 2, 0, 4]], rows[:, 2:4]) and not cache[[3, 7, 8]].any(), "another index"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 13])
@pytest.mark.parametrize("biased", [False, True])
def test_products_with_a_packed_weight(rows, dtype, biased):
    weight = nn.Parameter(empty_weight(512, 448, dtype).copy_(numbers(512, 448, dtype=dtype)), requires_grad=False)
    pack(weight, Kernels("oneDNN", product.NEVER, 0, product.NEVER, 0))
    if getattr(weight, "stream", None) is None:
        pytest.skip("no loops over packed weights on this processor")
    bias = numbers(512, dtype=dtype, seed=3) if biased else None
    repeats(lambda x: linear(x, weight, bias), numbers(rows, 448, dtype=dtype))


@pytest.mark.skipif(not has("avx2") or not has("fma"), reason="a processor with AVX2 is needed")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 13])
def test_products_with_a_plain_weight(rows, dtype, monkeypatch):
    monkeypatch.setattr(product, "fastest", lambda dtype: Kernels(None, 0, 0, product.NEVER, 32))
    weight = empty_weight(512, 448, dtype).copy_(numbers(512, 448, dtype=dtype))
    repeats(lambda x: linear(x, weight), numbers(rows, 448, dtype=dtype))


@pytest.mark.skipif(not has("avx2"), reason="a processor with AVX2 is needed")
def test_a_number_that_is_not_whole_is_given_again():
    weight = numbers(64)
    assert rms_norm(numbers(3, 64), weight, 1e-6) is not None, "a loop is tried when it is made"
    repeats(lambda x: tuple(rms_norm(x, weight, eps) for eps in (1e-6, 0.25)), numbers(3, 64))


def refused(work):
    with torch.inference_mode(), Recording() as recording:
        work()
    assert recording.graph is None
    return recording.refused


def test_whatever_else_is_done_is_refused(monkeypatch):
    x, first, one_row = numbers(3, 96), torch.tensor([0]), numbers(1, 448)
    assert refused(lambda: x.sin()) == "aten.sin.default was called"
    assert refused(lambda: x.add_(1)) == "aten.add_.Tensor was called", "it writes"
    assert "aten.add.Tensor" in refused(lambda: x + 1)
    assert "aten.add.Tensor" in refused(lambda: x.t() + x.t()), "numbers that lie otherwise"
    assert "aten.add.Tensor" in refused(lambda: torch.add(x, x, alpha=2))
    assert "aten.add.Tensor" in refused(lambda: x[:, :5].contiguous() + x[:, :5].contiguous()), "no whole vectors"
    assert "aten.cat" in refused(lambda: torch.cat([x.view(3, 4, 24)[:, 1:3], x.view(3, 4, 24)[:, 1:3, :5]], 2))
    assert "aten.index_copy_" in refused(lambda: x.index_copy_(1, first, x[:, :1]))
    assert "aten.linear" in refused(lambda: F.linear(x, x))
    assert refused(lambda: (x.sin(), x.cos())) == "aten.sin.default was called", "the first"
    assert "mkldnn" in refused(lambda: x.to_mkldnn()), "an order of a library's own, whose memory nobody sees"
    theirs = x.to_mkldnn()
    assert "to_dense" in refused(theirs.to_dense)
    monkeypatch.setattr(product, "fastest", lambda dtype: Kernels(None, 0, 4, product.NEVER, 0))
    plain = empty_weight(512, 448, torch.float32).fill_(1)
    with product.torch_threads(1):
        assert refused(lambda: linear(one_row, plain)) == "NumPy's product"
    graph.refuse("nobody listens")


def test_a_tensor_that_is_made_of_numbers_is_refused():
    """Its memory is not the graph's."""
    assert refused(lambda: torch.tensor([1.0, 2.0]).add(0)) is not None


def test_views_are_nobodys_business():
    with torch.inference_mode(), Recording() as recording:
        numbers_ = x.view(3, 2, 16).transpose(0, 1)[None, :, 1:].flatten(0, 1)
        numbers_.split([1, 1], 1), numbers_.unsqueeze(0).detach(), x[:, 0], x.reshape(-1), x.expand(2, 3, 32)
    assert recording.refused is None and recording.graph.functions == []


x = numbers(3, 32)


def test_memory_that_is_given_back_is_taken_again_and_no_two_have_the_same(monkeypatch):
    monkeypatch.setattr(graph, "_PIECE", 1 << 12)
    arena, held, random = Arena(), {}, np.random.default_rng(0)
    for turn in range(400):
        if held and random.integers(3) == 0:
            del held[random.choice(list(held))]
        else:
            held[turn] = arena.take(torch.Size([int(random.integers(1, 900))]), (1,), torch.float32).fill_(turn)
        assert all((each == number).all() for number, each in held.items())
        if len(held) > 12:
            held.clear()
    assert sum(piece.nbytes for piece in arena.pieces) < 1 << 17
    held.clear()
    assert sum(end - begin for begin, end in arena.free) >= sum(piece.nbytes for piece in arena.pieces) - 64 * len(
        arena.pieces)
    assert all(begin % 64 == 0 for begin, _ in arena.free)
    view = arena.take(torch.Size([4, 8]), (16, 1), torch.float32)[1:, 2:]
    other = arena.take(torch.Size([64]), (1,), torch.float32).fill_(7)
    view.fill_(3)
    assert (other == 7).all(), "a view holds all of it"


def test_a_layer_behind_another_takes_its_memory():
    hidden = numbers(16, 1024)
    with torch.inference_mode(), Recording() as recording:
        for _ in range(50):
            hidden = hidden + hidden
    assert sum(piece.nbytes for piece in recording.graph.arena.pieces) < 1 << 21


def test_an_error_ends_the_recording():
    with pytest.raises(ValueError), Recording():
        raise ValueError
    assert noting.calls is None
    with torch.inference_mode():
        x.sin()  # nobody minds


def test_what_is_done_aside_is_not_noted():
    with torch.inference_mode(), Recording() as recording:
        with recording.aside():
            x.sin(), x + x
        y = x + x
    assert recording.refused is None and len(recording.graph.functions) == 1 and torch.equal(y, 2 * x)


_STOP = """
define void @stop(ptr %count, ptr %status, i64 %at) {
  %before = load i64, ptr %count
  %now = add i64 %before, 1
  store i64 %now, ptr %count
  %stops = icmp eq i64 %now, %at
  %word = select i1 %stops, i64 5, i64 0
  store i64 %word, ptr %status
  ret void
}
"""


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_call_that_needs_help_gets_it_and_the_rest_goes_on(at):
    """At the beginning, in the middle, at the end; and in the next replay again."""
    stop, noted, counted, helped = compiled(_STOP), graph.Graph(), np.zeros(1, np.int64), []
    for number in range(6):
        noted.add(stop, (counted.ctypes.data, noted.status, at))
        noted.rescues[number] = lambda number=number: helped.append((number, int(counted[0])))
    for turn in (1, 2):
        counted[0] = 0
        noted.replay()
        assert counted[0] == 6 and helped == [(at - 1, at)] * turn


def test_who_meets_is_told_even_if_something_fails():
    told = []

    class Meeting:
        def begin_replay(self, graph):
            told.append(graph)

        def end_replay(self):
            told.append("end")

    noted, counted = graph.Graph(), np.zeros(1, np.int64)
    noted.add(compiled(_STOP), (counted.ctypes.data, noted.status, 1))
    noted.rescues[0] = lambda: 1 / 0
    noted.meetings.append(Meeting())
    with pytest.raises(ZeroDivisionError):
        noted.replay()
    assert told == [noted, "end"]
    graph.Graph().replay()  # nothing to do

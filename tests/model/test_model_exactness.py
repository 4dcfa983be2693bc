"""Shortcuts for speed that must not change the numbers, or only by rounding."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tplab.kernels import product
from tplab.kernels.product import Kernels, empty_weight, linear
from tplab.model.attention import attend, causal_mask
from tplab.model.norm import RMSNorm


@pytest.mark.parametrize("size", [1, 7, 32, 64, 576, 896, 4096])
@pytest.mark.parametrize("rows", [(1,), (3,), (129,), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])  # the first one is fused
def test_the_norm_gives_hugging_faces_bits(size, rows, dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = RMSNorm(size, 1e-5, dtype), LlamaRMSNorm(size, 1e-5).to(dtype)
    theirs.weight.data.normal_()
    ours.weight.data.copy_(theirs.weight.data)
    for scale in (1e-6, 1.0, 1e6):
        x = scale * torch.randn(*rows, size, dtype=dtype)
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 65])
@pytest.mark.parametrize("out_features,in_features", [(1, 1), (3, 129), (64, 32), (577, 96), (9001, 150)])
@pytest.mark.parametrize("bias", [False, True])
def test_products(dtype, rows, out_features, in_features, bias):
    """Whichever kernel runs, it is x @ W.T + b within rounding, and a slice of a wider tensor will do as x."""
    weight = empty_weight(out_features, in_features, dtype).copy_(torch.randn(out_features, in_features))
    b = torch.randn(out_features, dtype=dtype) if bias else None
    wide = torch.randn(rows, in_features + 3, dtype=dtype)
    for x in (wide[:, :in_features].contiguous(), wide[:, 3:]):
        exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
        bound = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}[dtype] * (in_features ** 0.5 + 1) * 4
        assert linear(x, weight, b).dtype == dtype
        assert (linear(x, weight, b).double() - exact).abs().max() <= bound
        assert torch.equal(linear(x, weight, b), linear(x, weight, b))
        assert linear(x[:, None], weight, b).shape == (rows, 1, out_features)


@pytest.mark.parametrize("dtype, kernels", [(torch.float32, Kernels(None, 0, 4, product.NEVER, 0)),
                                            (torch.float32, Kernels(None, 0, 0, product.NEVER, 0)),
                                            (torch.bfloat16, Kernels(None, 0, 0, 2, 0)),
                                            (torch.bfloat16, Kernels(None, 0, 0, product.NEVER, 0))])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 65])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_kernel_of_a_plain_weight(dtype, kernels, rows, threads, monkeypatch):
    """Each that some processor chooses, on this one; outputs that are no multiple of what is widened at a time."""
    monkeypatch.setattr(product, "fastest", lambda asked: {dtype: kernels}[asked])
    used = []
    for name in ("_row_by_row", "_widened"):
        right = getattr(product, name)
        monkeypatch.setattr(product, name, lambda *args, name=name, right=right: used.append(name) or right(*args))
    weight = empty_weight(1001, 577, dtype).copy_(torch.randn(1001, 577))
    x, b = torch.randn(rows, 577, dtype=dtype), torch.randn(1001, dtype=dtype)
    with product.torch_threads(threads):
        y = linear(x, weight, b)
    exact = F.linear(x.double(), weight.double(), b.double())
    if dtype == torch.bfloat16:
        torch.testing.assert_close(y, exact.to(dtype), rtol=2 ** -7, atol=1e-5)  # rounded once
    else:
        torch.testing.assert_close(y.double(), exact, rtol=0, atol=3e-4)  # of sums of 577 products, around 24
    by_numpy = rows <= kernels.numpy_rows and threads == 1  # numpy would use one thread only
    assert used == ["_row_by_row"] * by_numpy + ["_widened"] * (rows >= kernels.widened_rows)


def test_some_rows_share_a_part_of_the_weight_while_it_is_warm(monkeypatch):
    shapes = []

    def matmul(x, columns, out=None):
        shapes.append((len(x), columns.shape))
        return np.matmul(x, columns, out=out)

    monkeypatch.setattr(product, "np", SimpleNamespace(matmul=matmul, empty=np.empty))
    monkeypatch.setattr(product, "WARM_BYTES", 40 * 129 * 4)  # of 129 inputs to 32 outputs, a multiple of 16
    x, columns = np.ones((2, 129), "float32"), np.ones((129, 70), "float32")
    assert (product._row_by_row(x, columns) == 129).all()
    assert shapes == [(1, (129, 32))] * 4 + [(1, (129, 6))] * 2
    product._row_by_row(x[:1], columns)
    assert shapes[6:] == [(1, (129, 70))]


@pytest.mark.parametrize("kernels", [Kernels(None, 0, 0, 16, 0), Kernels(None, 0, 0, product.NEVER, 0)])
def test_attention_in_bfloat16(kernels, monkeypatch):
    monkeypatch.setattr(product, "fastest", lambda dtype: {torch.bfloat16: kernels}[dtype])
    q, k, v = (torch.randn(2, heads, 9, 64).bfloat16() for heads in (6, 2, 2))
    mask = causal_mask(torch.arange(9).expand(2, 9), 9)
    exact = attend(q.double(), k.double(), v.double(), mask, 0.3).bfloat16()
    assert attend(q, k, v, mask, 0.3).dtype == torch.bfloat16
    torch.testing.assert_close(attend(q, k, v, mask, 0.3), exact, rtol=2 ** -6, atol=2e-2)  # weights are rounded too
    assert product.is_widened(torch.bfloat16) == (kernels.widened_rows < product.NEVER)
    assert not product.is_widened(torch.float32)


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("batch, heads, kv_heads, queries, keys", [
    (1, 9, 3, 64, 64), (2, 6, 2, 7, 129), (3, 4, 4, 1, 300), (1, 6, 1, 65, 577), (1, 2, 1, 1, 1)])
def test_attention_in_any_dtype_is_attention(dtype, bound, batch, heads, kv_heads, queries, keys):
    """Scores that differ widely, and masks that differ from sequence to sequence."""
    q = 4 * torch.randn(batch, queries, heads, 24).transpose(1, 2)
    k, v = (torch.randn(batch, keys, kv_heads, 24).transpose(1, 2) for _ in range(2))
    starts = (keys - queries) * torch.arange(1, batch + 1) // batch
    mask = causal_mask(starts[:, None] + torch.arange(queries), keys)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    exact = attend(q.double(), k.double(), v.double(), mask, 0.25)
    assert (attend(q, k, v, mask, 0.25).double() - exact).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_query_that_sees_nothing_is_nan(dtype):
    """As in a softmax; the fused function alone would say 0."""
    q, k = torch.randn(1, 2, 3, 8, dtype=dtype), torch.randn(1, 1, 3, 8, dtype=dtype)
    mask = torch.tensor([[[[False, True, True], [True, True, True], [False, False, False]]]])
    assert attend(q, k, k, mask, 1.0).isnan().all(-1).all(1).tolist() == [[False, True, False]]


@pytest.mark.parametrize("times, chosen", [
    ({}, (None, 0, 0, product.NEVER, 0)),
    ({"numpy": (2, 3, 5)}, (None, 0, 2, product.NEVER, 0)),
    ({"numpy": (2, 3, 5), "oneDNN": (9, 5, 5, 5, 5)}, ("oneDNN", 0, 2, product.NEVER, 0)),
    ({"numpy": (2, 3, 5), "oneDNN": (10, 5, 5, 5, 5)}, (None, 0, 2, product.NEVER, 0)),
    ({"oneDNN": (12, 5, 5, 5, 5), "oneDNN streamed": (3, 6, 6, 6, 6)}, ("oneDNN", 1, 0, product.NEVER, 0)),
    ({"oneDNN": (12, 5, 5, 5, 5), "oneDNN streamed": (4, 4, 5, 4, 6)}, ("oneDNN", 8, 0, product.NEVER, 0)),
    ({"oneDNN": (12, 5, 5, 5, 5), "oneDNN streamed": (4, 4, 7, 4, 6)}, ("oneDNN", 2, 0, product.NEVER, 0)),
    ({"oneDNN": (5, 4, 4, 9, 9), "oneDNN streamed": (4, 4, 4, 8, 10)}, ("oneDNN", 8, 0, product.NEVER, 0)),
    ({"oneDNN": (5, 4, 4, 9, 9), "oneDNN streamed": (5, 4, 4, 9, 9)}, (None, 0, 0, product.NEVER, 0)),
    ({"oneDNN": (12, 5, 5, 5, 6), "oneDNN streamed": (4, 4, 5, 4, 5)}, ("oneDNN", product.NEVER, 0, product.NEVER, 0)),
    ({"oneDNN": (5, 5, 5, 5, 5), "MKL": (5, 9, 9, 6, 5)}, ("oneDNN", 0, 0, product.NEVER, 0)),
    ({"oneDNN": (5, 5, 5, 6, 5), "MKL": (5, 9, 9, 5, 5)}, ("MKL", 0, 0, product.NEVER, 0)),
    ({"oneDNN": (5, 5, 5, 6, 5), "oneDNN streamed": (3, 6, 6, 6, 6), "MKL": (5, 9, 9, 5, 5)},
     ("oneDNN", 1, 0, product.NEVER, 0)),
    ({"MKL": (4, 1, 1, 9, 9)}, (None, 0, 0, product.NEVER, 0)),
    ({"oneDNN": (12, 5, 5, 5, 5), "oneDNN streamed": (4, 4, 4, 4, 5.2)},
     ("oneDNN", product.NEVER, 0, product.NEVER, 0)),
    ({"widened": (5, 3, 4, 9, 3)}, (None, 0, 0, 16, 0)),
    ({"widened": (3, 3, 3, 3, 3)}, (None, 0, 0, 1, 0)),
    ({"widened": (5, 3, 3, 3, 9)}, (None, 0, 0, product.NEVER, 0)),
    ({"dots": (3, 3, 3, 9, 10)}, (None, 0, 0, product.NEVER, 4)),
    ({"dots": (3, 3, 3, 9, 8), "numpy": (2, 3, 5)}, (None, 0, 0, product.NEVER, 16)),
    ({"dots": (4, 4, 4, 9, 9), "numpy": (2, 3, 5)}, (None, 0, 2, product.NEVER, 0)),
    ({"dots": (2, 2, 2, 6, 8), "widened": (5, 3, 4, 9, 7)}, (None, 0, 0, 16, 8)),
    ({"dots": (5, 4, 4, 7, 8), "oneDNN": (8, 5, 5, 5, 5)}, ("oneDNN", 0, 0, product.NEVER, 16)),
    ({"dots": (3, 3, 3, 7, 8), "oneDNN": (9, 5, 5, 5, 5)}, (None, 0, 0, product.NEVER, 16)),
])
def test_what_times_speak_for(times, chosen, monkeypatch):
    monkeypatch.setattr(product, "_ROWS_TIMED", (1, 2, 4, 8, 16))
    times = {"F.linear": (4, 4, 4, 9, 9), **times}
    seconds = {(way, rows): time for way, each in times.items() for rows, time in zip((1, 2, 4, 8, 16), each)}
    assert product._chosen(seconds) == Kernels(*chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dot_rows", [0, 8])
def test_large_weights_lie_behind_each_other(dtype, dot_rows, monkeypatch):
    """In large pieces, whose pages are huge; no number belongs to two."""
    pages = product._Pages()
    monkeypatch.setattr(product, "_pages", pages)
    monkeypatch.setattr(product, "fastest", lambda dtype: Kernels(None, 0, 0, product.NEVER, dot_rows))
    monkeypatch.setattr(product, "PIECE_BYTES", 1 << 21)
    weights, pieces = [], []
    for size in [(255, 257), (257, 256), (256, 256), (300, 301), (301, 300), (1001, 577)]:
        weights.append(empty_weight(*size, dtype))
        piece = pages.piece()
        begin = piece.ctypes.data if piece is not None else 0
        pieces.append(piece is not None and 0 <= weights[-1].data_ptr() - begin < piece.nbytes and begin)
        assert weights[-1].data_ptr() % 16 == begin % 16 * bool(pieces[-1]), "as NumPy aligns"
    for number, weight in enumerate(weights):
        weight.fill_(number)
    assert [weight.unique().tolist() for weight in weights] == [[number] for number in range(6)]
    assert [bool(piece) for piece in pieces] == [False] + 5 * [True]
    assert pieces[1] == pieces[2], "two fit into a piece"
    assert piece.nbytes == max(1 << 21, 1001 * 577 * dtype.itemsize), "one that fits into none has its own"
    by_columns = [dtype == torch.float32 and (number == 0 or not dot_rows) for number in range(6)]
    assert [weight.t().is_contiguous() for weight in weights] == by_columns


def test_memory_goes_with_the_last_weight_in_it(monkeypatch):
    """As when all of them are packed."""
    pages = product._Pages()
    monkeypatch.setattr(product, "_pages", pages)
    first, second = (empty_weight(256, 256, torch.float32) for _ in range(2))
    first.fill_(1)
    piece = pages.piece()
    assert piece.nbytes == product.PIECE_BYTES
    del piece, first
    assert pages.piece() is not None, "of the second one"
    del second
    assert pages.piece() is None
    assert empty_weight(256, 256, torch.float32).fill_(2).unique().tolist() == [2]


def test_a_product_that_wants_a_gradient_has_one():
    weight = empty_weight(3, 5, torch.float32).copy_(torch.randn(3, 5))
    x = torch.randn(2, 5, requires_grad=True)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 5))


def test_kernels_are_measured_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TPLAB_CACHE", str(tmp_path))
    measured = []
    found = Kernels("MKL", 8, 2, 16, 4)
    monkeypatch.setattr(product, "_measured", lambda dtype: measured.append(dtype) or found)
    for _ in range(2):
        product.fastest.cache_clear()
        assert product.fastest(torch.float32) == product.fastest(torch.float32) == found
    assert measured == [torch.float32]
    for owner, name in ((torch, "__version__"), (product.platform, "node")):  # another torch, another machine
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(owner, name, "other" if owner is torch else lambda: "other")
            product.fastest.cache_clear()
            product.fastest(torch.float32)
            product.fastest.cache_clear()
            assert measured.pop() and measured.count(torch.float32) == 1
    older = '{"packed": false, "numpy_for_one_row": true, "numpy_rows": 0, "widened_rows": 9}'
    for damaged in ("[]", "", older):
        measured.clear()
        for file in (tmp_path / "kernels").iterdir():
            file.write_text(damaged)
        product.fastest.cache_clear()
        assert product.fastest(torch.float32) == found and len(measured) == 1
    monkeypatch.setenv("TPLAB_CACHE", str(tmp_path / "deep" / "er"))
    for _ in range(2):
        measured.clear()
        product.fastest.cache_clear()
        product.fastest(torch.float32)
    assert not measured, "kept in a cache that was not there"
    monkeypatch.setenv("TPLAB_CACHE", "/dev/null/nowhere")
    product.fastest.cache_clear()
    assert product.fastest(torch.bfloat16) == found
    product.fastest.cache_clear()

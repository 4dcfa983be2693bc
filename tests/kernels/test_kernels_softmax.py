"""Attention's weights in one pass: PyTorch's bits, or PyTorch itself."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tplab.kernels import softmax
from tplab.kernels.compiled import has
from tplab.kernels.product import torch_threads
from tplab.kernels.softmax import masked_softmax, masked_softmax_by_torch
from tplab.model import attention

LANES = softmax._LANES.get(torch.backends.cpu.get_cpu_capability())
needs_vectors = pytest.mark.skipif(LANES is None or not has("fma"),
                                   reason="loops are for x86 processors of the last ten years")
INF, NAN = float("inf"), float("nan")


def case(batch, heads, queries, keys, scale=8.0, hidden=0.3):
    generator = torch.Generator().manual_seed(keys)
    mask = torch.rand(batch, 1, queries, keys, generator=generator) < hidden
    mask[..., 0] = False
    return scale * torch.randn(batch, heads, queries, keys, generator=generator), mask


def weights(scores, mask, scaling=0.3):
    found = masked_softmax(given := scores.clone(), mask, scaling)
    assert found is not None and found.data_ptr() == given.data_ptr(), "they replace the scores"
    return found


@needs_vectors
@pytest.mark.parametrize("keys", [LANES or 16, 17, 31, 32, 33, 100, 513, 2048])
def test_it_has_torchs_bits(keys):
    """Every sequence with its own mask, every query with its own row of it, whatever is left of a vector."""
    for batch, heads, queries in ((1, 1, 1), (3, 1, 1), (1, 9, 5), (2, 3, 7), (0, 3, 7), (2, 3, 0)):
        for scale in (1e-3, 8.0, 400.0):
            for hidden in (0.0, 0.3, 0.99):
                scores, mask = case(batch, heads, queries, keys, scale, hidden)
                assert torch.equal(weights(scores, mask), masked_softmax_by_torch(scores, mask, 0.3))


@needs_vectors
@pytest.mark.parametrize("keys", [32, 45])
def test_numbers_without_end_and_rows_that_see_nothing(keys):
    """A NaN, an infinity, a finite score whose product overflows: first, last, hidden or not; all of a row hidden."""
    for odd in (NAN, INF, -INF, 3e38, -3e38, 0.0, -0.0, 1e-42):
        for place in (0, 20, keys - 1):
            scores, mask = case(1, 2, 3, keys)
            scores[:, 0, :, place] = odd
            mask[:, :, 1, place], mask[:, :, 2] = False, True
            for scaling in (0.3, -4.0):
                torch.testing.assert_close(weights(scores, mask, scaling),
                                           masked_softmax_by_torch(scores, mask, scaling),
                                           rtol=0, atol=0, equal_nan=True)


@needs_vectors
def test_threads_share_the_rows():
    for shape in ((1, 9, 128, 512), (2, 3, 1, 6000), (1, 1, 1, 40_000)):
        scores, mask = case(*shape)
        right = masked_softmax_by_torch(scores, mask, 0.3)
        for threads in (1, 2, 3, 7):
            with torch_threads(threads):
                assert torch.equal(weights(scores, mask), right)


@needs_vectors
def test_a_mask_may_lie_anyhow():
    scores, mask = case(3, 2, 4, 50)
    for same in (mask[:1].expand_as(mask), mask.transpose(2, 3).contiguous().transpose(2, 3)):
        assert torch.equal(weights(scores, same), masked_softmax_by_torch(scores, same, 0.3))


@needs_vectors
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_with_shorter_vectors_or_none(capability):
    """PyTorch adds up another way there: its bits again, or PyTorch itself."""
    code = f"""
import torch
from tplab.kernels.softmax import masked_softmax, masked_softmax_by_torch
for keys in (7, 8, 23, 40):
    scores, mask = 8 * torch.randn(2, 3, 5, keys), torch.ones(2, 1, 5, keys, dtype=torch.bool).triu(2)
    right = masked_softmax_by_torch(scores, mask, 0.3)
    found = masked_softmax(scores, mask, 0.3)
    there = {capability == "avx2"} and keys >= 8
    assert torch.equal(found, right) if there else found is None, keys
"""
    subprocess.run([sys.executable, "-c", code], check=True,
                   env={**os.environ, "ATEN_CPU_CAPABILITY": capability})


SCORES, MASK = torch.ones(2, 3, 4, 64), torch.zeros(2, 1, 4, 64, dtype=torch.bool)


@pytest.mark.parametrize("scores, mask", [
    (SCORES.double(), MASK), (SCORES.bfloat16(), MASK), (SCORES, MASK.float()), (SCORES, MASK.byte()),
    (SCORES, MASK[:1]), (SCORES, MASK.expand(2, 3, 4, 64)), (SCORES, MASK[:, :, :1]), (SCORES, MASK[..., :63]),
    (SCORES[..., :63], MASK[..., :63]), (SCORES[..., ::2], MASK[..., ::2]), (SCORES.clone().requires_grad_(), MASK),
    (SCORES[..., :7].contiguous(), MASK[..., :7]), (SCORES[..., :0], MASK[..., :0])])
def test_what_is_left_to_torch(scores, mask):
    before = scores.detach().clone()
    assert masked_softmax(scores, mask, 0.3) is None and torch.equal(scores, before)


@pytest.mark.parametrize("scaling", [torch.tensor(0.3), torch.full((3, 1, 1), 0.3), np.float32(0.3)])
def test_a_scaling_of_another_kind_is_torchs_too(scaling):
    """As somebody's patch may set it."""
    assert masked_softmax(SCORES.clone(), MASK, scaling) is None
    q, k, v = torch.randn(3, 1, 3, 40, 16).unbind()
    mask = attention.causal_mask(torch.arange(40)[None], 40)
    right = attention.attend(q, k, v, mask, float(np.float32(0.3)))
    assert torch.equal(attention.attend(q, k, v, mask, scaling), right)


@needs_vectors
def test_where_torch_rounds_in_another_way_it_does_it(monkeypatch):
    monkeypatch.setattr(softmax, "masked_softmax_by_torch", lambda *given: masked_softmax_by_torch(*given) * (1 + 2e-7))
    assert softmax._loop.__wrapped__(LANES) is None
    monkeypatch.undo()
    assert softmax._loop.__wrapped__(LANES) is not None


@pytest.mark.parametrize("queries, keys", [(1, 40), (5, 40), (5, 6)])
def test_attention_has_the_bits_that_it_has_without(monkeypatch, queries, keys):
    q, (k, v) = torch.randn(2, 6, queries, 16), torch.randn(2, 2, 2, keys, 16)
    mask = attention.causal_mask(torch.arange(keys - queries, keys).expand(2, queries), keys)
    found, asked = attention.attend(q, k, v, mask, 0.3), []
    monkeypatch.setattr(attention, "masked_softmax", lambda *given: asked.append(given))
    assert torch.equal(found, attention.attend(q, k, v, mask, 0.3)) and len(asked) == 1


def test_another_mask_scores_is_asked(monkeypatch):
    """As a fault or a learner puts it in place; the weights are then PyTorch's."""
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind()
    mask = attention.causal_mask(torch.arange(40)[None], 40)
    right, seen = attention.attend(q, k, v, mask, 0.3), []

    def watched(scores, mask):
        seen.append(scores.clone())
        return scores.masked_fill(mask, -INF)

    monkeypatch.setattr(attention, "mask_scores", watched)
    assert torch.equal(attention.attend(q, k, v, mask, 0.3), right)
    torch.testing.assert_close(seen[0], q @ k.transpose(2, 3) * 0.3)
    monkeypatch.setattr(attention, "mask_scores", lambda scores, mask: scores)
    assert not torch.equal(attention.attend(q, k, v, mask, 0.3), right)

"""Shortcuts for speed that must not change the numbers, or only by rounding."""

import pytest
import torch
from torch.nn import functional as F

from tplab.model.norm import RMSNorm
from tplab.shard.product import empty_weight, linear


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


def test_a_product_that_wants_a_gradient_has_one():
    weight = empty_weight(3, 5, torch.float32).copy_(torch.randn(3, 5))
    x = torch.randn(2, 5, requires_grad=True)
    linear(x, weight).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(2, 5))

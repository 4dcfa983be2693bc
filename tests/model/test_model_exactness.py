"""Norm and attention beside Hugging Face's own functions."""

from types import SimpleNamespace

import pytest
import torch

from tplab.model.attention import attend, causal_mask
from tplab.model.norm import RMSNorm

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("size", [1, 7, 32, 576, 4096])
@pytest.mark.parametrize("rows", [(1,), (129,), (2, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_gives_hugging_faces_bits(size, rows, dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = RMSNorm(size, 1e-5, dtype), LlamaRMSNorm(size, 1e-5).to(dtype)
    theirs.weight.data.normal_()
    ours.weight.data.copy_(theirs.weight.data)
    for scale in (1e-6, 1.0, 1e6):
        x = scale * torch.randn(*rows, size, dtype=dtype)
        assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, heads, kv_heads, queries, keys", [
    (1, 9, 3, 64, 64), (2, 6, 2, 7, 129), (3, 4, 4, 1, 300), (1, 6, 1, 65, 577), (1, 2, 1, 1, 1)])
def test_attention_is_as_exact_as_hugging_faces(dtype, batch, heads, kv_heads, queries, keys):
    """Scores that differ widely, and masks that differ from sequence to sequence."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def theirs(q, k, v):
        module = SimpleNamespace(num_key_value_groups=heads // kv_heads, training=False)
        added = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(mask, torch.finfo(q.dtype).min)
        return eager_attention_forward(module, q, k, v, added, 0.25)[0].transpose(1, 2)

    q = 4 * torch.randn(batch, queries, heads, 24).transpose(1, 2)
    k, v = (torch.randn(batch, keys, kv_heads, 24).transpose(1, 2) for _ in range(2))
    starts = (keys - queries) * torch.arange(1, batch + 1) // batch
    mask = causal_mask(starts[:, None] + torch.arange(queries), keys)
    given = [x.to(dtype) for x in (q, k, v)]
    exact = theirs(*(x.double() for x in given))
    ours, right = attend(*given, mask, 0.25), theirs(*given)
    assert ours.dtype == dtype
    assert (ours - exact).norm() <= 1.5 * (right - exact).norm() + 1e-7 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_sees_nothing_is_nan(dtype):
    """As in a softmax."""
    q, k = torch.randn(1, 2, 3, 8, dtype=dtype), torch.randn(1, 1, 3, 8, dtype=dtype)
    mask = torch.tensor([[[[False, True, True], [True, True, True], [False, False, False]]]])
    assert attend(q, k, k, mask, 1.0).isnan().all(-1).all(1).tolist() == [[False, True, False]]

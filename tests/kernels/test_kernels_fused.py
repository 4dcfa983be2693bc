"""The norm and the rotation in one pass: PyTorch's bits, or PyTorch itself."""

import pytest
import torch

from tplab.kernels import fused
from tplab.kernels.compiled import has
from tplab.kernels.fused import rms_norm, rms_norm_by_torch, rotate_half
from tplab.kernels.product import torch_threads
from tplab.model import rope

DTYPES = [torch.float32, torch.bfloat16]
needs_avx = pytest.mark.skipif(not has("avx2"), reason="loops are for x86 processors of the last ten years")


@needs_avx
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [32, 64, 480, 512, 544, 576, 1024, 3584, 8160, 8192, 8224, 16384])
def test_the_norm_adds_up_as_torch_does(dtype, size):
    """Up to a level's end, at it and behind it; sums of 16, of 256, and of more groups."""
    for scale in (1e-6, 1.0, 1e6):
        x, weight = (scale * torch.randn(40, size)).to(dtype), torch.randn(size).to(dtype)
        x[1] = 0
        for rows in (x, x[:1], x.view(2, 20, size), x[::3], x[:0], x.view(2, 20, size).transpose(0, 1)):
            assert torch.equal(rms_norm(rows, weight, 1e-5), rms_norm_by_torch(rows, weight, 1e-5))
        assert torch.equal(rms_norm(x, weight, 0.3), rms_norm_by_torch(x, weight, 0.3))
    x[0, 3], x[2, 5] = float("nan"), float("inf")
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_by_torch(x, weight, 1e-5), rtol=0, atol=0,
                               equal_nan=True)


@pytest.mark.parametrize("x, weight", [
    (torch.ones(2, 64).double(), torch.ones(64).double()), (torch.ones(2, 65), torch.ones(65)),
    (torch.ones(2, 16), torch.ones(16)), (torch.ones(2, 64), torch.ones(64).bfloat16()),
    (torch.ones(2, 0), torch.ones(0)), (torch.ones(64, 64).T, torch.ones(64)),
    (torch.ones(2, 64).half(), torch.ones(64).half()),
    (torch.ones(2, 64, requires_grad=True), torch.ones(64)), (torch.ones(2, 64), torch.ones(64, requires_grad=True))])
def test_what_the_norm_leaves_to_torch(x, weight):
    assert rms_norm(x, weight, 1e-5) is None


def test_where_torch_adds_up_in_another_order_it_does_the_norm(monkeypatch):
    monkeypatch.setattr(fused, "rms_norm_by_torch", lambda *given: rms_norm_by_torch(*given) * (1 + 2 ** -22))
    assert fused._norm.__wrapped__(torch.float32, 64) is None
    monkeypatch.undo()
    assert (fused._norm.__wrapped__(torch.float32, 64) is not None) == has("avx2")


@pytest.mark.parametrize("used", [rms_norm, lambda *given: None])
def test_a_norm_is_trained_and_read_as_ever(used, monkeypatch):
    """A gradient goes through torch's operations."""
    from tplab.model import norm

    monkeypatch.setattr(norm, "rms_norm", used)
    ours, x = norm.RMSNorm(64, 1e-5, torch.float32), torch.randn(3, 64, requires_grad=True)
    ours.weight.data.normal_()
    ours(x).square().sum().backward()
    assert x.grad.isfinite().all() and torch.equal(ours(x), ours(x.detach()))


def heads_and_angles(dtype, tokens, heads, kv_heads, size):
    """q and k as views of one wide tensor, as the engine has them, and numbers as no rotation has them."""
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size).to(dtype)
    q, k, _ = (part.view(tokens, -1, size).transpose(0, 1)[None] for part in qkv.split(
        [heads * size, kv_heads * size, kv_heads * size], 1))
    return q, k, torch.randn(1, tokens, size).to(dtype), torch.randn(1, tokens, size).to(dtype)


@needs_avx
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_share_the_rows(dtype):
    """As many as are worth sharing, one more, and fewer than there are threads."""
    weight = torch.randn(8192).to(dtype)
    for rows, size in ((512, 64), (513, 64), (5, 8192), (4, 8192), (3, 8192)):
        x = torch.randn(rows, size).to(dtype)
        q, k, cos, sin = heads_and_angles(dtype, rows, 5, 1, 64)
        exact, turned = rms_norm_by_torch(x, weight[:size], 1e-5), rotate_half(q, k, cos, sin)
        for threads in (2, 3, 7):
            with torch_threads(threads):
                assert torch.equal(rms_norm(x, weight[:size], 1e-5), exact)
                assert all(map(torch.equal, rotate_half(q, k, cos, sin), turned))


@needs_avx
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, heads, kv_heads, size", [(1, 6, 2, 64), (7, 3, 1, 32), (33, 5, 5, 128),
                                                           (2, 4, 0, 96)])
def test_the_rotation_has_hugging_faces_bits(model_type, dtype, tokens, heads, kv_heads, size):
    q, k, cos, sin = heads_and_angles(dtype, tokens, heads, kv_heads, size)
    theirs = rope._modeling(model_type).apply_rotary_pos_emb
    for given in ((q, k, cos, sin), (q.contiguous(), k.contiguous(), cos, sin),
                  (q.flip(1), k, cos.expand(3, -1, -1)[1:2], torch.stack([sin, sin], 2)[:, :, 1])):
        found = rotate_half(*given)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, theirs(*given), strict=True))
        assert all(torch.equal(a, b) for a, b in zip(rope.rotate(model_type)(*given), found, strict=True))
    assert found[0].transpose(1, 2).is_contiguous(), "as the next product wants it"


def test_what_the_rotation_leaves_to_hugging_face(monkeypatch):
    theirs = rope._modeling("llama").apply_rotary_pos_emb
    q, k, cos, sin = heads_and_angles(torch.float32, 4, 3, 3, 64)
    left = [(q.double(), k.double(), cos.double(), sin.double()), (q, k.double(), cos, sin), (q, k, cos.double(), sin),
            (q, k, cos[:, :1], sin[:, :1]), (q, k, cos, sin[:, :1]), (q[:, :, :1], k, cos, sin),
            (q, k[:, :, :1], cos, sin), (q[..., ::2], k[..., ::2], cos[..., ::2], sin[..., ::2]),
            (q.clone().requires_grad_(), k, cos, sin), (q.expand(2, -1, -1, -1), k, cos, sin),
            (q, k.expand(2, -1, -1, -1), cos, sin), (q, k, cos.expand(2, -1, -1), sin), (q[0], k[0], cos, sin),
            (q[..., :6], k[..., :6], cos[..., :6], sin[..., :6])]
    for given in left:
        assert rotate_half(*given) is None, [tuple(x.shape) for x in given]
        for ours, right in zip(rope.rotate("llama")(*given), theirs(*given), strict=True):
            assert torch.equal(ours, right)
    for wrong in ((q, k, cos[:, :3], sin[:, :3]), (q.transpose(1, 2), k, cos, sin), (q, k, cos), ((cos, sin), q, k),
                  (q, k, (cos, sin), None)):
        raised = []
        for function in (theirs, rope.rotate("llama")):
            with pytest.raises(Exception) as error:
                function(*wrong)
            raised.append((error.type, str(error.value)))
        assert raised[0] == raised[1], "its own words"
    swapped = q.transpose(1, 2), k.transpose(1, 2), cos, sin
    assert torch.equal(rope.rotate("llama")(*swapped, unsqueeze_dim=2)[0], theirs(*swapped, unsqueeze_dim=2)[0])

"""Attention by tiles of queries: what float64 gives, rounded as torch's fused attention rounds, in float32 with the
bits of torch's products, or torch itself."""

import pytest
import torch
from torch.nn import functional as F

from tplab.cache import PagedKVCache, Segment
from tplab.kernels import tiled_attention, tiled_loops
from tplab.kernels.compiled import has
from tplab.kernels.paged_attention import attend_by_torch
from tplab.kernels.panel_loops import multiplies_tiles
from tplab.kernels.product import torch_threads
from tplab.kernels.tiled_attention import attend_tiled, tiled_for
from tplab.kernels.tiled_loops import tiled_loop
from tplab.model import attention
from tplab.model.attention import LONG_RUN, RUN, NoCache, attend, causal_mask, run_length

SCALING = 0.2
SHAPES = [(1, 9, 3, 64), (2, 4, 2, 128), (1, 6, 1, 64), (3, 2, 2, 64), (1, 3, 1, 192)]
QUERIES = [(16, 16), (17, 40), (33, 31 + 33), (128, 512), (64, 65), (300, 300), (16, 1000)]


WAYS = {"tiles": (torch.bfloat16, multiplies_tiles), "vectors": (torch.bfloat16, lambda: has("avx512bf16")),
        "float32": (torch.float32, lambda: tiled_for(torch.float32, 64) is not None)}


def anew():
    """What is kept of the loops is made again."""
    tiled_loop.cache_clear()
    tiled_for.cache_clear()


@pytest.fixture(params=WAYS)
def dtype(request, monkeypatch):
    """Each dtype, and each way to multiply that this processor has."""
    dtype, is_there = WAYS[request.param]
    if not is_there():
        pytest.skip(f"no {request.param} on this processor")
    if request.param == "vectors" and multiplies_tiles():
        monkeypatch.setattr(tiled_loops, "multiplies_tiles", lambda: False)
        anew()
        request.addfinalizer(anew)
    return dtype


def case(shape, queries, keys, dtype, seed=0):
    """The last ``queries`` of ``keys`` positions, as an engine holds them: ``[tokens, heads, head_dim]``."""
    batch, heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(seed + keys)
    q, k, v = (torch.randn(batch, tokens, count, head_dim, generator=generator).to(dtype).transpose(1, 2)
               for tokens, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads)))
    mask = causal_mask(torch.arange(keys - queries, keys).expand(batch, -1), keys)
    return 2 * q, k, v, mask


def exact(q, k, v, mask, scaling=SCALING):
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return torch.softmax((q @ k.transpose(2, 3) * scaling).masked_fill(mask, float("-inf")), -1) @ v


def by_torch(q, k, v, mask, scaling=SCALING):
    if q.dtype == torch.float32:
        return attend_by_torch(q, k, v, mask, scaling)
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(mask, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling, enable_gqa=True)


def error(found, right):
    return float((found.double() - right).square().mean().sqrt() / right.square().mean().sqrt())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("queries, keys", QUERIES)
def test_it_is_as_close_to_float64_as_torchs(queries, keys, shape, dtype):
    given = case(shape, queries, keys, dtype)
    # What the tiles decline on this processor, attention computes without them.
    right, ours, theirs = exact(*given), attend(*given, SCALING), by_torch(*given)
    assert ours.dtype == dtype and ours.shape == right.shape
    assert error(ours, right) <= 1.1 * error(theirs, right)
    bound = {torch.float32: 2.0 ** -15, torch.bfloat16: 2.0 ** -7}[dtype]
    assert ((ours.double() - right).abs() <= bound * right.abs() + bound).all()


@pytest.mark.parametrize("scaling", [0.01, 1.0, 3, -0.5])
def test_large_and_negative_scores(scaling, dtype):
    q, k, v, mask = case(SHAPES[0], 48, 80, dtype)
    right = exact(q, k, v, mask, scaling)
    assert error(attend_tiled(q, k, v, mask, scaling), right) <= 1.2 * error(by_torch(q, k, v, mask, scaling), right)


def test_any_mask_and_each_sequences_own(dtype):
    q, k, v, _ = case((3, 2, 1, 64), 40, 100, dtype)
    most = {torch.float32: 1e-6, torch.bfloat16: 0.004}[dtype]
    mask = torch.rand(3, 1, 40, 100, generator=torch.Generator().manual_seed(1)) < 0.9
    mask[..., 0] = False
    mask[1, :, :, 30:] = True
    right = exact(q, k, v, mask)
    assert error(attend_tiled(q, k, v, mask, SCALING), right) <= most
    k[1, :, 30:], v[1, :, 30:] = 1e4, 1e4  # which nobody there sees
    assert error(attend_tiled(q, k, v, mask, SCALING), right) <= most


def test_what_no_query_of_a_tile_sees_is_not_read_for_it(dtype):
    """Nor is anything behind the last key."""
    q, k, v, mask = case(SHAPES[0], 64, 64, dtype)
    right = exact(q, k, v, mask)
    v[:, :, 32:] = float("nan")
    ours = attend_tiled(q, k, v, mask, SCALING)
    assert error(ours[:, :, :32], right[:, :, :32]) <= 0.004 and ours[:, :, 32:].isnan().all()
    stored = torch.full((1, 99, 3, 64), float("nan"), dtype=dtype)
    inner = stored[:, 7:57].transpose(1, 2)
    q, k, v, mask = case(SHAPES[0], 20, 50, dtype)
    inner.copy_(k)
    assert torch.equal(attend_tiled(q, inner, v, mask, SCALING), attend_tiled(q, k, v, mask, SCALING))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_nan_and_infinity_come_out(part, number, dtype):
    """A mistake must be seen where it is."""
    given = case((1, 2, 1, 64), 32, 32, dtype)
    given[part][0, 0, 5, 3] = number
    ours, right = attend_tiled(*given, SCALING), exact(*given)
    assert torch.equal(ours.isfinite(), right.isfinite()) and not ours.isfinite().all()


def test_threads_share_the_tiles(dtype):
    given = case((2, 9, 3, 64), 70, 200, dtype)
    right = attend_tiled(*given, SCALING)
    for threads in (1, 2, 3, 7, 100):
        with torch_threads(threads):
            assert torch.equal(attend_tiled(*given, SCALING), right)


def test_queries_that_are_slices_of_rows(dtype):
    """As on a rank with several groups of heads: queries, keys and values lie apart."""
    q, k, v, mask = case((1, 9, 3, 64), 50, 90, dtype)
    whole = attend_tiled(q, k, v, mask, SCALING)
    for kv in range(3):
        part = attend_tiled(q[:, 3 * kv:3 * kv + 3], k[:, kv:kv + 1], v[:, kv:kv + 1], mask, SCALING)
        assert torch.equal(part, whole[:, 3 * kv:3 * kv + 3])


def changed(place, dtype):
    q, k, v, mask = case(SHAPES[0], 32, 48, dtype)
    blind = mask.clone()
    blind[0, 0, 3] = True
    return {"float64": (q.double(), k.double(), v.double(), mask, SCALING),
            "another dtype": (q, k, v.double(), mask, SCALING),
            "few queries": (*case(SHAPES[0], 15, 48, dtype), SCALING),
            "too many keys": (*case((1, 1, 1, 64), 16, 4097, dtype), SCALING),
            "an odd head": (*case((1, 2, 1, 48), 32, 48, dtype), SCALING),
            "a query that sees nothing": (q, k, v, blind, SCALING),
            "a gradient": (q.clone().requires_grad_(), k, v, mask, SCALING),
            "a mask of numbers": (q, k, v, mask.float(), SCALING),
            "a mask per head": (q, k, v, mask.expand(1, 9, 32, 48), SCALING),
            "a scaling of another kind": (q, k, v, mask, torch.tensor(SCALING)),
            "numbers that lie apart": (q, k.transpose(2, 3).contiguous().transpose(2, 3), v, mask, SCALING)}[place]


@pytest.mark.parametrize("place", [
    "float64", "another dtype", "few queries", "too many keys", "an odd head", "a query that sees nothing",
    "a gradient", "a mask of numbers", "a mask per head", "a scaling of another kind", "numbers that lie apart"])
def test_what_is_left_to_torch(place, dtype):
    assert attend_tiled(*changed(place, dtype)) is None


def test_whoever_masks_otherwise_is_asked(monkeypatch, dtype):
    given = case(SHAPES[0], 32, 48, dtype)
    assert torch.equal(attend(*given, SCALING), attend_tiled(*given, SCALING))
    monkeypatch.setattr(attention, "mask_scores", lambda scores, mask: scores)
    assert error(attend(*given, SCALING), exact(*given[:3], torch.zeros_like(given[3]))) <= 0.004


def lengths(head_dim, dtype):
    k = torch.zeros(700, 1, head_dim, dtype=dtype)
    cache = PagedKVCache(1, 50, 16, 1, head_dim, dtype)
    contexts = NoCache([700]), cache.context([Segment(0, 700, range(44), 700)])
    return [[mask.shape[2] for *_, mask in context.batches(0, k, k)] for context in contexts]


def test_runs_are_longer_where_tiles_multiply(dtype):
    long = [LONG_RUN, 700 - LONG_RUN]
    assert run_length(dtype, 64) == LONG_RUN and lengths(64, dtype) == [long, long]


@pytest.mark.parametrize("head_dim, dtype", [(48, torch.bfloat16), (48, torch.float32), (64, torch.float64)])
def test_runs_elsewhere(head_dim, dtype):
    short = [RUN] * 5 + [60]
    assert lengths(head_dim, dtype) == [short, short]


@pytest.mark.parametrize("feature, dtype", [("avx512bf16", torch.bfloat16), ("avx512f", torch.float32)])
def test_there_are_loops_where_there_are_wide_vectors(feature, dtype):
    """So that the tests above do not all skip where they matter."""
    if not has(feature) or torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("a processor with AVX-512 is needed")
    assert tiled_for(dtype, 64) and tiled_for(dtype, 128) and tiled_for(dtype, 96) is None


@pytest.mark.parametrize("keys", [192, 193, 250, 383, 384, 385, 500, 769, 1001, 2000])
def test_portions_of_keys_have_torchs_bits(keys):
    """Values are added up so many at a time, which depends on how many there are."""
    if tiled_for(torch.float32, 64) is None or keys > tiled_for(torch.float32, 64).longest:
        pytest.skip("no such loops on this processor")
    for queries in (16, 40, 129):
        given = case((1, 9, 3, 64), min(queries, keys), keys, torch.float32)
        assert torch.equal(attend_tiled(*given, SCALING), attend_by_torch(*given, SCALING))


def test_other_bits_than_torchs_are_not_taken(monkeypatch):
    """Not for a number of keys, if it is a large one that is wrong; not at all, if it is a small one."""
    if tiled_for(torch.float32, 64) is None:
        pytest.skip("no such loops on this processor")
    wrong = set()
    monkeypatch.setattr(tiled_attention, "_has_torchs_bits", lambda tiled, head_dim, keys: keys not in wrong)
    for keys, longest in ((1000, 768), (45, None), (None, 4096)):
        wrong.clear()
        wrong.add(keys)
        found = tiled_for.__wrapped__(torch.float32, 64)
        assert (found and found.longest) == longest

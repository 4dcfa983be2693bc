"""Keys and values read where the cache holds them: PyTorch's bits for each sequence alone, or as close to the exact
result, or PyTorch itself."""

import pytest
import torch

from tplab.cache import paged
from tplab.cache.paged import PagedKVCache, Segment
from tplab.kernels import paged_attention
from tplab.kernels.compiled import has
from tplab.kernels.paged_attention import LANES, Paged, attend_by_torch, attend_paged, beside_torch
from tplab.kernels.paged_loops import paged_loop
from tplab.kernels.product import torch_threads
from tplab.model import attention
from tplab.model.attention import attend

SHAPES = [(2, 3, 64), (1, 3, 64), (3, 3, 64), (2, 7, 64), (1, 4, 16), (2, 4, 32), (1, 7, 128), (2, 4, 48)]


def case(lengths, kv_heads, group, head_dim, dtype=torch.float32):
    """Every sequence in slots of its own, in any order; in all other slots stands nothing that could be multiplied."""
    generator = torch.Generator().manual_seed(sum(lengths) + group)
    lengths = torch.tensor(lengths)
    keys = -(-int(lengths.max()) // LANES) * LANES
    given = torch.randperm(2 * int(lengths.sum()), generator=generator).split([*lengths.tolist(), int(lengths.sum())])
    slots = torch.stack([mine[torch.arange(keys).clamp(max=len(mine) - 1)] for mine in given[:-1]])
    caches = torch.randn(2, 2 * int(lengths.sum()), kv_heads, head_dim, generator=generator).to(dtype)
    caches[:, given[-1]] = float("nan")
    q = 2 * torch.randn(len(lengths), kv_heads * group, 1, head_dim, generator=generator).to(dtype)
    k, v = (Paged(cache, slots, lengths, range(kv_heads)) for cache in caches)
    return q, k, v, (torch.arange(keys) >= lengths[:, None])[:, None, None]


def alone(q, k, v, scaling, dtype=None):
    """Each sequence by itself, with no key but its own."""
    parts = []
    for n, length in enumerate(k.lengths.tolist()):
        one = [x.to(dtype or x.dtype) for x in (q, *(side.gathered()[:, :, :length] for side in (k, v)))]
        parts.append(attend_by_torch(*(x[n:n + 1] for x in one), torch.zeros(1, 1, 1, length, dtype=torch.bool),
                                     scaling))
    return torch.cat(parts)


def loops_or_skip(kv_heads, group, head_dim):
    if paged_attention._loop(torch.float32, head_dim, group)[0] is None:
        pytest.skip(f"no loops for {group} queries of {head_dim} numbers on this processor")


def far(one, other):
    return (one.double() - other).norm()


def test_there_are_loops_for_smollm2_where_there_are_wide_vectors():
    """So that the tests below do not all skip where they matter."""
    if not has("avx2") or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("a processor with AVX2 is needed")
    for dtype in (torch.float32, torch.bfloat16):
        assert paged_attention._loop(dtype, 64, 3)[0] and paged_attention._loop(dtype, 64, 7)[0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", [[16], [17, 40, 16], [33, 1, 64, 5], [384, 100], [385, 384, 500], [768, 30, 767]],
                         ids=str)
def test_each_sequence_is_as_close_to_float64_as_torch_is_with_it_alone(lengths, shape):
    """A product of three queries, a softmax and a product of so many keys as there are: not of so many as the longest
    has. The bound is the reference's own error on the processor at hand."""
    loops_or_skip(*shape)
    q, k, v, mask = case(lengths, *shape)
    ours, right, exact = attend_paged(q, k, v, mask, 0.3), alone(q, k, v, 0.3), alone(q, k, v, 0.3, torch.float64)
    for n, length in enumerate(lengths):
        assert far(ours[n], exact[n]) <= 3 * far(right[n], exact[n]) + 1e-7, length


@pytest.mark.parametrize("lengths", [[769, 30], [1000], [1153, 2000, 16]], ids=str)
def test_long_sequences(lengths):
    """Of which MKL adds up portions that are all alike, but for the last one."""
    loops_or_skip(2, 3, 64)
    if paged_attention._loop(torch.float32, 64, 3)[1] < 2000:
        pytest.skip("another processor's MKL adds up so many keys in another order")
    q, k, v, mask = case(lengths, 2, 3, 64)
    ours, right, exact = attend_paged(q, k, v, mask, 0.3), alone(q, k, v, 0.3), alone(q, k, v, 0.3, torch.float64)
    for n in range(len(lengths)):
        assert far(ours[n], exact[n]) <= 3 * far(right[n], exact[n]) + 1e-7


@pytest.mark.parametrize("shares, long, chains, keys", [
    ({1: 0}, {1: 0}, 1, 1 << 16), ({1: 0}, {1: 0.1}, 1, 768), ({1: 5.0, 8: 1.9}, {8: 0}, 8, 1 << 16),
    ({1: 0.5, 8: 2.1}, {}, None, 0)])
def test_a_loop_with_other_bits_than_torchs_is_taken_if_it_is_as_exact(shares, long, chains, keys, monkeypatch):
    """First with one chain, of so many keys as have the bits; then with eight; a loop less exact than that is none."""
    monkeypatch.setattr(paged_attention, "paged_loop", lambda *kind, chains=1: chains)
    monkeypatch.setattr(paged_attention, "beside_torch", lambda chains, head_dim, group, lengths=(): (
        long if lengths == paged_attention._TRIED[1] else shares)[chains])
    assert paged_attention._loop.__wrapped__(torch.float32, 64, 4) == (chains, keys)


def test_more_keys_than_a_loop_is_for_are_left_to_torch_from_then_on(monkeypatch):
    loops_or_skip(2, 3, 64)
    loop = paged_attention._loop(torch.float32, 64, 3)[0]
    monkeypatch.setattr(paged_attention, "_loop", lambda *kind: (loop, 64))
    assert paged_attention.pays(torch.float32, 64, 80)
    assert attend_paged(*case([64, 3], 2, 3, 64), 0.3) is not None
    assert attend_paged(*case([65, 3], 2, 3, 64), 0.3) is None
    assert [paged_attention.pays(torch.float32, 64, keys) for keys in (64, 65, 80)] == [True, False, False]
    assert paged_attention.pays(torch.bfloat16, 64, 80) and paged_attention.pays(torch.float32, 128, 80)


@pytest.mark.parametrize("group", [1, 3, 7])
def test_scores_in_more_chains_are_more_exact(group):
    """In each number of chains every number is added once; a loop that leaves one out is nowhere near."""
    loops_or_skip(2, group, 128)
    q, k, v, mask = case([250, 31, 16], 2, group, 128)
    exact = alone(q, k, v, 0.3, torch.float64)
    errors = [far(paged_attention._attended(paged_loop(torch.float32, 128, group, chains), q, k, v, mask, 0.3), exact)
              for chains in (1, 2, 4, 8)]
    assert errors[0] < 1e-5 * exact.norm() and errors[3] < 0.8 * errors[0], errors
    assert max(errors) == errors[0], errors


@pytest.mark.parametrize("wrong, share", [(0, 0), (1e-6, 1), (1e-3, 1000)])
def test_an_error_is_told_beside_torchs(wrong, share, monkeypatch):
    loop = paged_loop(torch.float32, 64, 3)
    if loop is None:
        pytest.skip("no loops on this processor")

    def almost(loop, q, k, v, mask, scaling):
        length = int(k.lengths[0])
        return (1 + wrong) * attend_by_torch(
            q, *(side.gathered()[:, :, :length] for side in (k, v)), mask[..., :length], scaling)

    monkeypatch.setattr(paged_attention, "_attended", almost)
    assert beside_torch(loop, 64, 3) >= share and (share or beside_torch(loop, 64, 3) == 0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("lengths", [[16, 3], [40, 77, 16], [2000, 1, 385]], ids=str)
def test_in_bfloat16_only_the_outcome_is_rounded(lengths, shape):
    if paged_attention._loop(torch.bfloat16, shape[2], shape[1])[0] is None:
        pytest.skip("no loops in bfloat16 on this processor")
    q, k, v, mask = case(lengths, *shape, torch.bfloat16)
    ours, exact = attend_paged(q, k, v, mask, 0.3), alone(q, k, v, 0.3, torch.float64)
    assert ours.dtype == torch.bfloat16
    assert ((ours.double() - exact).abs() <= 2.0 ** -8 * exact.abs() + 1e-5).all()


def test_some_of_the_heads_and_queries_that_lie_apart():
    """As on a rank whose groups differ: its queries are slices of rows."""
    loops_or_skip(3, 3, 64)
    q, k, v, mask = case([20, 50], 3, 3, 64)
    right = attend_paged(q, k, v, mask, 0.3)
    rows = q.transpose(1, 2).contiguous().transpose(1, 2)
    for first, stop in ((0, 1), (1, 3), (2, 3), (0, 3)):
        some = rows[:, 3 * first:3 * stop]
        assert torch.equal(attend_paged(some, k[:, first:stop], v[:, first:stop], mask, 0.3),
                           right[:, 3 * first:3 * stop])
    again = k[:, 1:3][:, 1:2]
    assert again.heads == range(2, 3) and torch.equal(again.gathered(), k[:, 2:3].gathered())


def test_threads_share_the_heads():
    loops_or_skip(2, 3, 64)
    q, k, v, mask = case([300, 20, 100, 64, 333], 2, 3, 64)
    with torch_threads(1):
        right = attend_paged(q, k, v, mask, 0.3)
    for threads in (2, 3, 7, 30):
        with torch_threads(threads):
            assert torch.equal(attend_paged(q, k, v, mask, 0.3), right)


def changed(place):
    q, k, v, mask = case([20, 50], 2, 3, 64)
    return {"float64": (q.double(), Paged(k.cache.double(), k.slots, k.lengths, k.heads), v, mask, 0.3),
            "a cache of another dtype": (q.bfloat16(), k, v, mask, 0.3),
            "a gradient": (q.clone().requires_grad_(), k, v, mask, 0.3),
            "a mask of another shape": (q, k, v, mask.expand(2, 6, 1, 64), 0.3),
            "a scaling of another kind": (q, k, v, mask, torch.tensor(0.3)),
            "odd heads": (*case([20, 50], 2, 3, 24), 0.3),
            "a large group": (*case([20, 50], 1, 25, 16), 0.3)}[place]


@pytest.mark.parametrize("place", ["float64", "a cache of another dtype", "a gradient", "a mask of another shape",
                                   "a scaling of another kind", "odd heads", "a large group"])
def test_what_is_left_to_torch(place):
    assert attend_paged(*changed(place)) is None


@pytest.mark.parametrize("place", ["odd heads", "a large group"])
def test_where_there_are_no_loops_keys_and_values_are_copied(place):
    q, k, v, mask, scaling = changed(place)
    assert (attend(q, k, v, mask, scaling) - alone(q, k, v, scaling)).abs().max() <= 4e-6


def context(dtype=torch.float32, head_dim=64, tokens=(20, 40), block_ids=((5, 1), (2, 7, 3))):
    segments = [Segment(count - 1, 1, blocks, count - 1) for count, blocks in zip(tokens, block_ids)]
    return PagedKVCache(1, 8, 16, 2, head_dim, dtype).context(segments)


def read(given):
    new = torch.zeros(len(given.segments), *given.cache.k_slots[0].shape[1:], dtype=given.cache.k_cache.dtype)
    (batch,) = given.batches(0, new, new)
    return type(batch.k), type(batch.v)


@pytest.mark.parametrize("dtype, tokens, kind", [
    (torch.float32, (20, 40), Paged), (torch.bfloat16, (20, 40), Paged), (torch.float32, (2, 16), Paged),
    (torch.float32, (16,), Paged), (torch.bfloat16, (32,), Paged), (torch.float32, (15,), torch.Tensor),
    (torch.float64, (20, 40), torch.Tensor), (torch.float32, (2, 15), torch.Tensor)])
def test_who_decodes_together_is_read_where_the_cache_holds_it(dtype, tokens, kind):
    assert read(context(dtype, tokens=tokens)) == (kind, kind)


def test_where_there_is_no_loop_one_step_finds_out(monkeypatch):
    """On a processor without wide vectors: not every step copies all keys."""
    monkeypatch.setattr(paged_attention, "_limits", {})
    monkeypatch.setattr(paged_attention, "_loop", lambda *kind: (None, 0))
    q = torch.randn(1, 4, 1, 64)
    for kind in (Paged, torch.Tensor):
        given = context(tokens=(20,), block_ids=((5, 6),))
        (batch,) = given.batches(0, *torch.ones(2, 1, 2, 64))
        assert type(batch.k) is kind
        assert torch.isfinite(attend(q, batch.k, batch.v, batch.mask, 0.3)).all()
    assert batch.k.data_ptr() == given.cache.k_slots[0][5 * 16].data_ptr(), "a view"
    assert read(context(torch.bfloat16)) == (Paged, Paged), "of another dtype nothing is known yet"


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(paged_attention, "_limits", {})


@pytest.mark.parametrize("dtype, limits, kind", [
    (torch.float32, {}, Paged), (torch.float32, {(torch.float32, 16): 769}, torch.Tensor), (torch.bfloat16, {}, Paged)])
def test_a_long_sequence_alone_is_read_where_it_lies_and_not_gathered(dtype, limits, kind, monkeypatch):
    monkeypatch.setattr(paged_attention, "_limits", limits)
    cache = PagedKVCache(1, 60, 16, 1, 16, dtype)
    given = cache.context([Segment(799, 1, tuple(range(5, 55)), 799)])
    (batch,) = given.batches(0, *torch.zeros(2, 1, 1, 16, dtype=dtype))
    assert type(batch.k) is kind
    if kind is torch.Tensor:
        assert batch.k.data_ptr() == cache.k_slots[0][5 * 16].data_ptr(), "a view"


@pytest.mark.parametrize("where, name", [
    (attention, "attend"), (attention, "mask_scores"), (attention, "causal_mask"), (paged, "causal_mask"),
    (paged, "read_cache"), (attention.TensorParallelAttention, "attend_all")])
def test_whoever_puts_another_function_in_its_place_is_given_tensors(where, name, monkeypatch):
    """A fault, or a learner's exercise, whose function expects them."""
    own = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *given: own(*given))
    assert read(context()) == (torch.Tensor, torch.Tensor)


@pytest.mark.parametrize("blocks", [(2, 8, 3), (2, -9, 3)])
def test_a_block_that_is_not_there_is_an_error_and_no_foreign_memory(blocks):
    for others in ((), ((5, 1),)):
        given = context(tokens=(20, 40)[1 - len(others):], block_ids=(*others, blocks))
        with pytest.raises((IndexError, RuntimeError), match="index"):
            read(given)

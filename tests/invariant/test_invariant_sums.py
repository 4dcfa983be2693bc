"""Every sum has one order: the parts, each alone, in a batch and cut over ranks; and how near they are to the truth."""

import numpy as np
import pytest
import torch

from tplab.invariant import kernels, why_not
from tplab.invariant.model import within
from tplab.invariant.tree import RANKS, leaves_of_columns, leaves_of_heads, nodes_within, tree_sum
from tplab.model import attention
from tplab.shard.plan import split_evenly

DTYPES = torch.float32, torch.bfloat16


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(y, exact):
    return ((y.double() - exact).norm() / exact.norm()).item()


class Term:
    """A number of which one sees how it was added up."""

    def __init__(self, text):
        self.text = text

    def __add__(self, other):
        return Term(f"({self.text} {other.text})")


@pytest.mark.parametrize("total", [8, 13, 43, 96, 1536])
def test_the_tree_is_the_same_for_every_number_of_ranks(total):
    leaves = leaves_of_columns(total)
    terms = {(n, n + 1): Term(str(n)) for n in range(len(leaves))}
    expected = tree_sum(0, len(leaves), terms).text
    assert [leaf.start for leaf in leaves[1:]] == [leaf.stop for leaf in leaves[:-1]] and leaves[-1].stop == total
    for ranks in RANKS:
        known = {}
        for columns in split_evenly(total, ranks):
            own = within(leaves, columns)
            assert leaves[own[0]].start == columns.start and leaves[own[-1]].stop == columns.stop
            here = {leaf: term for leaf, term in terms.items() if leaf[0] in own}  # a rank knows no others
            known.update({node: tree_sum(*node, here) for node in nodes_within(0, len(leaves), own)})
        assert tree_sum(0, len(leaves), known).text == expected


def test_a_rank_sends_few_nodes():
    """One where the tree's halves are the ranks' parts, and never all leaves."""
    assert nodes_within(0, 8, range(4, 8)) == [(4, 8)] and nodes_within(0, 9, range(6)) == [(0, 4), (4, 6)]
    assert leaves_of_heads(3, 5) == [range(0, 5), range(5, 10), range(10, 15)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs, outputs", [(1, 1), (43, 71), (300, 130)])
def test_a_product_is_the_same_alone_in_a_batch_and_cut(dtype, inputs, outputs):
    weight, x = numbers(outputs, inputs, dtype=dtype), numbers(37, inputs, seed=1, dtype=dtype)
    whole = kernels.Product(weight)(x)[0]
    assert whole.dtype == torch.float32 and whole.shape == (37, outputs)
    for rows in (slice(0, 1), slice(5, 7), slice(36, 37), slice(1, 6)):
        assert torch.equal(kernels.Product(weight)(x[rows])[0], whole[rows])
    first = outputs // 3
    assert torch.equal(kernels.Product(weight[first:])(x)[0], whole[:, first:])
    assert kernels.Product(weight)(x[:0]).shape == (1, 0, outputs)
    exact = x.double() @ weight.double().T
    assert distance(whole, exact) <= 4 * distance(x.float() @ weight.float().T, exact) + 1e-7


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_of_products_is_the_sums_of_its_leaves(dtype):
    leaves, weight, x = leaves_of_columns(43), numbers(30, 43, dtype=dtype), numbers(5, 43, seed=1, dtype=dtype)
    known = {(n, n + 1): kernels.Product(weight[:, leaf.start:leaf.stop])(x[:, leaf.start:leaf.stop])[0]
             for n, leaf in enumerate(leaves)}
    nodes = [(0, 5), (5, 6), (6, len(leaves))]
    found = kernels.Product(weight, leaves, nodes)(x)
    assert found.shape == (3, 5, 30)
    for node, one in zip(nodes, found):
        assert torch.equal(one, tree_sum(*node, known))


def test_an_activation_is_the_same_wherever_a_number_stands():
    """And as near to float64 as PyTorch's own."""
    theirs, x = torch.nn.functional.silu, numbers(131, seed=2) * 8
    whole, exact = kernels.silu(x), theirs(x.double())
    for first in range(0, 131, 7):
        for count in (1, 3, 16, 33):
            assert torch.equal(kernels.silu(x[first:first + count]), whole[first:first + count])
    assert distance(whole, exact) <= 4 * distance(theirs(x), exact)
    assert torch.equal(kernels.silu(x.bfloat16()), kernels.silu(x.bfloat16().float()).bfloat16())


def test_a_norms_factors():
    x = numbers(9, 70, seed=3) * 5
    factors, exact = kernels.inverse_rms(x, 1e-3), (x.double().square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    assert factors.shape == (9, 1) and torch.equal(factors[4:5], kernels.inverse_rms(x[4:5], 1e-3))
    assert distance(factors, exact) < 2 ** -23
    heads = kernels.inverse_rms(x.view(9, 7, 10), 0.0)
    assert torch.equal(heads, kernels.inverse_rms(x.view(63, 10), 0.0).view(9, 7, 1))


@pytest.mark.parametrize("length", [2, 128, 1000])
def test_a_sum_of_whole_multiples_does_not_depend_on_its_order(length):
    """However much their sizes differ; a library that adds up in another order gives the same bits."""
    x, y = (kernels.whole((numbers(3, length, seed=seed) * 10.0 ** numbers(3, length, seed=seed + 9)).numpy(), length)
            for seed in (5, 6))
    forwards, backwards = ((x * y)[:, ::step].cumsum(-1)[:, -1] for step in (1, -1))
    assert (forwards == backwards).all() and (forwards == [float(row) for row in (x * y).sum(-1)]).all()
    assert np.isnan(kernels.whole(np.array([[1.0, np.inf], [np.nan, 2.0]]))).all() and not kernels.whole(0 * x).any()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_the_same_alone_chunked_and_with_other_heads(dtype, window):
    heads, kv_heads, tokens, head_dim = 6, 2, 75, 10
    q, k, v = (numbers(1, n, tokens, head_dim, seed=seed, dtype=dtype)
               for seed, n in enumerate((heads, kv_heads, kv_heads)))
    mask = attention.causal_mask(torch.arange(tokens)[None], tokens)
    mask = attention.within_window(mask, window) if window else mask
    whole = kernels.attend(q, k, v, mask, 0.3)
    for first, last in ((0, 1), (3, 4), (66, 75), (74, 75)):  # the cache holds as many keys as the last query sees
        part = kernels.attend(q[:, :, first:last], k[:, :, :last], v[:, :, :last], mask[:, :, first:last, :last], 0.3)
        assert torch.equal(part, whole[:, :, first:last])
    padded = torch.cat([k, k], dim=2), torch.cat([v, v], dim=2)
    mask_beside = torch.cat([mask, torch.ones_like(mask)], dim=-1)  # a longer sequence stands in the same batch
    assert torch.equal(kernels.attend(q, *padded, mask_beside, 0.3), whole)
    assert torch.equal(kernels.attend(q[:, 3:], k[:, 1:], v[:, 1:], mask, 0.3), whole[:, 3:])
    exact = attention.attend(q.double(), k.double(), v.double(), mask, 0.3)
    reference = attention.attend(q, k, v, mask, 0.3)
    assert distance(whole, exact) <= 4 * distance(reference, exact)


def test_attention_keeps_nan_and_only_where_it_is_seen():
    q, k, v = (numbers(1, 1, 6, 4, seed=n) for n in range(3))
    k[0, 0, 3, 1] = float("nan")
    found = kernels.attend(q, k, v, attention.causal_mask(torch.arange(6)[None], 6), 0.5).isnan().any(-1)[0, 0]
    assert found.tolist() == [False] * 3 + [True] * 3


def test_what_is_refused_is_named():
    from types import SimpleNamespace as Config

    config = Config(experts=None, hidden_act="silu", rope_types={"default"}, traits=[])
    assert why_not(config, torch.float32, 4) is None
    for change, dtype, ranks, word in (({}, torch.float64, 2, "float64"), ({}, torch.float32, 5, "5 ranks"),
                                       ({"experts": 8}, torch.float32, 2, "experts"),
                                       ({"hidden_act": "relu"}, torch.float32, 2, "'relu'"),
                                       ({"traits": ["capped logits"]}, torch.float32, 2, "capped logits"),
                                       ({"rope_types": {"dynamic"}}, torch.float32, 2, "prompt's length")):
        assert word in why_not(Config(**vars(config) | change), dtype, ranks)

"""The parallel layers on logical ranks against the unsharded computation, in float64, with odd sizes and biases."""

import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

from tplab.ranks import RankError, all_gather, logical_ranks, rank
from tplab.shard import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    ShardPlan,
    VocabParallelEmbedding,
)

D = torch.float64
TP = [1, 2, 3, 4]


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tp", TP)
def test_column_then_row_equals_two_linears(tp):
    x, w1, b1, w2, b2 = randn(5, 12), randn(31, 12, seed=1), randn(31, seed=2), randn(12, 31, seed=3), randn(12, seed=4)

    def on_rank():
        column = ColumnParallelLinear(12, 31, bias=True, dtype=D)
        row = RowParallelLinear(31, 12, bias=True, dtype=D)
        assert not any(p.requires_grad for layer in (column, row) for p in layer.parameters())
        for layer, w, b in ((column, w1, b1), (row, w2, b2)):
            layer.load("weight", w), layer.load("bias", b)
        return row(column(x))

    for out in logical_ranks(tp, on_rank):
        torch.testing.assert_close(out, F.linear(F.linear(x, w1, b1), w2, b2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("q, kv", [(9, 3), (8, 2), (14, 2)])
def test_qkv_cuts_at_heads(tp, q, kv):
    plan = ShardPlan.make(tensor_parallel_size=tp, num_heads=q, num_kv_heads=kv, head_dim=6, hidden_size=10,
                          intermediate_size=16, vocab_size=16)
    x, weights, biases = randn(5, 10), [randn(n * 6, 10, seed=n + i) for i, n in enumerate((q, kv, kv))], \
        [randn(n * 6, seed=50 + i) for i, n in enumerate((q, kv, kv))]

    def on_rank():
        layer = QKVParallelLinear(10, 6, q, kv, shards=plan.ranks, bias=True, dtype=D)
        layer.load("weight", *weights), layer.load("bias", *biases)
        return layer.split_heads(layer(x))

    whole = [F.linear(x, w, b).unflatten(-1, (-1, 6)) for w, b in zip(weights, biases)]
    for shard, parts in zip(plan.ranks, logical_ranks(tp, on_rank)):
        for full, part, heads in zip(whole, parts, (shard.q_heads, shard.kv_heads, shard.kv_heads)):
            torch.testing.assert_close(part, full[:, list(heads)], rtol=0, atol=1e-12)


def test_parts_that_were_given_are_the_cuts_and_must_fit_the_layer():
    x, w = randn(5, 12), randn(12, 12, seed=1)
    cuts = [range(0, 3), range(3, 12)]

    def on_rank():
        layers = (ColumnParallelLinear(12, 12, parts=cuts, dtype=D), RowParallelLinear(12, 12, parts=cuts, dtype=D),
                  VocabParallelEmbedding(12, 12, parts=cuts, dtype=D))
        for layer in layers:
            layer.load("weight", w)
        assert layers[2].weight.ranges == (cuts[rank()],) and torch.equal(layers[2](torch.arange(12)), w)
        return layers[0](x), layers[1](x[:, cuts[rank()].start:cuts[rank()].stop])

    for rows, (column, whole) in zip(cuts, logical_ranks(2, on_rank)):
        torch.testing.assert_close(column, F.linear(x, w[rows.start:rows.stop]), rtol=0, atol=1e-12)
        torch.testing.assert_close(whole, F.linear(x, w), rtol=0, atol=1e-12)
    for make, words in ((lambda: MergedColumnParallelLinear(4, [6, 6], parts=[[range(6)], [range(7)]]), "outside of 6"),
                        (lambda: RowParallelLinear(6, 4, parts=[range(5)]), "the parts end at 5, the input at 6"),
                        (lambda: MergedColumnParallelLinear(4, [6], parts=[[range(7), range(6)]]), "outside of 6"),
                        (lambda: ParallelLMHead(6, 4).tie_weights(VocabParallelEmbedding(7, 4)), "are not the emb"),
                        (lambda: ParallelLMHead(7, 4, parts=[range(6)]).tie_weights(
                            VocabParallelEmbedding(7, 4, parts=[range(1, 7)])), r"range\(0, 6\) are not the .*1, 7")):
        with pytest.raises(RankError, match=words):
            logical_ranks(1, make)


def test_merged_layer_refuses_one_matrix_for_two():
    with pytest.raises(ValueError, match="zip"):
        MergedColumnParallelLinear(4, [6, 6]).load("weight", randn(12, 4))


@pytest.mark.parametrize("tp", TP)
@pytest.mark.parametrize("vocab", [4, 32, 503])
def test_embedding_and_head_with_odd_vocabularies(tp, vocab):
    table = randn(vocab, 8)
    ids = torch.tensor([0, vocab - 1, vocab // 2, 5, vocab // 3, 5]) % vocab

    def on_rank():
        embedding = VocabParallelEmbedding(vocab, 8, dtype=D)
        embedding.load("weight", table)
        hidden = embedding(ids)
        head = ParallelLMHead(vocab, 8, dtype=D).tie_weights(embedding)
        assert head.weight is embedding.weight
        return hidden, head.gather(head(hidden))

    for hidden, logits in logical_ranks(tp, on_rank):
        assert torch.equal(hidden, table[ids])
        torch.testing.assert_close(logits, table[ids] @ table.T, rtol=0, atol=1e-12)


def test_partials_hold_the_bias_exactly_once():
    w, b, x = randn(4, 6), randn(4, seed=9), randn(3, 6, seed=8)

    def on_rank():
        layer = RowParallelLinear(6, 4, bias=True, dtype=D)
        layer.load("weight", w), layer.load("bias", b)
        columns = layer.columns
        return layer.partial(x[:, columns.start:columns.stop]) - x[:,
                                                                   columns.start:columns.stop] @ layer.weight.T, rank()

    for surplus, number in logical_ranks(3, on_rank):
        torch.testing.assert_close(surplus, (b if number == 0 else torch.zeros_like(b)).expand(3, 4), rtol=0,
                                   atol=1e-12)


def test_a_parameter_knows_its_slices_and_fills_itself():
    """`weight_loader` is the layer's `load`, patched or not, and keeps no discarded layer alive."""
    w, b = randn(31, 12), randn(31, seed=1)

    def on_rank():
        column, row = ColumnParallelLinear(12, 31, bias=True, dtype=D), RowParallelLinear(12, 31, bias=True, dtype=D)
        for layer in (column, row):
            layer.weight.weight_loader(w), layer.bias.weight_loader(b)
        gone = weakref.ref(column)
        slices = [(p.shard_dim, p.ranges, p.data) for p in (column.weight, column.bias, row.weight, row.bias)]
        gc.disable()
        del column, layer, row
        try:
            assert gone() is None, "the layer lives until the garbage collector comes"
        finally:
            gc.enable()
        return slices

    for slices in logical_ranks(3, on_rank):
        for (dim, (rows,), kept), whole in zip(slices, (w, b, w, b), strict=True):
            assert torch.equal(kept, whole.narrow(dim, rows.start, len(rows)))
        assert [dim for dim, *_ in slices] == [0, 0, 1, 0]


def test_gather_of_uneven_shards_keeps_rank_order():
    parts = [torch.arange(3.), torch.arange(10., 12.)]

    def on_rank():
        return all_gather(parts[rank()], dim=0, sizes=[3, 2])

    for out in logical_ranks(2, on_rank):
        assert out.tolist() == [0, 1, 2, 10, 11]


def test_merged_layers_of_unlike_sizes_are_cut_each_by_itself_where_no_parts_are_given():
    ranges = logical_ranks(3, lambda: MergedColumnParallelLinear(2, [10, 4]).ranges)
    assert ranges == [(range(0, 4), range(0, 2)), (range(4, 7), range(2, 3)), (range(7, 10), range(3, 4))]

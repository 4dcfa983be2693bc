"""Sums that are started and waited for, and the scattered sum: the bits of `all_reduce`, and too early is wrong."""

import pytest
import torch

from tplab.pool.control_block import SLOT_BYTES
from tplab.ranks import RankError, all_gather, all_reduce, barrier, logical_ranks, op_log, rank, reduce_scatter
from tplab.ranks.context import current

BIG = SLOT_BYTES // 4 + 5  # floats; two chunks


def mine(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank()))


@pytest.mark.parametrize("shape, dim, sizes, dtype", [
    ((6, 4), 0, None, torch.float32), ((7, 4), 0, (0, 7, 0), torch.bfloat16), ((2, 5), -1, (1, 1, 3), torch.float32),
    ((BIG, 1), 0, (BIG - 7, 3, 4), torch.bfloat16), ((3, 0), 0, None, torch.float32)], ids=str)
def test_reduce_scatter_gives_each_rank_the_bits_of_its_part_of_all_reduce(run, shape, dim, sizes, dtype):
    def fn():
        t = mine(*shape).to(dtype)
        before = t.clone()
        part = reduce_scatter(t, dim, sizes)
        return t.equal(before), part, all_gather(part, dim, sizes), all_reduce(t.clone()), str(op_log()[-3])

    for r, (kept, part, joined, whole, logged) in enumerate(run(fn)):
        right = whole.split(list(sizes or [shape[dim] // 3] * 3), dim)[r]
        assert kept and part.equal(right) and part.is_contiguous() and joined.equal(whole)
        assert logged == f"reduce_scatter {list(shape)} {str(dtype)[6:]} dim {dim % len(shape)}"


def test_sizes_that_do_not_fit_are_refused_and_those_that_differ_are_a_mismatch(run):
    for sizes in ((3, 3, 3), (4, 4), None):
        with pytest.raises(RankError, match=r"do not add up to the 8 along dim 0 \(shape \[8, 2\]\) on 3 ranks"):
            run(lambda sizes=sizes: reduce_scatter(torch.ones(8, 2), sizes=sizes))
    with pytest.raises(RankError, match="meet in different collectives"):
        run(lambda: reduce_scatter(torch.ones(3), sizes=[3 * (r == rank() % 2) for r in range(3)]))


def test_until_wait_the_tensor_has_no_sum_in_it_and_a_write_goes_into_the_sum(run):
    def fn():
        t, reused = torch.ones(4), torch.ones(4)
        work, other = all_reduce(t, async_op=True), all_reduce(reused, async_op=True)
        early, is_early = t.clone(), work.is_completed()
        reused.fill_(10)
        assert work.wait() and work.wait() and not other.is_completed()
        other.wait()
        return early.tolist(), is_early, t.tolist(), reused.tolist()

    assert run(fn) == [([1.0] * 4, False, [3.0] * 4, [30.0] * 4)] * 3


def test_sums_are_made_in_the_order_of_their_starts_also_if_waited_for_in_another(run):
    """Rank 1 waits for the second one first, rank 2 for none before the barrier."""
    def fn():
        a, b = torch.ones(2), torch.full((3,), 2.0)
        works = all_reduce(a, async_op=True), all_reduce(b, async_op=True)
        for work in (works, works[::-1], ())[rank()]:
            work.wait()
        barrier()
        made = a.tolist(), b.tolist()
        assert all(work.wait() for work in works) and made == (a.tolist(), b.tolist())
        return a.tolist(), b.tolist(), [(str(record), record.line) for record in op_log()[-3:]]

    first = fn.__code__.co_firstlineno
    assert run(fn) == [([3.0] * 2, [6.0] * 3, [("all_reduce [2] float32", first + 2),
                                              ("all_reduce [3] float32", first + 2), ("barrier", first + 5)])] * 3


def test_a_wait_that_is_left_out_is_told_with_its_line_and_the_next_run_is_clean(run):
    def forgotten():
        work = all_reduce(torch.ones(2), async_op=True)
        if rank():
            work.wait()

    line = forgotten.__code__.co_firstlineno + 1
    with pytest.raises(RankError, match=rf"rank 0 raised RankError: returned without wait\(\) for all_reduce \[2\]\n"
                                        rf".*line {line}\n    work = all_reduce"):
        run(forgotten)
    assert run(lambda: len(current().started)) == [0] * 3


def test_one_rank_alone_has_the_same_rules():
    def fn():
        work = all_reduce(t := torch.ones(2), async_op=True)
        assert reduce_scatter(torch.ones(5, 2)).shape == (5, 2) and work.is_completed() and work.wait()
        return t.tolist()

    assert logical_ranks(1, fn) == [[1.0, 1.0]]
    with pytest.raises(RankError, match="without wait"):
        logical_ranks(1, lambda: all_reduce(torch.ones(2), async_op=True) and None)

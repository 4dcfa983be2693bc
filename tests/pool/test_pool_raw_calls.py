"""Calls of `torch.distributed` on the ranks of a pool: in the op log, and compared before gloo can hang."""

import threading

import pytest
import torch
import torch.distributed as dist
from helpers.failing import fails, kept

from tplab.ranks import CollectiveMismatch, all_reduce, barrier, op_log, rank

pytestmark = pytest.mark.usefixtures("usable_afterwards")


def empty(*shape):
    return [torch.empty(shape), torch.empty(shape)]


@pytest.mark.parametrize("one, other, told", [
    (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(5)),
     ["dist.all_reduce [4] float32", "dist.all_reduce [5] float32"]),
    (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(4).long()), ["float32", "int64"]),
    (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.barrier(), ["dist.all_reduce [4]", "dist.barrier"]),
    (lambda: dist.all_reduce(torch.ones(4)), lambda: all_reduce(torch.ones(4)), ["calls dist.all_reduce", "calls all"]),
    (lambda: dist.broadcast(torch.ones(4), 0), lambda: dist.broadcast(torch.ones(4), group_src=1), ["src 0", "src 1"]),
    (lambda: dist.reduce(torch.ones(4), 0), lambda: dist.reduce(torch.ones(4), dst=1), ["[4] float32 dst 0", "dst 1"]),
    (lambda: dist.all_gather(empty(3), torch.ones(3)), lambda: dist.all_gather(empty(2), tensor=torch.ones(2)),
     ["dist.all_gather [3]", "dist.all_gather [2]"]),
    (lambda: dist.reduce_scatter(torch.empty(2), empty(2)), lambda: dist.reduce_scatter(torch.empty(3), empty(3)),
     ["dist.reduce_scatter [2]", "dist.reduce_scatter [3]"]),
    (lambda: dist.all_reduce(torch.ones(4), async_op=True) and barrier(),
     lambda: dist.all_reduce(torch.ones(2, 2), async_op=True) and barrier(), ["dist.all_reduce [4]", "e [2, 2]"]),
], ids=["shape", "dtype", "operation", "the lab's own", "src", "dst", "gathered", "scattered", "asynchronous"])
def test_calls_that_differ_are_shown_as_the_labs_own(pool, one, other, told):
    def fn():
        dist.barrier()
        (one if rank() == 0 else other)()

    error = fails(pool, fn, r"^the ranks meet in different collectives: rank 0 calls .* at .*line \d+; rank 1 calls",
                  r"  #\d+ +dist.barrier @ .*\n≠ #\d+ ")
    assert isinstance(error, CollectiveMismatch) and all(part in error.summary for part in told)
    assert kept(pool) == [True, True]


def test_a_rank_that_skips_a_call(pool):
    def fn():
        if rank() == 0:
            dist.all_gather(empty(4), torch.ones(4))

    fails(pool, fn, r"^rank 1 returned; rank 0 waits in dist.all_gather at .*line \d+",
          r"≠ #\d+ +dist.all_gather \[4\] float32 @ .*line \d+ \(waits\) +returned")
    assert kept(pool) == [True, True]


def test_every_collective_gives_what_torch_gives_and_stands_in_the_log_with_its_line(pool):
    def fn():
        r, before = rank(), len(op_log())
        t, mine = torch.arange(4.0) + r, torch.full((2,), r + 1.0)
        dist.all_reduce(a := t.clone(), op=dist.ReduceOp.MAX)
        dist.broadcast(b := t.clone(), src=1)
        dist.reduce(c := t.clone(), 0)
        dist.all_gather(d := empty(2), mine)
        dist.all_gather_single(e := torch.empty(4), mine)
        dist.gather(mine, (f := empty(2)) if r == 1 else None, dst=1)
        dist.scatter(g := torch.empty(2), [mine, mine + 5] if r == 0 else None, src=0)
        dist.reduce_scatter(h := torch.empty(2), list(t.split(2)))
        dist.reduce_scatter_single(i := torch.empty(2), t)
        dist.all_to_all(j := empty(2), list(t.split(2)))
        dist.all_to_all_single(k := torch.empty(2 + 2 * r), t[:3].clone(), [1 + r, 1 + r], [1, 2])
        dist.barrier()
        work = dist.all_reduce(last := t.clone(), async_op=True)
        work.wait()
        got = [a, b, c if r == 0 else None, *d, e, *(f if r == 1 else ()), g, h, i, *j, k, last]
        return [x if x is None else x.tolist() for x in got], [(str(x), x.left, x.line) for x in op_log()[before:]]

    rank0, rank1 = ranks = pool.run(fn)
    both, halves = [1.0, 2.0, 3.0, 4.0], [[1.0, 1.0], [2.0, 2.0]]
    assert rank0[0] == [both, both, [1.0, 3.0, 5.0, 7.0], *halves, sum(halves, []), [1.0, 1.0], [1.0, 3.0], [1.0, 3.0],
                        [0.0, 1.0], [1.0, 2.0], [0.0, 1.0], [1.0, 3.0, 5.0, 7.0]]
    assert rank1[0] == [both, both, None, *halves, sum(halves, []), *halves, [6.0, 6.0], [5.0, 7.0], [5.0, 7.0],
                        [2.0, 3.0], [3.0, 4.0], [1.0, 2.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0]]
    first = fn.__code__.co_firstlineno
    for _, records in ranks:
        assert [(text, line - first) for text, _, line in records] == [
            ("dist.all_reduce [4] float32", 3), ("dist.broadcast [4] float32 src 1", 4),
            ("dist.reduce [4] float32 dst 0", 5), ("dist.all_gather [2] float32", 6),
            ("dist.all_gather_single [2] float32", 7), ("dist.gather [2] float32 dst 1", 8),
            ("dist.scatter [2] float32 src 0", 9), ("dist.reduce_scatter [2] float32", 10),
            ("dist.reduce_scatter_single [2] float32", 11), ("dist.all_to_all [2] float32", 12),
            ("dist.all_to_all_single [-1] float32", 13), ("dist.barrier", 14), ("dist.all_reduce [4] float32", 15),
        ]  # fmt: skip
        assert all(left for _, left, _ in records)


def test_what_not_all_ranks_call_stands_in_no_log(pool):
    """Or the numbers of the ranks' collectives would not fit any more."""
    def fn():
        before = len(op_log())
        alone = [dist.new_group([0]), dist.new_group([1])][rank()]
        dist.all_reduce(torch.ones(1), group=alone)
        dist.send(torch.ones(1), 1) if rank() == 0 else dist.recv(torch.ones(1), 0)
        beside = threading.Thread(target=dist.all_reduce, args=(torch.ones(1), dist.ReduceOp.SUM, alone))
        beside.start()
        beside.join()
        all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1]))
        return [str(record) for record in op_log()[before:]]

    assert pool.run(fn) == [["all_reduce [1] float32", "dist.all_reduce [1] float32"]] * 2

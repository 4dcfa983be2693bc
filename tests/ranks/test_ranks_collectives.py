"""The collectives: right sums, the same bits on all ranks and on both kinds of ranks, any shape."""

import os
import re
import signal
import threading
import time

import pytest
import torch

from tplab.pool import RankPool, shared_pool
from tplab.pool.control_block import SLOT_BYTES
from tplab.ranks import (
    CollectiveMismatch,
    RankError,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    context,
    logical_ranks,
    op_log,
    rank,
    state,
    world_size,
)
from tplab.ranks.context import current


def numbers(shape, dtype):
    generator = torch.Generator().manual_seed(7 + rank())
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 100).to(dtype)


BIG = SLOT_BYTES // 4 * 2 + 1  # floats; three chunks, the last of one element


@pytest.mark.parametrize("shape, dtype", [
    ((), torch.float32), ((0,), torch.bfloat16), ((3, 5), torch.int64), ((2, 0, 3), torch.float32),
    ((BIG,), torch.bfloat16), ((BIG,), torch.float32)], ids=str)
def test_all_reduce_is_the_sum_in_rank_order(run, shape, dtype):
    def fn():
        mine = numbers(shape, dtype)
        before = mine.clone()
        assert all_reduce(mine) is mine
        return before, mine

    pieces, sums = zip(*run(fn))
    expected = (pieces[0] + pieces[1]) + pieces[2]
    assert all(torch.equal(s, expected) and s.dtype == dtype and s.shape == expected.shape for s in sums)


@pytest.mark.parametrize("shape, dim", [((2, 3), 0), ((3, BIG), 1), ((2, 3), -1)], ids=str)
def test_all_gather_joins_in_rank_order(run, shape, dim):
    def fn():
        mine = numbers(shape, torch.float32)
        return mine, all_gather(mine, dim=dim)

    pieces, wholes = zip(*run(fn))
    assert all(torch.equal(whole, torch.cat(pieces, dim)) for whole in wholes)


@pytest.mark.parametrize("sizes", [(1, 2, 3), (0, 4, 0), (BIG, 1, 5), (1, 300_000, 2)], ids=str)
def test_all_gather_of_uneven_pieces(run, sizes):
    def fn():
        mine = numbers((2, sizes[rank()]), torch.float32)
        return mine, all_gather(mine, sizes=sizes), str(op_log()[-1])

    pieces, wholes, logged = zip(*run(fn))
    assert all(torch.equal(whole, torch.cat(pieces, 1)) for whole in wholes)
    assert set(logged) == {f"all_gather [2, {sum(sizes)}] float32 dim 1"}


@pytest.mark.parametrize("src, shape", [(0, (4,)), (2, (BIG,))], ids=str)
def test_broadcast(run, src, shape):
    def fn():
        mine = numbers(shape, torch.float32)
        return mine.clone(), broadcast(mine, src)

    pieces, got = zip(*run(fn))
    assert all(torch.equal(g, pieces[src]) for g in got)


def test_barrier_waits_for_all(run):
    def fn():
        time.sleep(0.05 * rank())
        entered = time.monotonic()
        barrier()
        return entered, time.monotonic()

    entered, left = zip(*run(fn))
    assert max(entered) <= min(left)


@pytest.mark.parametrize("makers", [{0, 1, 2}, {1}], ids=str)
def test_tensors_made_in_inference_mode(run, makers):
    """They may be written there only; ranks that agree on shape and dtype need not agree on that."""
    def fn():
        with torch.inference_mode(rank() in makers):
            total, word = torch.ones(BIG), torch.full((4, 2), rank()).T
        all_reduce(total)
        broadcast(word, 2)
        joined = all_gather(total[:1])
        return total.is_inference(), total.sum().item(), word, joined.is_inference(), torch.is_inference_mode_enabled()

    for r, (made, total, word, joined, still) in enumerate(run(fn)):
        assert made == (r in makers) and total == 3 * BIG and (word == 2).all()
        assert not joined and not still


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: all_reduce([1.0]), "all_reduce takes a tensor, not list"),
        (lambda: all_gather([1.0]), "all_gather takes a tensor, not list"),
        (lambda: all_reduce(torch.ones([1] * 9)), "at most 8 dimensions"),
        (lambda: all_reduce(torch.eye(2).to_sparse()), "dense CPU tensor"),
        (lambda: all_gather(torch.ones(2), dim=1), r"dim 1 does not exist in a tensor of shape \[2\]"),
        (lambda: all_gather(torch.ones(2), sizes=[1, 1, 1]), r"rank \d has 2 along dim 0"),
        (lambda: all_gather(torch.ones(2), sizes=[2, 2]), r"sizes \[2, 2\] do not fit 3 ranks"),
        (lambda: broadcast(torch.ones(2), 3), "src 3 is not one of the ranks 0 to 2"),
    ],
)
def test_misuse_is_refused(run, call, told):
    with pytest.raises(RankError) as caught:
        run(call)
    assert re.search(told, caught.value.summary)  # below it stands the line of the call, which holds `told` itself


def test_sizes_that_the_ranks_do_not_agree_on(run):
    def fn():
        sizes = [1, 2, 3] if rank() == 0 else [2, 2, 2] if rank() == 1 else [0, 3, 3]
        all_gather(torch.ones(sizes[rank()]), sizes=sizes)

    with pytest.raises(CollectiveMismatch):
        run(fn)


def test_only_the_ranks_own_thread_may_call(run):
    def fn():
        caught, me = [], current()

        def other():
            context.set_thread_group(me)
            for call in (barrier, lambda: all_reduce(torch.ones(1)), lambda: all_gather(torch.ones(1)),
                         lambda: broadcast(torch.ones(1))):
                try:
                    call()
                except RankError as error:
                    caught.append(str(error).partition(";")[0])

        thread = threading.Thread(target=other, name="helper")
        thread.start()
        thread.join()
        return caught

    for r, caught in enumerate(run(fn)):
        assert caught == [f"{name} was called from thread 'helper' of rank {r}"
                          for name in ("barrier", "all_reduce", "all_gather", "broadcast")]


def test_a_view_that_is_not_contiguous_is_written(run):
    def fn():
        table = torch.zeros(4, 6) + rank()
        assert broadcast(table.T[1:3], 1).shape == (2, 4)  # whose elements no single stride reaches
        long, column = torch.zeros(2, BIG, 2) + rank(), torch.zeros(BIG, 2) + rank()
        broadcast(long[0].T, 2)
        broadcast(column[:, 1], 2)
        return table, [t.unique().tolist() for t in (*long, *column.T)]

    for r, (table, values) in enumerate(run(fn)):
        assert (table[:, 1:3] == 1).all() and (table[:, [0, 3, 4, 5]] == r).all()
        assert values == [[2], [r], [r], [2]]


# Outside, inside, and in threads.


def test_alone():
    assert (rank(), world_size()) == (0, 1)
    t = torch.ones(3)
    assert all_reduce(t) is t and t.sum() == 3
    assert torch.equal(whole := all_gather(t), t) and broadcast(t) is t and barrier() is None
    assert whole.data_ptr() != t.data_ptr()
    assert [str(record) for record in op_log()[-4:]] == [
        "all_reduce [3] float32", "all_gather [3] float32 dim 0", "broadcast [3] float32 src 0", "barrier",
    ]  # fmt: skip
    assert op_log()[-1].file == __file__


def test_logical_ranks_are_ranks_to_each_other_only():
    def fn(x, y):
        state["mine"] = rank()
        barrier()
        return x + y, rank(), world_size(), state["mine"]

    assert logical_ranks(4, fn, 1, y=2) == [(3, r, 4, r) for r in range(4)]
    assert (rank(), world_size()) == (0, 1) and "mine" not in state
    assert logical_ranks(1, rank) == [0]


def test_logical_ranks_take_over_the_callers_modes():
    with torch.inference_mode():
        assert all(logical_ranks(2, torch.is_inference_mode_enabled))
    with torch.no_grad():
        assert logical_ranks(2, torch.is_grad_enabled) == [False, False]
        assert not any(logical_ranks(2, torch.is_inference_mode_enabled))
    assert logical_ranks(2, torch.is_grad_enabled) == [True, True]


def within(seconds, fn):
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        logical_ranks(2, fn)
    assert time.monotonic() - begin < seconds
    return str(caught.value)


def test_a_logical_rank_that_raises():
    def fn():
        if rank() == 1:
            raise ValueError("mine")
        all_reduce(torch.ones(1))

    text = within(20, fn)
    assert text.startswith("rank 1 raised ValueError: mine") and "rank 0 waits in all_reduce" in text
    assert "(a consequence)" in text


@pytest.mark.parametrize("late", [0, 1])
def test_a_logical_rank_that_skips(late):
    """Before the other one waits for it, or after."""
    def fn():
        time.sleep(0.1 * (rank() == late))
        if rank() == 0:
            all_reduce(torch.ones(1))

    text = within(20, fn)
    assert text.startswith("rank 1 returned; rank 0 waits in all_reduce at tests/ranks/test_ranks_collectives.py, line")
    assert "(a consequence)" not in text


@pytest.mark.parametrize("inner", [
    lambda: RankPool(2), lambda: logical_ranks(2, rank), lambda: shared_pool(2).run(rank)],
    ids=["pool", "logical", "shared"])
def test_ranks_inside_ranks_are_refused(run, inner):
    with pytest.raises(RankError, match=r"was called inside rank \d"):
        run(inner)


def test_one_pool_from_many_threads_and_two_pools_at_once(pool):
    """Runs of one pool take turns; those of two go on together."""
    results, barrier_of_two = [], threading.Barrier(2)

    def use(pool, i):
        if i < 2:
            barrier_of_two.wait()
        sums = pool.run(lambda: all_reduce(torch.tensor(float(i))).item())
        results.append(sums == [float(i * pool.size)] * pool.size)

    with RankPool(2) as other:
        threads = [threading.Thread(target=use, args=((pool, other)[i % 2], i)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert results == [True] * 12


def test_closing_a_pool_under_a_run(tmp_path):
    pool, told = RankPool(2), []

    def use():
        try:
            pool.run(lambda: (tmp_path / f"rank {rank()}").touch() or time.sleep(30))
        except RankError as error:
            told.append(str(error))

    thread = threading.Thread(target=use)
    thread.start()
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.001)
    begin = time.monotonic()
    pool.close()
    thread.join(20)
    assert told == ["the pool was closed while it was running this"] and time.monotonic() - begin < 20


@pytest.mark.parametrize("stubborn", [False, True])
def test_an_interrupted_answer_on_logical_ranks_ends(stubborn):
    """Also one that catches its end once; a thread that runs on would slow down all that comes after it."""
    running = threading.Event()

    def fn():
        running.set()
        while True:
            try:
                while True:
                    pass
            except BaseException:
                if not stubborn or hasattr(current(), "caught"):
                    raise
                current().caught = True

    def interrupt():
        running.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        logical_ranks(2, fn)
    end = time.monotonic() + 60
    while any(thread.name.startswith("logical rank") for thread in threading.enumerate()):
        assert time.monotonic() < end, "a thread still runs"
        time.sleep(0.01)


def test_a_rank_that_starts_after_an_interrupt_does_nothing(monkeypatch):
    """On a busy machine a thread can begin long after it was started; nobody would end it."""
    start, late, ran = threading.Thread.start, [], []

    def begin(thread):
        if thread.name == "logical rank 1":
            late.append(thread)
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    with pytest.raises(KeyboardInterrupt):
        logical_ranks(2, lambda: ran.append(rank()))
    start(late[0])
    late[0].join(60)
    assert 1 not in ran and not late[0].is_alive()

"""All-reduces that are repeated from a graph: the same sums, the same log, and the same words when something is wrong.
"""

import os
import time

import pytest
import torch

from tplab import RankPool
from tplab.kernels.graph import Recording
from tplab.ranks import CollectiveMismatch, RankError, all_gather, all_reduce, barrier, op_log, rank, state, world_size


@pytest.fixture(scope="module", params=[1, 2, 3])
def ranks(request):
    with RankPool(request.param, timeout=30) as pool:
        yield pool


@pytest.fixture(scope="module")
def two():
    with RankPool(2, timeout=30) as pool:
        yield pool


@torch.inference_mode()
def record(count=576, dtype=torch.float32, times=3):
    """Keep a graph that adds up ``state["x"]`` over the ranks, so many times; what the first time gave."""
    state["x"] = torch.full((1, count), 1.0 + rank(), dtype=dtype)
    with Recording() as recording:
        for _ in range(times):
            state["y"] = state["x"].view(-1)[None].clone()
            all_reduce(state["y"])
            state["z"] = state["y"] + state["y"]
    state["graph"] = recording.graph
    return recording.refused or state["z"][0, 0].item()


@torch.inference_mode()
def replay(number=0.0):
    state["x"].fill_(number + rank())
    state["graph"].replay()
    assert state["z"].unique().numel() == 1
    return state["z"][0, -1].item()


def sums(number):
    return sum(2 * (number + other) for other in range(world_size()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [16, 576, 4096])
def test_sums_come_again_with_other_numbers(ranks, count, dtype):
    assert ranks.run(record, count, dtype) == ranks.run(sums, 1)
    for number in (1, 5, -3):
        assert ranks.run(replay, number) == ranks.run(sums, number)
    assert ranks.run(lambda: all_reduce(torch.ones(3))[0].item()) == [ranks.size] * ranks.size, "and go on as always"


def test_the_log_has_them_with_shape_and_line(ranks):
    ranks.run(record, 64)
    right = [one[-3:] for one in ranks.run(op_log)]
    last = [one[-1].seq for one in right]
    for turn in (1, 2, 3):
        ranks.run(replay)
        found = [one[-3:] for one in ranks.run(op_log)]
        for mine, theirs in zip(found, right):
            assert [one.seq for one in mine] == [one.seq + 3 * turn for one in theirs]
            assert [(str(one), one.file, one.line, one.left) for one in mine] == [
                (str(one), one.file, one.line, True) for one in theirs]
    assert all(file.endswith("test_pool_graph.py") for file in {one.file for log in found for one in log})
    ranks.run(barrier)
    assert [one[-1].seq for one in ranks.run(op_log)] == [seq + 10 for seq in last]


def test_the_log_goes_round(two):
    """More collectives than it holds, called in turn from here and from another file."""
    two.run(record, 64)

    def often():
        for _ in range(350):
            replay(2)
            barrier()
        return [str(one) for one in op_log()[-5:]]

    assert two.run(often) == [["barrier", *["all_reduce [1, 64] float32"] * 3, "barrier"]] * 2
    assert two.run(replay, 1) == [6, 6]


@pytest.mark.parametrize("late", [0, 1])
def test_who_is_late_is_waited_for(two, late):
    """Long enough for the other one to fall asleep in the kernel, and to be woken."""
    two.run(record)

    def replay_late():
        if rank() == late:
            time.sleep(0.2)
        return [replay(1), replay(2)]

    assert two.run(replay_late) == [[6, 10]] * 2


def test_somebody_sleeps_in_the_middle(two):
    two.run(record, 64, times=40)

    def in_turn():
        return [(time.sleep(0.002 * (turn % 2 == rank())), replay(turn))[1] for turn in range(8)]

    assert two.run(in_turn) == [[2 * (2 * turn + 1) for turn in range(8)]] * 2


def test_who_does_something_else_is_found(two):
    """As always: both collectives, from both ranks' logs; and the pool works on."""
    two.run(record)

    def other():
        return replay() if rank() == 0 else all_reduce(torch.ones(5))

    with pytest.raises(CollectiveMismatch, match=r"all_reduce \[1, 576\] float32(.|\n)*all_reduce \[5\] float32"):
        two.run(other)
    two.run(record)
    assert two.run(replay, 1) == [6, 6]


def test_who_waits_in_a_replay_is_named_with_its_line(two):
    two.run(record)

    def fail():
        if rank() == 1:
            raise ValueError("not this one")
        replay()

    with pytest.raises(RankError, match="rank 1 raised ValueError: not this one") as caught:
        two.run(fail)
    assert "rank 0 waits in all_reduce at tests/pool/test_pool_graph.py, line" in str(caught.value)
    assert two.run(record) == [6.0, 6.0] and two.run(replay, 1) == [6, 6]


def test_a_rank_that_returns_too_early_is_named(two):
    two.run(record)
    with pytest.raises(RankError, match="rank 1 returned; rank 0 waits in all_reduce"):
        two.run(lambda: replay() if rank() == 0 else None)
    two.run(record)
    assert two.run(replay, 1) == [6, 6]


def test_what_takes_several_calls_is_refused(two):
    assert two.run(record, 1 << 17) == ["an all_reduce in several calls"] * 2
    assert two.run(record, 17) == ["an all_reduce in several calls"] * 2
    assert two.run(record, 64, torch.float64) == ["an all_reduce in several calls"] * 2

    def gathered():
        given = torch.ones(4)
        with torch.inference_mode(), Recording() as recording:
            all_gather(given)
        return recording.refused

    assert two.run(gathered) == ["a collective other than all_reduce"] * 2


def test_a_strict_pool_compares_lines_call_by_call():
    with RankPool(2, strict=True, timeout=30) as pool:
        assert pool.run(record) == ["an all_reduce in several calls"] * 2


def test_a_fork_is_no_rank(two):
    two.run(record)

    def forked():
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                replay()
            except RankError as error:
                os.write(write, str(error).encode())
            os._exit(0)
        os.close(write)
        return os.read(read, 1000).decode()

    assert all("was called in a fork of rank" in said for said in two.run(forked))
    assert two.run(replay, 1) == [6, 6]

"""Trace points: what a recording holds, whose it is, and that it ends."""

import pytest
import torch

from tplab.model.trace import point, recording
from tplab.ranks import logical_ranks


def test_a_recording_keeps_copies_of_its_own_thread_alone():
    tensor = torch.ones(2)

    def on_rank():
        point("a stranger's", tensor)

    with recording() as points:
        point("a", torch.zeros(2, requires_grad=True))
        assert not points["a"].requires_grad
        point("a", tensor)
        logical_ranks(2, on_rank)
        tensor.add_(1)  # as the all-reduce does
    point("behind the end", tensor)
    assert list(points) == ["a"] and points["a"].tolist() == [1, 1]


def test_a_recording_ends_when_the_pass_fails_and_there_is_one_at_a_time():
    with pytest.raises(ZeroDivisionError), recording():
        raise ZeroDivisionError
    with recording() as points:
        with pytest.raises(RuntimeError, match="recorded already"), recording():
            pass
        point("a", torch.ones(1))
    assert list(points) == ["a"]


def test_a_replay_goes_on_with_the_tensors_that_it_is_given():
    """Of another shape they are not this point's; what the pass itself made is what is recorded."""
    given = {"a": torch.ones(2), "b": torch.ones(3)}
    with recording(given) as points:
        a, b, c = (point(name, torch.zeros(2)) for name in "abc")
        a.add_(1)  # as the all-reduce does
    assert (a.tolist(), b.tolist(), c.tolist()) == ([2, 2], [0, 0], [0, 0]) and given["a"].tolist() == [1, 1]
    assert [points[name].tolist() for name in "abc"] == [[0, 0]] * 3
    x = torch.zeros(2)
    assert point("a", x) is x, "outside a replay"


def test_a_replay_ends_at_the_point_of_interest_and_records_it_alone():
    with recording({"a": torch.ones(2)}, until="b") as points:
        point("b", point("a", torch.zeros(2)) + 1)
        raise AssertionError("the pass goes on")
    assert list(points) == ["b"] and points["b"].tolist() == [2, 2]
    with recording() as points:
        point("c", torch.ones(1))
    assert list(points) == ["c"], "the next one records all again"

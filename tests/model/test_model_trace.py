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

"""One pool a file: starting ranks takes longer than most tests."""

import time

import pytest
import torch
import torch.distributed as dist
from helpers.failing import SOON

from tplab.pool import RankPool
from tplab.ranks import all_reduce, rank, state


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture
def usable_afterwards(pool):
    """After a test of failures the pool must work again, in gloo too."""
    pool.run(lambda: state.update(kept=rank()))
    yield
    begin = time.monotonic()
    assert pool.run(lambda: float(all_reduce(torch.ones(())))) == [2.0, 2.0]
    pool.run(lambda: dist.all_reduce(torch.ones(())))
    assert time.monotonic() - begin < SOON, "the pool took too long to be usable again"

"""Three ranks of either kind."""

import pytest

from tplab.pool import RankPool
from tplab.ranks import logical_ranks


@pytest.fixture(scope="module")
def pool():
    with RankPool(3) as pool:
        yield pool


@pytest.fixture(params=["processes", "threads"])
def run(request, pool):
    """Call a function on three ranks: processes, then threads."""
    return pool.run if request.param == "processes" else lambda fn, *args: logical_ranks(3, fn, *args)

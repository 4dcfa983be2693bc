"""Three ranks of either kind."""

import pytest

from tplab.pool import shared_pool
from tplab.ranks import logical_ranks


@pytest.fixture
def pool():
    return shared_pool(3)


@pytest.fixture(params=["processes", "threads"])
def run(request, pool):
    """Call a function on three ranks: processes, then threads."""
    return pool.run if request.param == "processes" else lambda fn, *args: logical_ranks(3, fn, *args)

"""What the tests of failing ranks share."""

import re
import time

import pytest

from tplab.ranks import RankError, state

SOON = 20  # seconds: nobody waits for the pool's 60. On a quiet machine it is one, which `test_how_soon` measures


def fails(pool, fn, *patterns, **options):
    """Run `fn`; it must raise a RankError before the pool's timeout whose text has all patterns."""
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(fn, **options)
    took = time.monotonic() - begin
    text = str(caught.value)
    for pattern in patterns:
        assert re.search(pattern, text), f"{pattern!r} is not in:\n{text}"
    assert took < SOON, f"took {took:.2f} s:\n{text}"
    return caught.value


def kept(pool):
    """Which ranks still have what they were told before the failure."""
    return pool.run(lambda: "kept" in state)

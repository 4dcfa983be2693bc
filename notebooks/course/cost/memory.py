"""How fast this machine's memory streams, with as many ranks as decode."""

import time

import torch

from tplab.pool import RankPool
from tplab.ranks import barrier, state

PASSES = 6


def bandwidth(pool: RankPool, size: int) -> float:
    """Bytes per second that all ranks of ``pool`` together read, each on ``size`` bytes of its own at the same time."""
    return sum(pool.run(_stream, size))


def _stream(size: int) -> float:
    data = state.get("stream")
    if data is None:
        data = state["stream"] = torch.ones(size // 4)
    barrier()
    times = []
    for _ in range(PASSES):
        begin = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - begin)
    return size / sorted(times)[PASSES // 2]

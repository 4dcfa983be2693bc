"""How fast this machine's memory streams, with as many ranks as decode."""

import time

import torch

from tplab.ranks import RankPool, barrier, state

BYTES = 1 << 28  # per rank: far beyond any cache
PASSES = 6


def bandwidth(pool: RankPool) -> float:
    """Bytes per second that all ranks of ``pool`` together read, each on its own memory at the same time."""
    return sum(pool.run(_stream))


def _stream() -> float:
    data = state.get("stream")
    if data is None:
        data = state["stream"] = torch.ones(BYTES // 4)
    barrier()
    times = []
    for _ in range(PASSES):
        begin = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - begin)
    return BYTES / sorted(times)[PASSES // 2]

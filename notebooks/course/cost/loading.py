"""Loading: what each rank reads of the checkpoint, what it then holds, and how long that takes."""

import math
import time

import torch

from tplab.checkpoint import Checkpoint
from tplab.model import load_model
from tplab.model.dtypes import parse_dtype
from tplab.pool import RankPool
from tplab.ranks import all_reduce, state
from tplab.shard import ShardPlan


def bench_load(ckpt: Checkpoint, model: str, tp: int, dtype: str, show) -> dict:
    """Bytes read, private memory and seconds per rank, for one rank and for ``tp``; each in fresh processes."""
    total = sum(math.prod(info.shape) * info.dtype.itemsize for info in ckpt.tensors.values())
    rows = []
    for size in dict.fromkeys((1, tp)):
        with RankPool(size, timeout=600) as pool:
            found = pool.run(measure_load, ckpt, ShardPlan.from_config(ckpt.config, size), dtype)
        rows += [{"ranks": size, "rank": i, **one, "read_share": one["bytes_read"] / total,
                  "private_share": one["private"] / (rows or found)[0]["private"]} for i, one in enumerate(found)]
    show(f"load, {model}, {dtype}, checkpoint of {total / 1e6:.0f} MB")
    show(f"{'':20}{'read':>12}{'of the checkpoint':>20}{'private memory':>18}{'of one rank':>14}{'seconds':>10}")
    for row in rows:
        name = f"rank {row['rank']} of {row['ranks']}"
        show(f"{name:20}{row['bytes_read'] / 1e6:9.0f} MB{row['read_share']:20.3f}{row['private'] / 1e6:15.0f} MB"
             f"{row['private_share']:14.2f}{row['seconds']:10.2f}")
    return {"benchmark": "load", "model": model, "tp": tp, "dtype": dtype, "rows": rows}


def measure_load(ckpt: Checkpoint, plan: ShardPlan, dtype: str) -> dict:
    """On a rank: load, and say what that took. Private memory (USS) is what it grew by."""
    import psutil

    process = psutil.Process()
    all_reduce(torch.ones(1))  # what a rank needs anyway is there before the count begins
    before, begin = process.memory_full_info().uss, time.perf_counter()
    model = state["loaded"] = load_model(ckpt, plan, parse_dtype(dtype))
    seconds = time.perf_counter() - begin
    return {"bytes_read": model.load_stats.bytes_read, "private": process.memory_full_info().uss - before,
            "seconds": seconds}

"""Machines that are not here: accelerators joined by a link, from published numbers. Nothing of it was measured here.

The accelerator is one H100 SXM per rank: 3.35 TB/s of memory, 989 Tflop/s in dense bfloat16, 80 GB
(https://glennklockwood.com/garden/processors/h100 lists the maker's numbers). Real products and attention reach less of
both, and a real engine has a cost per step of its own, so these are bounds, and what a *link* costs is what to compare.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from course.cost.amounts import Part
from course.cost.cost import step_cost
from course.cost.machine import Machine
from course.cost.shapes import shape_config
from tplab.checks import counted
from tplab.errors import TplabError
from tplab.memory import CONTEXT, parameter_bytes
from tplab.shard import ShardPlan

MEMORY_BYTES = 80e9
BYTES_PER_SECOND = 3.35e12
OPERATIONS_PER_SECOND = 989e12


class Link(NamedTuple):
    """How ranks meet.

    Attributes:
        latency: seconds of an all-reduce of a few bytes over eight ranks; fewer are given the same, which is a little
            too much.
        bytes_per_second: that each rank sends while it receives as much.
        source: where the two numbers are from; what is an assumption says so.
    """

    latency: float
    bytes_per_second: float
    source: str


LINKS = {
    "nvlink": Link(10e-6, 370e9, "370 GB/s: what NCCL gets of 450, https://github.com/NVIDIA/nccl-tests/issues/212; "
                   "6 µs with two H100s, https://github.com/NVIDIA/nccl/issues/1259, so 10 µs with eight is assumed"),
    "pcie": Link(42e-6, 50e9, "42 µs with eight RTX 4090, https://github.com/NVIDIA/nccl/issues/1530; 50 of the 64 "
                 "GB/s that PCIe 5.0 x16 has in one direction are assumed"),
    "ethernet": Link(100e-6, 7.5e9, "60 % of 100 Gbit/s: over TCP no more of the wire was reached in "
                     "https://github.com/NVIDIA/nccl/issues/209; 100 µs are assumed"),
}


def linked_machine(name: str, tp: int, dtype: torch.dtype) -> Machine:
    """``tp`` accelerators on the link ``name``, as :func:`course.cost.cost.step_cost` takes a machine.

    An all-reduce of ``n`` bytes by a ring sends ``2 (tp - 1) / tp * n`` bytes over every link. TplabError for a link
    that is not in ``LINKS``.
    """
    if name not in LINKS:
        raise TplabError(f"there is no link {name!r}; there are {', '.join(LINKS)}")
    link = LINKS[name]
    read, compute = dtype.itemsize / BYTES_PER_SECOND, 2 / OPERATIONS_PER_SECOND
    ridge = max(2, round(read / compute))  # so many rows take as long to multiply as their weight to read
    return Machine(tp, {1: read, ridge: ridge * compute}, kv_byte=1 / BYTES_PER_SECOND,
                   score=1 / OPERATIONS_PER_SECOND, reduce_latency=link.latency,
                   reduce_byte=2 * (tp - 1) / tp / link.bytes_per_second)


def link_rows(names: Iterable[str], sizes: Iterable[int], dtype: torch.dtype) -> list[dict[str, str]]:
    """For a table: tokens per second of one sequence, and in brackets how much of a step is spent in collectives."""
    rows = []
    for name in names:
        config = shape_config(name)
        for link in LINKS:
            row = {"model": name, "link": link}
            for tp in sizes:
                plan = ShardPlan.from_config(config, tp)
                if max(parameter_bytes(config, shard, dtype) for shard in plan.ranks) > MEMORY_BYTES:
                    row[counted(tp, "rank")] = "no room"
                else:
                    cost = step_cost(config, plan, [Part(CONTEXT, 1)], 1, dtype, linked_machine(link, tp, dtype))
                    row[counted(tp, "rank")] = f"{1 / cost.total:.0f} ({cost.collectives / cost.total:.0%})"
            rows.append(row)
    return rows

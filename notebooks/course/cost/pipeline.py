"""A product in parts, and the sums of its parts over the ranks, on a simulated clock."""

from collections.abc import Sequence

import torch

from course.cost.links import LINKS, linked_machine
from tplab.checks import counted


def pipeline(product: float, latency: float, transfer: float, parts: int) -> list[tuple[float, float, float]]:
    """``(start of the product, start of its sum, end of the sum)`` of each part, in the unit of the arguments.

    A rank computes one product after the other. A sum starts when its product is ready and the sum before it has
    ended; it takes ``latency + transfer / parts``.
    """
    steps, end = [], 0.0
    for part in range(parts):
        begin = max((part + 1) * product / parts, end)
        end = begin + latency + transfer / parts
        steps.append((part * product / parts, begin, end))
    return steps


def overlap_on_links(tokens: int, hidden: int, inner: int, ranks: int, parts: Sequence[int]) -> list[dict[str, str]]:
    """A row for each link of :data:`course.cost.links.LINKS`: a row-parallel product ``[tokens, inner / ranks]`` times
    ``[inner / ranks, hidden]`` in bfloat16, its all-reduce, and both in so many parts, in microseconds."""
    rows = []
    for link in LINKS:
        machine = linked_machine(link, ranks, torch.bfloat16)
        product = hidden * inner // ranks * machine.seconds_per_weight(tokens)
        latency, transfer = machine.reduce_latency, machine.reduce_byte * tokens * hidden * 2
        ends = {count: pipeline(product, latency, transfer, count)[-1][-1] for count in parts}
        rows.append({"link": link, "product": _micro(product), "sum": _micro(latency + transfer),
                     "its latency": _micro(latency),
                     **{f"in {counted(count, 'part')}": _micro(end) for count, end in ends.items()}})
    return rows


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} µs"

"""``python -m course bench predict``: how fast a model would be on so many ranks, here and on accelerators."""

from collections.abc import Iterable, Iterator

import psutil
import torch

from course.cost.amounts import Part
from course.cost.cost import step_cost
from course.cost.links import LINKS, MEMORY_BYTES, linked_machine
from course.cost.machine import Machine, measure_machines
from course.cost.shapes import shape_config
from tplab.checks import counted
from tplab.engine.config import longest_sequence
from tplab.memory import CONTEXT, SEQUENCES, parameter_bytes, size_in_words
from tplab.shard import ShardPlan

PROMPT = 512
_WIDTHS = (26, 12, 16, 18, 24)


def speed_lines(config, plan: ShardPlan, dtype: torch.dtype) -> Iterator[str]:
    """A table: tokens per second on this machine, which is measured now, and on accelerators behind each link."""
    tp = plan.tensor_parallel_size
    yield _row(f"predicted, {counted(tp, 'rank')}", "decode", f"{SEQUENCES} sequences", f"prompt of {PROMPT}",
               "in collectives")
    each = [parameter_bytes(config, shard, dtype) for shard in plan.ranks]
    memory = psutil.virtual_memory().total
    if sum(each) > memory:
        yield f"this machine has {size_in_words(memory)} of memory, the weights need {size_in_words(sum(each))}"
    else:
        yield _speeds(config, plan, dtype, measure_machines(config, [tp], dtype)[tp])
    for name in LINKS:
        machine = linked_machine(name, tp, dtype)
        if max(each) > MEMORY_BYTES:
            yield f"{machine.name}: {size_in_words(max(each))} of weights do not fit into {size_in_words(MEMORY_BYTES)}"
        else:
            yield _speeds(config, plan, dtype, machine)
    yield "tokens/s; H100: bounds from published numbers, without the cost of an engine. The sources:"
    for name, link in LINKS.items():
        yield f"  {name}: {link.source}"


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


def _speeds(config, plan: ShardPlan, dtype: torch.dtype, machine: Machine) -> str:
    # The sequences are no longer than the model allows.
    longest = longest_sequence(config)
    context, prompt = min(CONTEXT, longest - 1), min(PROMPT, longest - 1)
    one, many = (step_cost(config, plan, [Part(context, 1)] * n, n, dtype, machine) for n in (1, SEQUENCES))
    read = step_cost(config, plan, [Part(0, prompt)], 1, dtype, machine)
    return _row(machine.name, f"{1 / one.total:,.1f}", f"{SEQUENCES / many.total:,.1f}", f"{prompt / read.total:,.0f}",
                f"{one.collectives / one.total:.0%}")


def _row(*cells: str) -> str:
    first, *others = cells
    return f"{first:{_WIDTHS[0]}}" + "".join(f"{cell:>{width}}" for cell, width in zip(others, _WIDTHS[1:]))



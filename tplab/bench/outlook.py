"""``python -m tplab plan``: what a model would need on so many ranks, and how fast it would be, here and elsewhere."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import torch

from tplab.bench.amounts import Part, kv_bytes, parameter_bytes
from tplab.bench.cost import step_cost
from tplab.bench.latent import is_latent, latent_lines
from tplab.bench.links import LINKS, MEMORY_BYTES, linked_machine
from tplab.bench.machine import Machine, measure_machines
from tplab.bench.shapes import shape_config
from tplab.checkpoint import ModelConfig
from tplab.checkpoint.config import config_of
from tplab.checkpoint.headers import read_json
from tplab.checks import counted, whole_number
from tplab.engine.config import longest_sequence
from tplab.shard import ShardPlan

CONTEXT, SEQUENCES, PROMPT = 512, 16, 512
_WIDTHS = (26, 12, 16, 18, 24)


def config_file(path: str, tp: int, dtype: torch.dtype) -> tuple[ModelConfig | None, list[str]]:
    """The config in a published ``config.json``, and lines to show first. For a model with MLA the config is None, and
    the lines say all that is known.

    Raises CheckpointError for a file that is none, and for models that the engine does not run.
    """
    raw = read_json(Path(path))
    if is_latent(raw):
        return None, list(latent_lines(raw, whole_number(tp, 1) or 1, dtype))
    said = [f"the published weights are quantised; here they are counted in {str(dtype).removeprefix('torch.')}"]
    return config_of(raw, quantised=True), said if raw.get("quantization_config") else []


def memory_lines(config, plan: ShardPlan, dtype: torch.dtype) -> Iterator[str]:
    """Per rank: weights, and keys and values of ``SEQUENCES`` sequences of ``CONTEXT`` tokens."""
    tokens = SEQUENCES * CONTEXT
    yield f"memory in {str(dtype).removeprefix('torch.')}, with {SEQUENCES} sequences of {CONTEXT} tokens"
    for shard in plan.ranks:
        held, cached = parameter_bytes(config, shard, dtype), kv_bytes(config, shard, tokens, dtype)
        yield (f"  rank {shard.rank}: weights {_size(held)}, keys and values {_size(cached)} "
               f"({cached // tokens:,} bytes per token)")


def speed_lines(config, plan: ShardPlan, dtype: torch.dtype) -> Iterator[str]:
    """A table: tokens per second on this machine, which is measured now, and on accelerators behind each link."""
    tp = plan.tensor_parallel_size
    yield _row(f"predicted, {counted(tp, 'rank')}", "decode", f"{SEQUENCES} sequences", f"prompt of {PROMPT}",
               "in collectives")
    each = [parameter_bytes(config, shard, dtype) for shard in plan.ranks]
    memory = psutil.virtual_memory().total
    if sum(each) > memory:
        yield f"this machine has {_size(memory)} of memory, the weights need {_size(sum(each))}"
    else:
        yield _speeds(config, plan, dtype, measure_machines(config, [tp], dtype)[tp])
    for name in LINKS:
        machine = linked_machine(name, tp, dtype)
        if max(each) > MEMORY_BYTES:
            yield f"{machine.name}: {_size(max(each))} of weights do not fit into {_size(MEMORY_BYTES)}"
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


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

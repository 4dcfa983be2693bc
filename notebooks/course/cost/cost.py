"""A model of what a step costs: the counts of :mod:`course.cost.amounts` times what a machine takes for each.

A step is a chain of phases with a collective after each, so a phase takes as long as its slowest rank. Where
there are fewer cores than ranks, the ranks take turns: a phase takes at least all ranks' work divided by the cores.
Nothing overlaps with anything else, as in the engine.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from course.cost.amounts import Amount, Part, messages, step_amount
from course.cost.machine import Machine
from tplab.checks import whole_number
from tplab.errors import TplabError
from tplab.shard import ShardPlan


class StepCost(NamedTuple):
    """Seconds of a step, by what they are spent on: products with all that is done to their rows, keys and values,
    collectives, and the engine's Python."""

    products: float
    attention: float
    collectives: float
    python: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)


def step_cost(config, plan: ShardPlan, parts: Sequence[Part], due: int, dtype: torch.dtype, machine: Machine
              ) -> StepCost:
    """Predict one step of ``parts``, of which ``due`` sequences get a token.

    Raises:
        TplabError: no sequences, or counts that are no whole numbers from 0 (``start``) or 1 (``count``) up.
    """
    if not parts:
        raise TplabError("a step computes at least one token")
    for start, count in parts:
        if whole_number(start, 0) is None or whole_number(count, 1) is None:
            raise TplabError(f"a part of a step is (start, count) from (0, 1) up, not ({start!r}, {count!r})")
    tp = plan.tensor_parallel_size
    ranks = [step_amount(config, plan, rank, parts, due, dtype) for rank in range(tp)]
    decoding = all(part.count == 1 for part in parts)
    spent = [[_seconds(amount, machine, decoding) for amount in phases] for phases in ranks]
    products = attention = 0.0
    for phase in zip(*spent):
        slowest = max(phase, key=sum)
        turns = max(1.0, sum(map(sum, phase)) / (machine.places * sum(slowest) or 1.0))
        products, attention = (have + turns * more for have, more in zip((products, attention), slowest))
    sizes = messages(config, parts, due, dtype) if tp > 1 else []
    collectives = sum(machine.reduce_latency + size * machine.reduce_byte for size in sizes)
    python = machine.step + machine.sequence * (len(parts) - 1)
    python += machine.request * sum(part.start == 0 for part in parts)
    return StepCost(products, attention, collectives, python)


def _seconds(amount: Amount, machine: Machine, decoding: bool) -> tuple[float, float]:
    """One rank's seconds of one phase: products and attention."""
    attention = amount.kv_bytes * machine.kv_byte if decoding else amount.scores * machine.score
    return amount.weights * machine.seconds_per_weight(amount.rows), attention

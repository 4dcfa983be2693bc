"""A machine is what was measured: every number by hand from stand-ins' times, then all of it on ranks as threads.

Notebook 10 measures on real ranks.
"""

import pytest
import torch
from helpers.pools import Threads

from course.cost import machine, steps
from course.cost.cost import step_cost
from course.cost.machine import TIMED
from tplab.checkpoint import open_checkpoint
from tplab.llm.llm import LLM
from tplab.shard import ShardPlan

FABLE = open_checkpoint("fable").config
STEP, SEQUENCE, REQUEST, LATENCY, BYTE = 1e-3, 1e-5, 5e-4, 4e-5, 1e-9
WEIGHT = {1: 1e-9, 4: 2e-9, 16: 3e-9, 64: 7e-9, 512: 4e-8}
KV_BYTE, SCORE = 3e-10, 5e-11


def simulated(tps, cores, monkeypatch, disturbed=0.0, dtype=torch.float64):
    """Stand-ins that take as long as the model of cost says; returns what was measured."""
    asked = []

    class Pool(Threads):
        def run(self, fn, size):
            return [LATENCY + BYTE * size] * (self.size - 1) + [0.0]  # the slowest counts

    def seconds(pool, sizes, kinds, dtype):
        asked.append((pool.size, sizes, dtype))
        own = {kind: STEP + SEQUENCE * (kind.sequences - 1) + REQUEST * (kind.what == "prompt")
               for kind in kinds}
        turns, layers = max(1, pool.size / cores), sizes["num_hidden_layers"]
        latency = LATENCY if pool.size > 1 else 0.0
        if sizes["hidden_size"] == 64:
            shared = turns if dtype == torch.float64 else 1 / min(pool.size, cores)  # the fast path's work is divided
            more = (layers - 1) * (2 * latency + shared * 1e-6) - disturbed * layers
            return {kind: own[kind] + more for kind in kinds}
        made = machine.Machine("by hand", cores, WEIGHT, KV_BYTE, SCORE, latency, BYTE)
        plan, found = ShardPlan.from_config(FABLE, pool.size), {}
        for kind in kinds:
            cost = step_cost(FABLE, plan, kind.parts, 0, dtype, made)  # nothing at the head, and 2 collectives a layer
            found[kind] = own[kind] + cost.products + cost.attention
            if pool.size > 1:
                rows = sum(part.count for part in kind.parts)
                found[kind] += layers * 2 * (LATENCY + BYTE * rows * FABLE.hidden_size * dtype.itemsize)
        return found

    monkeypatch.setattr(machine, "RankPool", Pool)
    monkeypatch.setattr(machine, "available_cores", lambda: cores)
    monkeypatch.setattr(machine, "_step_seconds", seconds)
    return machine.measure_machines(FABLE, tps, dtype), asked


@pytest.mark.parametrize("tp, cores, pools", [(1, 1, {1}), (1, 4, {1}), (2, 2, {1, 2}), (4, 2, {1, 2, 4}),
                                              (2, 1, {1, 2})])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_the_steps_were_made_of_is_found_again(tp, cores, pools, dtype, monkeypatch):
    """fable's 8 and 2 heads; more ranks than cores take turns in a layer, and its weights are timed on fewer."""
    machines, asked = simulated([tp], cores, monkeypatch, dtype=dtype)
    found = machines[tp]
    near = pytest.approx
    assert (found.name, found.places) == (f"this machine, {cores} core{'s' * (cores > 1)}", cores)
    assert (found.step, found.sequence, found.request) == (near(STEP), near(SEQUENCE), near(REQUEST))
    assert found.reduce_latency == near(LATENCY if tp > 1 else 0.0, rel=1e-6)
    assert found.reduce_byte == near(BYTE if tp > 1 else 0.0)
    # All but the last layer's MLP, which computes no row that gets no token: 1 of 12 phases.
    assert found.weight == {rows: near(seconds, rel=0.15) for rows, seconds in WEIGHT.items()}
    assert (found.kv_byte, found.score) == (near(KV_BYTE, rel=0.01), near(SCORE, rel=0.1))
    assert {size for size, *_ in asked} == pools and {given for *_, given in asked} == {dtype}
    large = [(size, sizes) for size, sizes, _ in asked if sizes["hidden_size"] != 64]
    assert [size for size, _ in large] == [min(tp, cores)] and large[0][1]["num_hidden_layers"] == 6


def test_a_small_machine_is_measured(monkeypatch):
    """Every part is timed, on all ranks at once; how long it took is the machine's own business."""
    for name, small in (("TINY_LAYERS", (1, 2)), ("REPEATS", 1), ("MESSAGES", (64, 1 << 16)), ("RankPool", Threads),
                        ("LLM", lambda folder, size, dtype, pool, **options: LLM(
                            folder, size, dtype, logical=True, **options))):
        monkeypatch.setattr(machine, name, small)
    monkeypatch.setattr(steps, "TOKENS", 3)
    found = machine.measure_machines(FABLE, [2], torch.float32)[2]
    assert set(found.weight) == set(TIMED) and all(seconds > 0 for seconds in found.weight.values())
    assert min(found.kv_byte, found.score, found.reduce_latency, found.reduce_byte, found.sequence) >= 0
    assert found.step > 0 and found.places == machine.available_cores()

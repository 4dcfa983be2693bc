"""A machine is what was measured: every number by hand from a stand-in's times, then all of it on a rank as a thread.

Notebook 10 measures on a real rank.
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
STEP, SEQUENCE, REQUEST = 1e-3, 1e-5, 5e-4
WEIGHT = {1: 1e-9, 4: 2e-9, 16: 3e-9, 64: 7e-9, 512: 4e-8}
KV_BYTE, SCORE = 3e-10, 5e-11


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_the_steps_were_made_of_is_found_again(dtype, monkeypatch):
    """The stand-in takes as long as the model of cost says."""
    def seconds(pool, sizes, kinds, dtype):
        engine = {kind: STEP + SEQUENCE * (kind.sequences - 1) + REQUEST * (kind.what == "prompt") for kind in kinds}
        if sizes["hidden_size"] == 64:
            return engine
        assert pool.size == 1 and sizes["num_hidden_layers"] == 6
        made, plan = machine.Machine(4, WEIGHT, KV_BYTE, SCORE), ShardPlan.from_config(FABLE, 1)
        costs = {kind: step_cost(FABLE, plan, kind.parts, 0, dtype, made) for kind in kinds}  # nothing at the head
        return {kind: engine[kind] + cost.products + cost.attention for kind, cost in costs.items()}

    monkeypatch.setattr(machine, "RankPool", Threads)
    monkeypatch.setattr(machine, "available_cores", lambda: 4)
    monkeypatch.setattr(machine, "_step_seconds", seconds)
    measured, near = machine.measure_machine(FABLE, dtype), pytest.approx
    assert measured.places == 4 and (measured.reduce_latency, measured.reduce_byte) == (0, 0)
    assert (measured.step, measured.sequence, measured.request) == (near(STEP), near(SEQUENCE), near(REQUEST))
    # All but the last layer's MLP, which computes no row that gets no token: 1 of 12 phases.
    assert measured.weight == {rows: near(seconds, rel=0.15) for rows, seconds in WEIGHT.items()}
    assert (measured.kv_byte, measured.score) == (near(KV_BYTE, rel=0.01), near(SCORE, rel=0.1))


def test_a_small_machine_is_measured(monkeypatch):
    """Every part is timed; how long it took is the machine's own business."""
    for name, small in (("REPEATS", 1), ("RankPool", Threads), ("LLM", lambda folder, size, dtype, pool, **options: LLM(
            folder, size, dtype, logical=True, **options))):
        monkeypatch.setattr(machine, name, small)
    monkeypatch.setattr(steps, "TOKENS", 3)
    measured = machine.measure_machine(FABLE, torch.float32)
    assert set(measured.weight) == set(TIMED) and all(seconds > 0 for seconds in measured.weight.values())
    assert min(measured.kv_byte, measured.score, measured.sequence) >= 0
    assert measured.step > 0 and measured.places == machine.available_cores()

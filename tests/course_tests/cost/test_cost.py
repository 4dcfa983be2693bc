"""The model of cost: counts by hand for one small shape, seconds by hand for one round machine, and its limits."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from course.cost.amounts import (
    Part,
    attention_amount,
    head_amount,
    messages,
    mlp_amount,
    step_amount,
)
from course.cost.cost import step_cost
from course.cost.links import LINKS, linked_machine
from course.cost.machine import Machine
from course.cost.shapes import SHAPES, shape_config
from course.lab.score import _SMALL, LAYOUTS
from tplab.checkpoint import ModelConfig, open_checkpoint
from tplab.errors import TplabError
from tplab.memory import kv_bytes, parameter_bytes
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan

# Three query heads of 4 and one KV head over two ranks: 2 + 1 heads, the KV head on both; 5 MLP columns as 3 + 2.
CONFIG = ModelConfig(model_type="qwen2", hidden_size=10, num_heads=3, num_kv_heads=1, head_dim=4, intermediate_size=5,
                     vocab_size=7, num_layers=2, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False,
                     qkv_bias=True, eos_token_ids=(), max_position_embeddings=64, scaling=0.5, windows=(None, None),
                     rotates=(True, True), hf=SimpleNamespace(rope_parameters={"rope_type": "default"}))
PLAN = ShardPlan.from_config(CONFIG, 2)
BF16 = torch.bfloat16
PARTS = [Part(5, 1), Part(0, 3)]  # one sequence decodes its sixth token, one reads its first three
ROUND = Machine(2, {1: 1.0, 5: 3.0}, kv_byte=10.0, score=0.5, reduce_latency=100.0, reduce_byte=2.0,
                sequence=7.0, step=5000.0, request=1e6)


def test_the_counts_of_a_small_shape_by_hand():
    first, second = PLAN.ranks
    amount = attention_amount(CONFIG, first, PARTS, BF16)
    assert amount.rows == 4 and amount.weights == 10 * (2 * 4 + 2 * 4) + 2 * 4 * 10  # q, k and v; then o
    assert amount.kv_bytes == (6 + 3) * 2 * 4 * 2, "six and three keys, and as many values, of 4 numbers of 2 bytes"
    assert amount.scores == 4 * 2 * 4 * (1 * 6 + 3 * 3), "per head, query and key: 4 products and sums, twice"
    assert attention_amount(CONFIG, second, PARTS, BF16).weights == 10 * (4 + 2 * 4) + 4 * 10
    assert [mlp_amount(CONFIG, shard, 4).weights for shard in PLAN.ranks] == [3 * 10 * 3, 3 * 10 * 2]
    assert head_amount(CONFIG, first, 2)[:2] == (2, 10 * 4) and head_amount(CONFIG, second, 2).weights == 10 * 3
    assert amount.operations == 2 * 4 * 240 + amount.scores and amount.bytes(BF16) == 2 * 240 + amount.kv_bytes
    assert messages(CONFIG, PARTS, 2, BF16) == [4 * 10 * 2] * 4 + [2 * 10 * 2, 2 * 16], (
        "embedding, two layers, of which the last one's MLP computes the rows that get a token, best tokens")
    assert messages(CONFIG, PARTS[1:], 0, BF16) == [3 * 10 * 2] * 4 + [10 * 2], "a part of a prompt: a single row"
    for parts, due, rows in (PARTS, 2, [4, 4, 4, 2, 2]), (PARTS[1:], 0, [3, 3, 3, 1]):
        assert [amount.rows for amount in step_amount(CONFIG, PLAN, 0, parts, due, BF16)] == rows
    assert kv_bytes(CONFIG, first, 3, BF16) == 3 * 2 * 2 * 1 * 4 * 2
    config = replace(CONFIG, num_heads=4, num_kv_heads=2)
    assert kv_bytes(config, ShardPlan.from_config(config, 2).ranks[1], 3, BF16) == 3 * 2 * 2 * 1 * 4 * 2, "one of two"


@pytest.mark.parametrize("name", ["fable", "mistral-7b", "llama 9/3", "qwen3 8/4"])
def test_the_bytes_of_the_weights_are_those_that_a_rank_holds(name, monkeypatch):
    """Counted by the model itself: what its parameters occupy. With biases everywhere, and with norms of q and k."""
    from tplab.model.decoder import TensorParallelCausalLM
    from tplab.ranks import rank

    for layout, shape in LAYOUTS.items():
        monkeypatch.setitem(SHAPES, layout, _SMALL | shape)
    config = shape_config(name) if name in SHAPES else open_checkpoint(name).config
    plan = ShardPlan.from_config(config, 3)

    def held():
        model = TensorParallelCausalLM(config, plan, torch.float32)  # nothing is filled, so nothing is committed
        return rank(), sum(p.numel() * p.element_size() for p in model.parameters())

    assert logical_ranks(3, held) == [
        (r, parameter_bytes(config, shard, torch.float32)) for r, shard in enumerate(plan.ranks)]


def test_a_step_by_hand_waits_for_its_slowest_rank():
    one = step_cost(CONFIG, PLAN, [Part(5, 1)], 1, BF16, ROUND)
    assert one.products == 2 * (240 + 90) + 40, "one row: a second per weight, of rank 0, which holds more"
    assert one.attention == 2 * 10 * 6 * 2 * 4 * 2, "decoding: by the bytes of keys and values"
    assert step_cost(CONFIG, PLAN, [Part(5, 1)] * 3, 3, BF16, ROUND).attention == 3 * one.attention
    assert one.collectives == 5 * (100 + 2 * 20) + (100 + 2 * 16) and one.python == 5000
    assert one.total == sum(one)
    read = step_cost(CONFIG, PLAN, [Part(0, 3)], 1, BF16, ROUND)
    assert read.attention == 2 * 0.5 * 4 * 2 * 4 * 9, "a prompt: by its operations"
    assert read.products == (2 * 240 + 90) * 2.0 + 90 + 40, (
        "three rows lie half way between one and five; the last MLP and the head see one")
    assert step_cost(CONFIG, PLAN, [Part(5, 1)] * 3, 3, BF16, ROUND).python == 5000 + 2 * 7
    begun = step_cost(CONFIG, PLAN, [Part(5, 1), Part(0, 1), Part(0, 2)], 3, BF16, ROUND).python
    assert begun == 5000 + 2 * 7 + 2e6, "two requests come"


def test_time_per_weight_between_and_beyond_what_was_measured():
    assert [ROUND.seconds_per_weight(rows) for rows in (1, 2, 5, 50)] == [1.0, 1.5, 3.0, 30.0]
    bent = Machine(2, {1: 1.0, 3: 5.0, 5: 6.0})
    assert [bent.seconds_per_weight(rows) for rows in (1, 2, 3, 4, 5)] == [1.0, 3.0, 5.0, 5.5, 6.0]


@pytest.mark.parametrize("parts, words", [([], "at least one token"), ([Part(0, 0)], r"not \(0, 0\)"),
                                          ([Part(-1, 1)], r"not \(-1, 1\)"), ([Part(0.5, 1)], r"not \(0.5, 1\)")])
def test_what_is_no_step(parts, words):
    with pytest.raises(TplabError, match=words):
        step_cost(CONFIG, PLAN, parts, 1, BF16, ROUND)


def test_a_link_is_only_as_good_as_its_latency_and_its_bytes():
    config, costs = shape_config("llama-3.1-70b"), {}
    plan = ShardPlan.from_config(config, 8)
    for name in LINKS:
        machine = linked_machine(name, 8, BF16)
        costs[name] = step_cost(config, plan, [Part(512, 1)], 1, BF16, machine)
        assert costs[name].collectives == pytest.approx(
            162 * LINKS[name].latency + 1.75 * (161 * 8192 * 2 + 16) / LINKS[name].bytes_per_second)
    assert costs["nvlink"].total < costs["pcie"].total < costs["ethernet"].total
    assert costs["nvlink"].products == pytest.approx(69.5e9 / 8 * 2 / 3.35e12, rel=0.01), "read once, by eight"
    numbers = {name: (f"{1e6 * link.latency:g} µs", f"{link.bytes_per_second / 1e9:g}") for name, link in LINKS.items()}
    assert all(latency in LINKS[name].source for name, (latency, _) in numbers.items()), "as its source says"
    assert "370 GB/s" in LINKS["nvlink"].source and "; 50 of the 64 GB/s" in LINKS["pcie"].source
    assert [speed for _, speed in numbers.values()] == ["370", "50", "7.5"] and 7.5e9 == 0.6 * 100e9 / 8
    assert "assumed" in " ".join(link.source for link in LINKS.values())
    with pytest.raises(TplabError, match="no link 'pigeon'; there are nvlink, pcie, ethernet"):
        linked_machine("pigeon", 8, BF16)

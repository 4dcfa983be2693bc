"""The model of cost: counts by hand for one small shape, seconds by hand for one round machine, and its limits."""

from types import SimpleNamespace

import pytest
import torch
from helpers.checkpoints import make_checkpoint

from tplab.bench import machine as machine_module
from tplab.bench import outlook
from tplab.bench.amounts import Part, attention_amount, head_amount, kv_bytes, messages, mlp_amount, parameter_bytes
from tplab.bench.cost import CostError, predict, step_cost
from tplab.bench.links import LINKS, linked_machine
from tplab.bench.machine import Machine
from tplab.bench.shapes import SHAPES, shape_config
from tplab.checkpoint import open_checkpoint
from tplab.cli import main
from tplab.engine.errors import EngineError
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan

# Three query heads of 4 and one KV head over two ranks: 2 + 1 heads, the KV head on both; 5 MLP columns as 3 + 2.
CONFIG = SimpleNamespace(hidden_size=10, num_heads=3, num_kv_heads=1, head_dim=4, intermediate_size=5, vocab_size=7,
                         num_layers=2, qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False,
                         tie_word_embeddings=False, eos_token_ids=(), max_position_embeddings=64,
                         hf=SimpleNamespace(rope_parameters={"rope_type": "default"}))
PLAN = ShardPlan.from_config(CONFIG, 2)
BF16 = torch.bfloat16
PARTS = [Part(5, 1), Part(0, 3)]  # one sequence decodes its sixth token, one reads its first three
ROUND = Machine("round", 2, {1: 1.0, 5: 3.0}, kv_byte=10.0, score=0.5, value=0.25, reduce_latency=100.0,
                reduce_byte=2.0, layer=1000.0, sequence=7.0, step=5000.0)


def test_the_counts_of_a_small_shape_by_hand():
    first, second = PLAN.ranks
    amount = attention_amount(CONFIG, first, PARTS, BF16)
    assert amount.rows == 4 and amount.weights == 10 * (2 * 4 + 2 * 4) + 2 * 4 * 10  # q, k and v; then o
    assert amount.kv_bytes == (6 + 3) * 2 * 4 * 2, "six and three keys, and as many values, of 4 numbers of 2 bytes"
    assert amount.scores == 4 * 2 * 4 * (1 * 6 + 3 * 3), "per head, query and key: 4 products and sums, twice"
    assert attention_amount(CONFIG, second, PARTS, BF16).weights == 10 * (4 + 2 * 4) + 4 * 10
    assert [mlp_amount(CONFIG, shard, PARTS).weights for shard in PLAN.ranks] == [3 * 10 * 3, 3 * 10 * 2]
    assert head_amount(CONFIG, first, 2)[:2] == (2, 10 * 4) and head_amount(CONFIG, second, 2).weights == 10 * 3
    assert amount.operations == 2 * 4 * 240 + amount.scores and amount.bytes(BF16) == 2 * 240 + amount.kv_bytes
    assert messages(CONFIG, PARTS, 2, BF16) == [4 * 10 * 2] * 5 + [2 * 16], "embedding, two layers, best tokens"
    assert kv_bytes(CONFIG, first, 3, BF16) == 3 * 2 * 2 * 1 * 4 * 2


@pytest.mark.parametrize("name", ["fable", "qwen2.5-0.5b"])
def test_the_bytes_of_the_weights_are_those_that_a_rank_holds(name):
    """Counted by the model itself: what its parameters occupy."""
    from tplab.model.decoder import TensorParallelCausalLM
    from tplab.ranks import rank

    config = shape_config(name) if name in SHAPES else open_checkpoint(name).config
    plan = ShardPlan.from_config(config, 3)

    def held():
        model = TensorParallelCausalLM(config, plan, torch.float32)  # nothing is filled, so nothing is committed
        return rank(), sum(p.numel() * p.element_size() for p in model.parameters())

    assert logical_ranks(3, held) == [
        (r, parameter_bytes(config, shard, torch.float32)) for r, shard in enumerate(plan.ranks)]


def test_a_step_by_hand_waits_for_its_slowest_rank():
    cost = step_cost(CONFIG, PLAN, [Part(5, 1)], 1, BF16, ROUND)
    assert cost.products == 2 * (240 + 90) + 40, "one row: a second per weight, of rank 0, which holds more"
    assert cost.attention == 2 * 10 * 6 * 2 * 4 * 2, "decoding: by the bytes of keys and values"
    assert cost.between == 0.25 * 2 * ((10 + 3 * 4) + (10 + 3))
    assert cost.meetings == 5 * (100 + 2 * 20) + (100 + 2 * 16) and cost.python == 5000 + 2 * 1000
    assert cost.total == sum(cost)
    read = step_cost(CONFIG, PLAN, [Part(0, 3)], 1, BF16, ROUND)
    assert read.attention == 2 * 0.5 * 4 * 2 * 4 * 9, "a prompt: by its operations"
    assert read.products == 2 * (240 + 90) * 2.0 + 40, "three rows lie half way between one and five; the head sees one"
    assert step_cost(CONFIG, PLAN, [Part(5, 1)] * 3, 3, BF16, ROUND).python == 5000 + 2 * (1000 + 2 * 7)


def test_ranks_without_a_core_take_turns():
    crowded = step_cost(CONFIG, PLAN, [Part(5, 1)], 1, BF16, Machine(**{**vars(ROUND), "places": 1}))
    apart = step_cost(CONFIG, PLAN, [Part(5, 1)], 1, BF16, ROUND)
    assert crowded.python == 5000 + 2 * apart.python - 2 * 5000
    amounts = [amount for shard in PLAN.ranks for amount in (
        *[attention_amount(CONFIG, shard, [Part(5, 1)], BF16), mlp_amount(CONFIG, shard, [Part(5, 1)])] * 2,
        head_amount(CONFIG, shard, 1))]
    assert sum(crowded[:3]) == pytest.approx(sum(a.weights + 10 * a.kv_bytes + 0.25 * a.values for a in amounts))
    assert sum(crowded[:3]) > sum(apart[:3])
    assert crowded.meetings == apart.meetings, "they are measured with all ranks"


def test_one_rank_meets_nobody():
    alone = ShardPlan.from_config(CONFIG, 1)
    cost = step_cost(CONFIG, alone, [Part(5, 1)], 1, BF16, ROUND)
    assert cost.meetings == 0 and cost.products == 2 * (10 * 32 + 150) + 70


def test_time_per_weight_between_and_beyond_what_was_measured():
    assert [ROUND.seconds_per_weight(rows) for rows in (1, 2, 5, 50)] == [1.0, 1.5, 3.0, 30.0]
    bent = Machine("bent", 2, {1: 1.0, 3: 5.0, 5: 6.0})
    assert [bent.seconds_per_weight(rows) for rows in (1, 2, 3, 4, 5)] == [1.0, 3.0, 5.0, 5.5, 6.0]


def test_requests_are_predicted_step_by_step_as_the_scheduler_deals_them():
    """Two prompts at once, then the longer answer goes on alone."""
    first, total = predict(CONFIG, PLAN, [3, 2], [1, 3], BF16, ROUND)
    assert first == step_cost(CONFIG, PLAN, [Part(0, 3), Part(0, 2)], 2, BF16, ROUND).total
    assert total == first + sum(step_cost(CONFIG, PLAN, [Part(n, 1)], 1, BF16, ROUND).total for n in (2, 3))


@pytest.mark.parametrize("parts, words", [([], "at least one token"), ([Part(0, 0)], r"not \(0, 0\)"),
                                          ([Part(-1, 1)], r"not \(-1, 1\)"), ([Part(0.5, 1)], r"not \(0.5, 1\)")])
def test_what_is_no_step(parts, words):
    with pytest.raises(CostError, match=words):
        step_cost(CONFIG, PLAN, parts, 1, BF16, ROUND)


def test_a_link_is_only_as_good_as_its_latency_and_its_bytes():
    config, costs = shape_config("llama-3.1-70b"), {}
    plan = ShardPlan.from_config(config, 8)
    for name in LINKS:
        machine = linked_machine(name, 8, BF16)
        costs[name] = step_cost(config, plan, [Part(512, 1)], 1, BF16, machine)
        assert costs[name].meetings == pytest.approx(
            162 * LINKS[name].latency + 1.75 * (161 * 8192 * 2 + 16) / LINKS[name].bytes_per_second)
    assert costs["nvlink"].total < costs["pcie"].total < costs["ethernet"].total
    assert costs["nvlink"].products == pytest.approx(69.5e9 / 8 * 2 / 3.35e12, rel=0.01), "read once, by eight"
    assert "assumed" in " ".join(link.source for link in LINKS.values())
    with pytest.raises(EngineError, match="no link 'pigeon'; there are nvlink, pcie, ethernet"):
        linked_machine("pigeon", 8, BF16)


def test_an_h100_multiplies_for_nothing_until_the_ridge():
    machine = linked_machine("pcie", 1, BF16)
    assert machine.seconds_per_weight(256) == pytest.approx(machine.seconds_per_weight(1), rel=0.01)
    assert machine.seconds_per_weight(3000) == pytest.approx(3000 * 2 / 989e12) and machine.reduce_byte == 0


def test_what_plan_says_about_speed(monkeypatch):
    monkeypatch.setattr(outlook, "measure_machine", lambda *given: ROUND)
    lines = list(outlook.speed_lines(shape_config("mistral-7b"), ShardPlan.from_config(
        shape_config("mistral-7b"), 4), BF16))
    assert lines[1].startswith("round ") and [line.split(" ")[3] for line in lines[2:5]] == list(LINKS)
    monkeypatch.setattr(outlook.psutil, "virtual_memory", lambda: SimpleNamespace(total=8e9))
    monkeypatch.setattr(outlook, "measure_machine", None)
    config = shape_config("llama-3.1-70b")
    lines = list(outlook.speed_lines(config, ShardPlan.from_config(config, 1), BF16))
    assert lines[1] == "this machine has 8.0 GB of memory, the weights need 141.1 GB"
    assert lines[2] == "1 × H100, nvlink: 141.1 GB of weights do not fit into 80.0 GB"


def test_plan_names_heads_bytes_and_speeds(tmp_path, capsys, monkeypatch):
    model = make_checkpoint(tmp_path / "model")
    monkeypatch.setattr(outlook, "measure_machine", lambda *given: ROUND)
    assert main(["plan", str(model), "--tp", "3", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "uneven: 4 query heads and 2 KV heads over 3 ranks" in out and "memory in bfloat16, with 16" in out
    assert "\nround " in out and "3 × H100, pcie" in out and max(map(len, out.splitlines()[1:])) <= 100
    assert main(["plan", "mistral-7b", "--dtype", "float16"]) == 2 and "'float16' is not one" in capsys.readouterr().err


def test_a_small_machine_is_measured(monkeypatch):
    """Every part is timed on real ranks, all of them at once; how long it took is the machine's own business."""
    for name, small in (("ROWS", (1, 4)), ("FEW", 1), ("KEYS", (16, 32)), ("WORKING_SET", 1 << 16),
                        ("MESSAGES", (64, 1 << 16))):
        monkeypatch.setattr(machine_module, name, small)
    found = machine_module.measure_machine(open_checkpoint("fable").config, 2, torch.float32)
    assert set(found.weight) == {1, 4} and all(seconds > 0 for seconds in found.weight.values())
    assert min(found.score, found.value, found.reduce_latency, found.layer) > 0
    assert min(found.kv_byte, found.reduce_byte, found.sequence, found.step) >= 0, "a difference of two times"
    assert found.places == machine_module.available_cores()

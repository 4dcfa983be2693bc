"""A machine is what was measured: every number by hand from stand-ins' times, then all of it on ranks as threads.

Notebook 10 measures on real ranks.
"""

from types import SimpleNamespace

import pytest
import torch
from helpers.pools import Threads

from tplab.bench import machine, steps
from tplab.checkpoint import open_checkpoint
from tplab.llm.llm import LLM
from tplab.ranks import logical_ranks, rank
from tplab.shard import ShardPlan

FABLE = open_checkpoint("fable").config
PLAN = ShardPlan.from_config(FABLE, 2)


@pytest.mark.parametrize("tp", [1, 3])
def test_a_machine_by_hand(tp, monkeypatch):
    """Two cores for three ranks: products on two of them, Python alone on one, meetings on all."""
    said = [{"weight": {rows: rows * times for rows in machine.ROWS}, "kv_byte": 2.0 * times,
             "kv_head": 5.0 * times, "score": 3.0 * times, "value": 4.0 * times} for times in (3, 2)]
    columns = {1: 981, 3: 362}[tp]  # 8 bytes of 40,960 + 3 * 49,152 weights; of three ranks, 20,480 + 49,152

    class Pool(Threads):
        def run(self, fn, *given):
            if fn is machine._reduce:
                return [0.25 + given[0] * (r + 1) for r in range(self.size)]  # the slowest counts
            if fn is machine._sweep:
                assert given == (columns, given[1], torch.float64)
                return [given[1] + r for r in range(self.size)]
            assert fn is machine._arithmetic
            assert given == (FABLE, ShardPlan.from_config(FABLE, min(tp, 2)), torch.float64)
            return said[:self.size]

    def python(pool, width, products, dtype):
        assert (width, dtype) == (columns, torch.float64)
        # The slowest of two ranks, one and a half times, for three share two cores; alone nobody shares.
        assert products == ({1: 1, 16: 16} if pool.size == 1 else {1: 1.5 * 2, 16: 1.5 * 17})
        return machine.Python(alone, 17.0) if pool.size == 1 else machine.Python(crowd, 5003.0)

    alone = {(1, 1): 10.0, (9, 1): 10.0 + 8 * 5, (1, 16): 20.0, (9, 16): 20.0 + 8 * 35}
    crowd = {(1, 1): 5000.0, (9, 1): 5000.0 + 8 * 4e7}
    monkeypatch.setattr(machine, "RankPool", Pool)
    monkeypatch.setattr(machine, "available_cores", lambda: 2)
    monkeypatch.setattr(machine, "_python", python)
    found = machine.measure_machine(FABLE, tp, torch.float64)
    least = 3 if tp == 1 else 2  # of two ranks that were timed alike, the one that had more to do
    assert found.weight == {rows: rows * least for rows in machine.ROWS} and found.places == 2
    assert (found.kv_byte, found.kv_head) == (2.0 * least, 5.0 * least)
    assert (found.score, found.value) == (3.0 * least, 4.0 * least) and found.repeated is None, "fable is small"
    assert (found.layer, found.sequence) == (5.0, (35 - 5) / 15) and found.name == "this machine, 2 cores"
    if tp == 1:
        assert (found.reduce_latency, found.reduce_byte, found.step, found.request) == (0.0, 0.0, 10 - 5, 17 - 10)
        alone[9, 1] = alone[9, 16] = 9.0
        quick = machine.measure_machine(FABLE, tp, torch.float64)
        assert (quick.layer, quick.sequence) == (0.0, 0.0), "more layers were quicker: somebody else was busy before"
    else:
        assert found.reduce_latency == (4e7 - 5 * 1.5) / 2, "two meetings in a layer; three ranks share two cores"
        assert found.reduce_byte == pytest.approx(3.0) and found.step == 0, "never less than nothing"
        assert found.request == 3
        crowd[9, 1] = 5000.0 + 8 * 8
        crowded = machine.measure_machine(FABLE, tp, torch.float64)
        assert crowded.reduce_latency == 0.25 + 1024 * 3, "no less than a meeting that is well attended"
        assert crowded.step == 5000 - 8
        crowd[1, 1] = 6000.0
        assert machine.measure_machine(FABLE, tp, torch.float64).request == 0


def test_a_layer_sweeps_no_more_than_a_cache_holds(monkeypatch):
    asked = []
    monkeypatch.setattr(machine, "RankPool", Threads)
    monkeypatch.setattr(machine, "SWEPT", 1 << 10)
    monkeypatch.setattr(machine, "_sweep", lambda columns, rows, dtype: asked.append(columns) or 1.0)
    monkeypatch.setattr(machine, "_arithmetic", lambda *given: {
        "weight": dict.fromkeys(machine.ROWS, 1.0), **dict.fromkeys(["kv_byte", "kv_head", "score", "value"], 1.0)})
    monkeypatch.setattr(machine, "_python", lambda *given: machine.Python(dict.fromkeys(
        [(layers, n) for layers in (1, 9) for n in (1, 16)], 1.0), 1.0))
    monkeypatch.setattr(machine, "_reduce", lambda size: 1.0)
    machine.measure_machine(FABLE, 1, torch.bfloat16)
    assert set(asked) == {1024 // (3 * 64 * 2)}


def test_work_is_timed_behind_a_barrier_again_and_again(monkeypatch):
    log, clock = [], iter([0, 4, 10, 11, 20, 22, 30, 39, 40, 45])
    monkeypatch.setattr(machine, "barrier", lambda: log.append("barrier"))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    assert machine._timed(lambda: log.append("work")) == 4, "the median of 4, 1, 2, 9 and 5"
    assert log == ["work"] + ["barrier", "work", "barrier"] * 5, "all begin together, and the slowest one counts"


@pytest.mark.parametrize("working_set, copies", [(1 << 28, 6), (2_300_000, 3), (1, 1)])
def test_products_and_attention_are_counted_per_number(working_set, copies, monkeypatch):
    """fable on two ranks: 4 query heads and one KV head of 16, 192 columns, in float64."""
    monkeypatch.setattr(machine, "WORKING_SET", working_set)
    asked, layer = [], 128 * (96 + 64 + 3 * 192)

    def timed(work, repeats=5):
        made = work()
        asked.append(made and [tuple(one.shape) for one in made])
        return 1.0

    monkeypatch.setattr(machine, "_timed", timed)
    monkeypatch.setattr(machine, "_attention", lambda config, plan, dtype, queries, keys, sequences=1: (
        (7.0 * keys + queries + 3) * sequences))
    (found, *_) = logical_ranks(2, lambda: machine._arithmetic(FABLE, PLAN, torch.float64) if rank() == 0 else None)
    assert found["weight"] == {rows: 1 / (layer * (copies if rows <= 16 else 1)) for rows in machine.ROWS}
    assert asked[1] == [(4, 96), (4, 128), (4, 384), (4, 128)] * copies and len(asked) == 6
    assert asked[-1] is None, "what lies between: see below"
    assert found["kv_byte"] == pytest.approx(7.0 / (2 * 1 * 16 * 8)), "a key and a value of 16 numbers of 8 bytes"
    assert found["kv_head"] == pytest.approx(1 + 3), "of one query, with one KV head here, beside its keys"
    assert found["score"] == pytest.approx((8.0 * 512 + 3) / (4 * 4 * 16 * 512 * 512))
    assert found["value"] == 1 / 4 / (512 * (128 + 5 * 16 + 128 + 192)), "four layers' norms, rotations, activations"


def test_what_lies_between_products_is_done_twice_or_once_a_layer(monkeypatch):
    seen = []
    monkeypatch.setattr(machine, "_timed", lambda work: work() or 8.0)
    monkeypatch.setattr(machine.RMSNorm, "forward", lambda self, x: seen.append(("norm", *x.shape)))
    monkeypatch.setattr(machine.TensorParallelAttention, "apply_rope", lambda self, q, k, cos, sin: seen.append(
        ("rope", *q.shape, *k.shape, *cos.shape, *sin.shape)))
    assert logical_ranks(1, machine._between, FABLE, ShardPlan.from_config(FABLE, 1), torch.float64, 7) == [2.0]
    norm = "norm", 7, 128
    assert seen == [norm, ("rope", 7, 8, 16, 7, 2, 16, 1, 7, 16, 1, 7, 16), norm] * 4


@pytest.mark.parametrize("queries, keys, sequences", [(1, 40, 1), (3, 16, 1), (1, 33, 2)])
@pytest.mark.parametrize("working_set, layers", [(1 << 20, 6), (3 * 2 * 2 * 48 * 16 * 8, 3), (1, 1)])
def test_attention_is_that_of_the_last_tokens_of_sequences_layer_by_layer(queries, keys, sequences, working_set, layers,
                                                                          monkeypatch):
    done = []
    monkeypatch.setattr(machine, "WORKING_SET", working_set * -(-keys // 16) * sequences // 6)
    monkeypatch.setattr(machine, "_timed", lambda work: done.append(work()) or 1.0)
    seconds = logical_ranks(2, machine._attention, FABLE, PLAN, torch.float64, queries, keys, sequences)
    assert seconds == [1 / layers] * 2 and [len(out) for out in done] == [layers] * 2
    mine = torch.arange(1, queries + 1) * 2.718281828459045 ** 4  # ones meet ones, 16 of them; the cache holds zeros
    for out in (out for layers in done for out in layers):
        found = out.flatten().reshape(sequences, queries, -1)[..., 0].tolist()
        assert found == [pytest.approx((mine / (mine + keys - queries)).tolist())] * sequences


def test_a_message_has_so_many_bytes_and_python_is_timed_on_models_of_one_and_nine_layers(monkeypatch):
    sent, asked = [], []
    monkeypatch.setattr(machine, "all_reduce", lambda tensor: sent.append(tensor.nbytes) or True)
    monkeypatch.setattr(machine, "_timed", lambda work, repeats: 8.0 * repeats if work() else 20)
    assert machine._reduce(4096) == (80 - 20) / 20 and sent == [4096] * 20, "less the two barriers around all of them"

    class Engine:
        def __init__(self, folder, size, dtype, pool, enable_prefix_caching):
            assert (size, dtype, pool.size, enable_prefix_caching) == (3, "float32", 3, False)
            self.layers = (config := open_checkpoint(folder).config).num_layers
            assert config.intermediate_size == 3 * 11, "so many columns on each rank"

        __enter__, __exit__ = Threads.__enter__, Threads.__exit__

    def seconds(llm, sequences, context):
        asked.append((llm.layers, sequences, context))
        return 100 * llm.layers + sequences + 0.5 * len(asked)

    def answered(llm, length):
        answers.append((llm.layers, length))
        return 7000.0 + len(answers)

    answers = []
    monkeypatch.setattr(machine, "LLM", Engine)
    monkeypatch.setattr(machine, "decode_seconds", seconds)
    monkeypatch.setattr(machine, "prompt_seconds", answered)
    assert machine._python(SimpleNamespace(size=3), 11, {1: 0.25, 16: 4.0}, "float32") == ({
        (1, 1): 101.5 - 0.25, (1, 16): 116 + 2.5 - 4, (9, 1): 901 + 4.5 - 9 * 0.25, (9, 16): 916 + 6.5 - 9 * 4.0},
        7001 - 0.25), "the best of four, and without the products of so many layers"
    assert set(asked) == {(layers, sequences, 32) for layers in (1, 9) for sequences in (1, 16)}
    assert answers == [(1, 1)] * 4


def test_a_sweep_is_the_products_of_one_layer_of_as_many_as_the_larger_model_has(monkeypatch):
    monkeypatch.setattr(machine, "_timed", lambda work: asked.append([tuple(y.shape) for y in work()]) or 18.0)
    asked = []
    assert machine._sweep(5, 3, torch.float32) == 2.0 and asked == [[(3, 10), (3, 64)] * 9]


def test_a_small_machine_is_measured(monkeypatch):
    """Every part is timed, on all ranks at once; how long it took is the machine's own business."""
    for name, small in (("ROWS", (1, 4)), ("FEW", 1), ("KEYS", (16, 32)), ("WORKING_SET", 1 << 16),
                        ("MESSAGES", (64, 1 << 16)), ("RankPool", Threads),
                        ("LLM", lambda folder, size, dtype, pool, **options: LLM(folder, size, dtype, logical=True))):
        monkeypatch.setattr(machine, name, small)
    monkeypatch.setattr(steps, "TOKENS", 3)
    found = machine.measure_machine(FABLE, 2, torch.float32)
    assert set(found.weight) == {1, 4} and all(seconds > 0 for seconds in found.weight.values())
    assert min(found.score, found.value, found.reduce_latency) > 0
    differences = found.kv_byte, found.reduce_byte, found.layer, found.sequence, found.step
    assert min(differences) >= 0, "what others disturb may come out as nothing, never as less"
    assert found.places == machine.available_cores()

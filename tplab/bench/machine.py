"""What a machine can do, in the units in which :mod:`tplab.bench.cost` counts: measured here in some seconds.

All ranks work at the same time, as they do in a step, so what they share (memory, caches, the processor's clock) is
shared in the measurement too. The engine's own functions are timed: its product, its attention, its all-reduce, and
the whole engine on a model so small that nothing but Python is left. Python takes twice as long where weights have just
swept it out of the processor's caches, so that model's weights sweep them too, and their own time is taken off.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

from tplab.bench.amounts import Part, attention_amount, mlp_amount
from tplab.bench.steps import decode_seconds, prompt_seconds
from tplab.cache import PagedKVCache, Segment
from tplab.checkpoint.random_weights import write_random
from tplab.llm.llm import LLM
from tplab.model.attention import TensorParallelAttention
from tplab.model.mlp import TensorParallelMLP
from tplab.model.norm import RMSNorm
from tplab.pool import RankPool, available_cores
from tplab.ranks import all_reduce, barrier, rank
from tplab.shard import ShardPlan

ROWS = (1, 4, 16, 64, 512)  # of the products that are timed
FEW = 16  # up to so many rows, reading the weights is what a product costs, so all of them are read
WORKING_SET = 1 << 28  # bytes of weights, or of keys and values, per rank, at most: beyond a cache of its own
WIDEST = 4096  # of a wider matrix, so many rows and columns are timed
KEYS = (64, 1088)  # of the sequences that one query each attends to
BLOCK = 16
MESSAGES, IN_A_ROW = (1 << 10, 1 << 20), 20  # bytes of the all-reduces that are timed, and how many are at once
LAYERS, SEQUENCES = (1, 9), (1, 16)  # of the models of which only Python is left, and how many decode in them
FEW_LAYERS = 2  # of the model whose steps are repeated
CONTEXT = 32  # behind prompts of so many tokens
SWEPT = 1 << 22  # bytes of a layer's weights on one rank that sweep the caches, at most: twice a second-level cache
TINY = dict(model_type="qwen2", hidden_size=64, num_attention_heads=8, num_key_value_heads=8, vocab_size=64,
            tie_word_embeddings=True, max_position_embeddings=128)
WIDE = 256  # numbers of a hidden state, for each rank, and at least as many columns of its MLP: large enough


class Repeated(NamedTuple):
    """Seconds of a step that is repeated from a graph, beside what is counted.

    Attributes:
        step: of Python, per step.
        sequence: of Python, per step and further sequence.
        latency: of an all-reduce: ranks that repeat arrive together.
    """

    step: float
    sequence: float
    latency: float


@dataclass(frozen=True)
class Machine:
    """Seconds that one rank takes per unit of work while all of them work.

    Attributes:
        name: for a table.
        places: how many ranks can work at the same time; more take turns.
        weight: ``{rows: seconds per number}`` of a product's weight, from one row up.
        kv_byte: per byte of keys and values that a single query reads.
        kv_head: of a single query, per KV head, beside that.
        score: per operation of attention where many queries meet many keys.
        value: per number that passes through norms, rotations, activations and residual additions.
        reduce_latency, reduce_byte: of an all-reduce: whatever its size, and per byte of its message.
        layer, sequence: of Python: per layer, and per layer and further sequence.
        step: of Python, per step: scheduling, sending, sampling, answering.
        request: of Python, per request: from the call to its first step, and from its last to the answer.
        repeated: of steps in which all sequences decode, if they are repeated.
    """

    name: str
    places: int
    weight: dict[int, float]
    kv_byte: float = 0.0
    kv_head: float = 0.0
    score: float = 0.0
    value: float = 0.0
    reduce_latency: float = 0.0
    reduce_byte: float = 0.0
    layer: float = 0.0
    sequence: float = 0.0
    step: float = 0.0
    request: float = 0.0
    repeated: Repeated | None = None

    def seconds_per_weight(self, rows: int) -> float:
        """In a product of ``rows`` rows: on straight lines between the entries, in proportion beyond the last."""
        known = sorted(self.weight)
        if rows >= known[-1]:
            return self.weight[known[-1]] * rows / known[-1]
        low = max(n for n in known if n <= rows)
        high = min(n for n in known if n > rows)
        return self.weight[low] + (self.weight[high] - self.weight[low]) * (rows - low) / (high - low)


def measure_machine(config, tp: int, dtype: torch.dtype) -> Machine:
    """This machine as ``tp`` ranks find it, with the sizes of a model (a :class:`tplab.checkpoint.ModelConfig`).

    Products and attention are timed on no more ranks than there are cores: more would take turns, and how that
    adds up is the model's business. Meetings are timed on all of them, for a meeting includes waking who waits.
    """
    cores = available_cores()
    plan, whole = (ShardPlan.from_config(config, size) for size in (min(tp, cores), tp))
    swept = min(SWEPT, max(_layer_bytes(config, shard, dtype) for shard in whole.ranks))
    columns, turns = max(1, swept // (3 * TINY["hidden_size"] * dtype.itemsize)), max(1, tp / cores)
    with RankPool(plan.tensor_parallel_size, timeout=120) as pool:
        seen = pool.run(_arithmetic, config, plan, dtype)
        together = {n: turns * max(pool.run(_sweep, columns, n, dtype)) for n in SEQUENCES}
    with RankPool(1, timeout=120) as alone, RankPool(tp, timeout=120) as pool:
        python = _python(alone, columns, {n: max(alone.run(_sweep, columns, n, dtype)) for n in SEQUENCES}, dtype)
        meetings = _python(pool, columns, together, dtype) if tp > 1 else python
        small, large = (max(pool.run(_reduce, size)) for size in MESSAGES)
    low, high = LAYERS
    # A difference of two times that others disturb may come out negative; a cost may not.
    layer, crowd = (max(0.0, python.step[high, n] - python.step[low, n]) / (high - low) for n in SEQUENCES)
    met = (meetings.step[high, 1] - meetings.step[low, 1]) / (high - low)
    return Machine(
        f"this machine, {cores} core{'s' * (cores > 1)}", cores,
        # All ranks were timed until the last one was done: that is the time of whoever had most to do.
        {rows: min(one["weight"][rows] for one in seen) for rows in ROWS},
        **{name: min(one[name] for one in seen) for name in ("kv_byte", "kv_head", "score", "value")},
        # Ranks that have computed do not arrive together: what a meeting costs shows between layers.
        reduce_latency=max(small, (met - layer * turns) / 2) if tp > 1 else 0.0,
        reduce_byte=max(0.0, large - small) / (MESSAGES[1] - MESSAGES[0]) if tp > 1 else 0.0,
        layer=layer, sequence=max(0.0, crowd - layer) / (SEQUENCES[1] - SEQUENCES[0]),
        step=max(0.0, meetings.step[low, 1] - met), request=max(0.0, meetings.answer - meetings.step[low, 1]))


def _layer_bytes(config, shard, dtype: torch.dtype) -> int:
    one = [Part(0, 1)]
    return dtype.itemsize * (attention_amount(config, shard, one, dtype).weights
                             + mlp_amount(config, shard, 1).weights)


def _timed(work: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds until ``work`` is done on all ranks, which begin together: cores that are alike differ in speed
    from one moment to the next, and each phase of a step waits for whoever is slower this time.
    """
    work()
    times = []
    for _ in range(repeats):
        barrier()
        begin = time.perf_counter()
        work()
        barrier()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


@torch.inference_mode()
def _arithmetic(config, plan: ShardPlan, dtype: torch.dtype) -> dict:
    """On a rank: products of this model's shapes, attention of its heads, and what lies between them."""
    shard, hidden = plan.ranks[rank()], min(config.hidden_size, WIDEST)
    q, kv, d, columns = len(shard.q_heads), len(shard.kv_heads), config.head_dim, min(len(shard.mlp), WIDEST)
    shapes = [(min((q + 2 * kv) * d, WIDEST), hidden), (hidden, min(q * d, WIDEST)), (2 * columns, hidden),
              (hidden, columns)]
    layer_bytes = sum(out * inputs for out, inputs in shapes) * dtype.itemsize
    copies = max(1, min(config.num_layers, WORKING_SET // layer_bytes))
    weights = [_packed(*shape, dtype) for _ in range(copies) for shape in shapes]
    found: dict = {"weight": {}}
    for rows in ROWS:
        some = weights if rows <= FEW else weights[:len(shapes)]
        found["weight"][rows] = _products(some, rows, dtype) / sum(weight.numel() for weight in some)
    del weights, some
    few, many = (_attention(config, plan, dtype, 1, keys, SEQUENCES[1]) / SEQUENCES[1] for keys in KEYS)
    key = 2 * kv * d * dtype.itemsize  # bytes of a key and a value
    found["kv_byte"] = max(0.0, many - few) / ((KEYS[1] - KEYS[0]) * key)
    found["kv_head"] = max(0.0, few - found["kv_byte"] * KEYS[0] * key) / kv
    found["score"] = _attention(config, plan, dtype, 512, 512) / (4 * q * d * 512 * 512)
    passed = attention_amount(config, shard, [Part(0, 512)], dtype), mlp_amount(config, shard, 512)
    found["value"] = _between(config, plan, dtype, 512) / sum(amount.values for amount in passed)
    return found


def _products(weights: list[torch.Tensor], rows: int, dtype: torch.dtype) -> float:
    """Seconds of a product of so many rows with each weight; without Python, where steps are repeated without it."""
    x = {weight.shape[1]: torch.ones(rows, weight.shape[1], dtype=dtype) for weight in weights}
    return _timed(lambda: [F.linear(x[weight.shape[1]], weight) for weight in weights])


def _packed(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((out_features, in_features), 0.01, dtype=dtype)


def _attention(config, plan: ShardPlan, dtype: torch.dtype, queries: int, keys: int, sequences: int = 1) -> float:
    """Seconds of one layer's attention, projections apart: the last ``queries`` tokens of sequences of ``keys``; of as
    many layers as a step has, for another one's keys and values are not in the processor's caches any more.
    """
    shard, blocks = plan.ranks[rank()], -(-keys // BLOCK)
    layer_bytes = 2 * sequences * blocks * BLOCK * len(shard.kv_heads) * config.head_dim * dtype.itemsize
    layers = max(1, min(config.num_layers, WORKING_SET // layer_bytes))
    cache = PagedKVCache(layers, sequences * blocks, BLOCK, len(shard.kv_heads), config.head_dim, dtype)
    context = cache.context([Segment(keys - queries, queries, range(n * blocks, (n + 1) * blocks), keys)
                             for n in range(sequences)])
    q, k = (torch.ones(sequences * queries, len(heads), config.head_dim, dtype=dtype)
            for heads in (shard.q_heads, shard.kv_heads))
    attentions = [TensorParallelAttention(config, plan, layer, dtype) for layer in range(layers)]

    def attend() -> list[torch.Tensor]:
        return [one.attend_all(q, k, k, context) for one in attentions]

    return _timed(attend) / layers


def _between(config, plan: ShardPlan, dtype: torch.dtype, rows: int) -> float:
    """Seconds of what one layer computes beside products and attention: norms, rotation, activation, additions."""
    attention, mlp = TensorParallelAttention(config, plan, 0, dtype), TensorParallelMLP(config, plan, 0, dtype)
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
    norm.weight.fill_(1)
    q, k = attention.qkv_proj.num_heads, attention.qkv_proj.num_kv_heads
    sets = [[torch.ones(rows, *size, dtype=dtype) for size in (
        (config.hidden_size,), (q, config.head_dim), (k, config.head_dim), (len(mlp.gate_up_proj.weight),))]
        for _ in range(4)]  # more than stays in a cache, as behind real products
    turns = torch.ones(1, rows, config.head_dim, dtype=dtype)

    def layers() -> None:
        for x, q, k, gate_up in sets:
            norm(x), attention.apply_rope(q, k, turns, turns), x + x
            norm(x), mlp.act(gate_up), x + x

    return _timed(layers) / len(sets)


class Python(NamedTuple):
    """What Python takes, products apart: seconds per step, ``{(layers, sequences): ...}``, and until a request of one
    step on the least layers has its answer.
    """

    step: dict[tuple[int, int], float]
    answer: float


def _python(pool: RankPool, columns: int, products: dict[int, float], dtype: torch.dtype) -> Python:
    """Of models with so many MLP columns on each rank, whose products take ``{sequences: seconds per layer}``."""
    step, answer = {}, 0.0
    with tempfile.TemporaryDirectory(prefix="tplab-bench-") as folder:
        for layers in LAYERS:
            tiny = write_random(Path(folder, str(layers)), num_hidden_layers=layers,
                                intermediate_size=columns * pool.size, **TINY)
            with LLM(str(tiny), pool.size, dtype, pool=pool, enable_prefix_caching=False) as llm:
                for n in SEQUENCES:
                    taken = min(decode_seconds(llm, n, CONTEXT) for _ in range(4))
                    step[layers, n] = taken - layers * products[n]
                if layers == LAYERS[0]:
                    answer = min(prompt_seconds(llm, 1) for _ in range(4)) - layers * products[1]
    return Python(step, answer)


@torch.inference_mode()
def _sweep(columns: int, rows: int, dtype: torch.dtype, hidden: int = TINY["hidden_size"],
           layers: int = LAYERS[-1]) -> float:
    """On a rank: seconds of the products with one layer's MLP, of which there are ``layers``: as many as in the model.
    """
    weights = [_packed(*shape, dtype) for _ in range(layers) for shape in ((2 * columns, hidden), (hidden, columns))]
    return _products(weights, rows, dtype) / layers


def _reduce(size: int) -> float:
    """On a rank: median seconds of an all-reduce of ``size`` bytes, of many that follow each other, as in a step."""
    t = torch.zeros(size // 4)
    return (_timed(lambda: [all_reduce(t) for _ in range(IN_A_ROW)], 10) - _timed(lambda: None, 10)) / IN_A_ROW

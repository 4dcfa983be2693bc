"""What a machine can do, in the units in which :mod:`tplab.bench.cost` counts: measured here in some seconds.

All ranks work at the same time, as they do in a step, so what they share (memory, caches, the processor's clock) is
shared in the measurement too. The engine's own functions are timed: its product, its attention, its all-reduce, and
the whole engine on a model so small that nothing but Python is left.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from tplab.bench.steps import decode_seconds
from tplab.cache import PagedKVCache, Segment
from tplab.checkpoint.random_weights import write_random
from tplab.llm.llm import LLM
from tplab.model.attention import TensorParallelAttention
from tplab.pool import RankPool, available_cores
from tplab.product import empty_weight, linear, pack
from tplab.ranks import all_reduce, barrier, rank
from tplab.shard import ShardPlan

ROWS = (1, 4, 16, 64, 512)  # of the products that are timed
FEW = 16  # up to so many rows, reading the weights is what a product costs, so all of them are read
WORKING_SET = 1 << 28  # bytes of weights per rank, at most: beyond a cache that a rank has to itself
WIDEST = 4096  # of a wider matrix, so many rows and columns are timed
KEYS = (16, 2064)  # of the sequences that one query attends to
BLOCK = 16
MESSAGES = (1 << 10, 1 << 20)  # bytes of the all-reduces that are timed
LAYERS, SEQUENCES = (1, 9), (1, 16)  # of the models of which only Python is left, and how many decode in them
TINY = dict(model_type="qwen2", hidden_size=64, intermediate_size=64, num_attention_heads=8, num_key_value_heads=8,
            vocab_size=64, tie_word_embeddings=True, max_position_embeddings=128)


@dataclass(frozen=True)
class Machine:
    """Seconds that one rank takes per unit of work while all of them work.

    Attributes:
        name: for a table.
        places: how many ranks can work at the same time; more take turns.
        weight: ``{rows: seconds per number}`` of a product's weight.
        kv_byte: per byte of keys and values that a single query reads.
        score: per operation of attention where many queries meet many keys.
        value: per number that passes through norms, rotations, activations and residual additions.
        reduce_latency, reduce_byte: of an all-reduce: whatever its size, and per byte of its message.
        layer, sequence: of Python: per layer, and per layer and further sequence.
        step: of Python, per step: scheduling, sending, sampling, answering.
    """

    name: str
    places: int
    weight: dict[int, float]
    kv_byte: float = 0.0
    score: float = 0.0
    value: float = 0.0
    reduce_latency: float = 0.0
    reduce_byte: float = 0.0
    layer: float = 0.0
    sequence: float = 0.0
    step: float = 0.0

    def seconds_per_weight(self, rows: int) -> float:
        """In a product of ``rows`` rows: on straight lines between the entries, in proportion beyond the last."""
        known = sorted(self.weight)
        if rows >= known[-1]:
            return self.weight[known[-1]] * rows / known[-1]
        low = max([n for n in known if n <= rows], default=known[0])
        high = min(n for n in known if n > rows)
        return self.weight[low] + (self.weight[high] - self.weight[low]) * max(0, rows - low) / (high - low)


def measure_machine(config, tp: int, dtype: torch.dtype) -> Machine:
    """This machine as ``tp`` ranks find it, with the sizes of a model (a :class:`tplab.checkpoint.ModelConfig`).

    Products and attention are timed on no more ranks than there are cores: more would take turns, and how that
    adds up is the model's business. Meetings are timed on all of them, for a meeting includes waking who waits.
    """
    cores = available_cores()
    plan = ShardPlan.from_config(config, min(tp, cores))
    with RankPool(plan.tensor_parallel_size, timeout=120) as pool:
        seen = pool.run(_arithmetic, config, plan, dtype)
    with RankPool(1, timeout=120) as alone, RankPool(tp, timeout=120) as pool:
        python = _python(alone, dtype)
        meetings = _python(pool, dtype) if tp > 1 else python
        small, large = (max(pool.run(_reduce, size)) for size in MESSAGES)
    low, high = LAYERS
    layer, crowd = ((python[high, n] - python[low, n]) / (high - low) for n in SEQUENCES)
    met = (meetings[high, 1] - meetings[low, 1]) / (high - low)
    return Machine(
        f"this machine, {cores} core{'s' * (cores > 1)}", cores,
        {rows: statistics.median(one["weight"][rows] for one in seen) for rows in ROWS},
        **{name: statistics.median(one[name] for one in seen) for name in ("kv_byte", "score", "value")},
        # Ranks that have computed do not arrive together: what a meeting costs shows between layers.
        reduce_latency=max(small, (met - layer * max(1, tp / cores)) / 2) if tp > 1 else 0.0,
        reduce_byte=max(0.0, large - small) / (MESSAGES[1] - MESSAGES[0]) if tp > 1 else 0.0,
        layer=layer, sequence=max(0.0, crowd - layer) / (SEQUENCES[1] - SEQUENCES[0]),
        step=max(0.0, meetings[low, 1] - met))


def _timed(work: Callable[[], object], repeats: int = 5) -> float:
    """Median seconds of ``work`` on this rank, all ranks beginning together."""
    work()
    times = []
    for _ in range(repeats):
        barrier()
        begin = time.perf_counter()
        work()
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
        x = {weight.shape[1]: torch.ones(rows, weight.shape[1], dtype=dtype) for weight in some}
        seconds = _timed(lambda some=some, x=x: [linear(x[weight.shape[1]], weight) for weight in some])
        found["weight"][rows] = seconds / sum(weight.numel() for weight in some)
    few, many = (_attention(config, plan, dtype, 1, keys) for keys in KEYS)
    found["kv_byte"] = max(0.0, many - few) / ((KEYS[1] - KEYS[0]) * 2 * kv * d * dtype.itemsize)
    found["score"] = _attention(config, plan, dtype, 512, 512) / (4 * q * d * 512 * 512)
    x, gate, weight = torch.ones(512, hidden, dtype=dtype), torch.ones(512, columns, dtype=dtype), torch.ones(hidden)
    found["value"] = _timed(lambda: (F.rms_norm(x.float(), weight.shape, weight).to(dtype).add_(x),
                                     F.silu(gate).mul_(gate))) / (512 * (hidden + columns))
    return found


def _packed(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    weight = nn.Parameter(empty_weight(out_features, in_features, dtype).fill_(0.01), requires_grad=False)
    pack(weight)
    return weight


def _attention(config, plan: ShardPlan, dtype: torch.dtype, queries: int, keys: int) -> float:
    """Seconds of one layer's attention, projections apart: the last ``queries`` tokens of a sequence of ``keys``."""
    attention, shard = TensorParallelAttention(config, plan, 0, dtype), plan.ranks[rank()]
    cache = PagedKVCache(1, -(-keys // BLOCK), BLOCK, len(shard.kv_heads), config.head_dim, dtype)
    context = cache.context([Segment(keys - queries, queries, range(-(-keys // BLOCK)), keys)])
    q, k = (torch.ones(queries, len(heads), config.head_dim, dtype=dtype) for heads in (shard.q_heads, shard.kv_heads))
    return _timed(lambda: attention.attend_all(q, k, k, context))


def _python(pool: RankPool, dtype: torch.dtype) -> dict[tuple[int, int], float]:
    """``{(layers, sequences): seconds per step}`` of models in which nothing but Python takes time."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="tplab-bench-") as folder:
        for layers in LAYERS:
            tiny = write_random(Path(folder, str(layers)), num_hidden_layers=layers, **TINY)
            with LLM(str(tiny), pool.size, dtype, pool=pool, enable_prefix_caching=False) as llm:
                for sequences in SEQUENCES:
                    found[layers, sequences] = min(decode_seconds(llm, sequences, 3) for _ in range(4))
    return found


def _reduce(size: int) -> float:
    """On a rank: median seconds of an all-reduce of ``size`` bytes."""
    t = torch.ones(size // 4)
    return _timed(lambda: all_reduce(t), 50)

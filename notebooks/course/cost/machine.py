"""What a machine can do, in the units in which :mod:`course.cost.cost` counts: measured here in some seconds.

The engine itself is timed, on models with random weights: one with layers of the given sizes, and tiny ones, which show
what a step takes beside a model's work, and what a collective takes. So whatever computes, the fast path or the
reference, is measured as it is, with all that lies between its products.
"""

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from course.cost.amounts import Part, attention_amount, mlp_amount
from course.cost.steps import CONTEXT, SEQUENCES, Kind
from course.random_weights import write_random
from tplab.checks import counted
from tplab.fast import why_not
from tplab.llm.llm import LLM
from tplab.pool import RankPool, available_cores
from tplab.ranks import all_reduce, barrier
from tplab.shard import ShardPlan

PROMPTS = 64, 512  # tokens of those that are timed
LONG = 960  # tokens before each of 4 sequences that decode, where many keys are read
WORKING_SET = 1 << 28  # bytes of a rank's weights, at most: beyond a cache of its own
WORDS = 1024  # of a vocabulary, so many are enough
REPEATS = 3
MESSAGES, IN_A_ROW = (1 << 10, 1 << 20), 20  # bytes of the all-reduces that are timed, and how many are at once
TINY = dict(model_type="qwen2", hidden_size=64, intermediate_size=64, num_attention_heads=8, num_key_value_heads=8,
            vocab_size=64)
TINY_LAYERS = (1, 33)


@dataclass(frozen=True)
class Machine:
    """Seconds that one rank takes per unit of work while all of them work.

    Attributes:
        name: for a table.
        places: how many ranks can work at the same time; more take turns.
        weight: ``{rows: seconds per number}`` of a layer's weights, from one row up, with all that is done to a row.
        kv_byte: per byte of keys and values that a single query reads.
        score: per operation of attention where many queries meet many keys.
        reduce_latency, reduce_byte: of an all-reduce: whatever its size, and per byte of its message.
        step, sequence: per step, and per step and further sequence: scheduling, sending, sampling, answering.
        request: per request that comes alone: from the call to its first step, and from its last to the answer.
    """

    name: str
    places: int
    weight: dict[int, float]
    kv_byte: float = 0.0
    score: float = 0.0
    reduce_latency: float = 0.0
    reduce_byte: float = 0.0
    step: float = 0.0
    sequence: float = 0.0
    request: float = 0.0

    def seconds_per_weight(self, rows: int) -> float:
        """In a product of ``rows`` rows: on straight lines between the entries, in proportion beyond the last."""
        known = sorted(self.weight)
        if rows >= known[-1]:
            return self.weight[known[-1]] * rows / known[-1]
        low = max(n for n in known if n <= rows)
        high = min(n for n in known if n > rows)
        return self.weight[low] + (self.weight[high] - self.weight[low]) * (rows - low) / (high - low)


FEW_KEYS, MANY_KEYS = Kind("decode", 4, CONTEXT), Kind("decode", 4, LONG)
ONE_PROMPT, SHORT_PROMPTS = Kind("prompt", 1, PROMPTS[1]), Kind("prompt", PROMPTS[1] // PROMPTS[0], PROMPTS[0])
ALONE, CROWD, FIRST = Kind("decode", 1, CONTEXT), Kind("decode", SEQUENCES, CONTEXT), Kind("prompt", 1, 1)
TIMED = {1: ALONE, 4: FEW_KEYS, 16: CROWD, 64: Kind("prompt", 1, PROMPTS[0]), 512: ONE_PROMPT}  # by their rows


def measure_machines(config, sizes: Iterable[int], dtype: torch.dtype) -> dict[int, Machine]:
    """This machine as so many ranks find it, for each of ``sizes``, with the sizes of a model (a ``ModelConfig``).

    Layers are timed on no more ranks than there are cores: more ranks would take turns, which the model of cost adds up
    itself. Collectives are timed on all ranks, because their time includes waking the ranks that wait. The layers are a
    Llama's of these sizes, on the reference for a model that the fast path does not support: a weight takes as long.
    """
    cores, in_turn = available_cores(), why_not(config, dtype) is not None
    options = {"enforce_eager": True} if config.traits else {}
    config = replace(config, experts=None)
    near = {tp: min(tp, cores) for tp in sizes}  # the ranks on which layers are timed
    engines, byte, plans, layers, seconds = {}, {1: 0.0}, {}, {}, {}
    kinds = [*TIMED.values(), MANY_KEYS, SHORT_PROMPTS]
    for size in sorted({1, *near, *near.values()}):
        with RankPool(size, timeout=120) as pool:
            engines[size] = _Engine(*(_step_seconds(pool, TINY | {"num_hidden_layers": count}, [ALONE, CROWD, FIRST],
                                                    dtype, **options) for count in TINY_LAYERS))
            if size > 1:
                small, large = (max(pool.run(reduce_seconds, count)) for count in MESSAGES)
                byte[size] = max(0.0, large - small) / (MESSAGES[1] - MESSAGES[0])
            if size in near.values():
                plans[size] = ShardPlan.from_config(config, size)
                of_layer, layers[size] = _sizes(config, plans[size], dtype)
                seconds[size] = _step_seconds(pool, of_layer | {"num_hidden_layers": layers[size]}, kinds, dtype,
                                              **options)
    # A tiny layer's compiled work is shared by the ranks; the reference's Python is paid by each, in turn.
    share = {size: max(1, size / cores) if in_turn else 1 / min(size, cores) for size in engines}
    latency = {size: max(0.0, engine.layer - engines[1].layer * share[size]) / 2 if size > 1 else 0.0
               for size, engine in engines.items()}
    return {tp: Machine(f"this machine, {counted(cores, 'core')}", cores,
                        **_per_unit(config, plans[here], dtype, layers[here], seconds[here], engines[here],
                                    (latency[here], byte[tp] if here > 1 else 0.0)),
                        reduce_latency=latency[tp], reduce_byte=byte[tp],
                        step=engines[tp].step, sequence=engines[tp].sequence, request=engines[tp].request)
            for tp, here in near.items()}


class _Engine:
    """What an engine takes beside a model's work, and a layer of almost none: steps of two tiny models.

    Other processes disturb the times, so a difference of two can be negative; a cost must not be.
    """

    def __init__(self, few: dict[Kind, float], many: dict[Kind, float]):
        self.layer = max(0.0, many[ALONE] - few[ALONE]) / (TINY_LAYERS[1] - TINY_LAYERS[0])
        self.step = few[ALONE]
        self.sequence = max(0.0, few[CROWD] - few[ALONE]) / (CROWD.sequences - 1)
        self.request = max(0.0, few[FIRST] - few[ALONE])

    def seconds(self, kind: Kind) -> float:
        """What such a step takes of it."""
        return self.step + self.sequence * (kind.sequences - 1) + self.request * (kind.what == "prompt")


def _per_unit(config, plan: ShardPlan, dtype: torch.dtype, layers: int, seconds: dict[Kind, float], engine: _Engine,
              collective: tuple[float, float]) -> dict:
    """Seconds per weight, per byte of the cache and per score, from steps of a model of ``layers`` on these ranks."""
    busiest = {kind: max((attention_amount(config, shard, kind.parts, dtype) for shard in plan.ranks),
                         key=lambda amount: amount.weights) for kind in seconds}
    work = {kind: took - engine.seconds(kind) for kind, took in seconds.items()}
    keys = busiest[MANY_KEYS].kv_bytes - busiest[FEW_KEYS].kv_bytes
    scores = busiest[ONE_PROMPT].scores - busiest[SHORT_PROMPTS].scores
    kv_byte = max(0.0, work[MANY_KEYS] - work[FEW_KEYS]) / (layers * keys)
    score = max(0.0, work[ONE_PROMPT] - work[SHORT_PROMPTS]) / (layers * scores)
    per_weight, weights = {}, layers * (busiest[FEW_KEYS].weights + max(
        mlp_amount(config, shard, 1).weights for shard in plan.ranks))
    for rows, kind in TIMED.items():
        attention = (busiest[kind].kv_bytes * kv_byte if kind.what == "decode" else busiest[kind].scores * score)
        latency, byte = collective
        met = 2 * (latency + byte * rows * config.hidden_size * dtype.itemsize)
        # Where other processes disturb, more may be subtracted than there is.
        per_weight[rows] = max(work[kind] - layers * (attention + met), seconds[kind] / 10) / weights
    return {"weight": per_weight, "kv_byte": kv_byte, "score": score}


def _sizes(config, plan: ShardPlan, dtype: torch.dtype) -> tuple[dict, int]:
    """A model with such layers and few words, as Hugging Face's fields; and as many of its layers as are timed."""
    token = [Part(0, 1)]
    layer_bytes = dtype.itemsize * max(attention_amount(config, shard, token, dtype).weights
                                       + mlp_amount(config, shard, 1).weights for shard in plan.ranks)
    return dict(model_type="llama", hidden_size=config.hidden_size, hidden_act=config.hidden_act,
                intermediate_size=config.intermediate_size, num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, vocab_size=WORDS
                ), max(1, min(config.num_layers, WORKING_SET // layer_bytes))


def _step_seconds(pool: RankPool, sizes: dict, kinds: Sequence[Kind], dtype: torch.dtype, **options
                  ) -> dict[Kind, float]:
    longest = max(kind.length for kind in kinds) + 64
    blocks = max(kind.sequences * -(-(kind.length + 64) // 16) for kind in kinds)
    with tempfile.TemporaryDirectory(prefix="tplab-bench-") as folder:
        made = write_random(Path(folder), tie_word_embeddings=True, max_position_embeddings=longest, **sizes)
        with LLM(str(made), pool.size, dtype, pool=pool, num_blocks=blocks, max_num_batched_tokens=PROMPTS[-1],
                 enable_prefix_caching=False, **options) as llm:
            return {kind: kind.seconds(llm, REPEATS) for kind in kinds}


def reduce_seconds(size: int) -> float:
    """On a rank: seconds of an all-reduce of ``size`` bytes, of many that follow each other, as in a step."""
    t, times = torch.zeros(size // 4), []
    for _ in range(10):
        barrier()
        begin = time.perf_counter()
        for _ in range(IN_A_ROW):
            all_reduce(t)
        times.append((time.perf_counter() - begin) / IN_A_ROW)
    return min(times)

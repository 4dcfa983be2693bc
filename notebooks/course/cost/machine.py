"""What a machine can do, in the units in which :mod:`course.cost.cost` counts: measured here in some seconds.

The engine itself is timed on one rank, on models with random weights: one with layers of the given sizes, and a tiny
one, which shows what a step takes beside a model's work. So whatever computes, the fast path or the reference, is
measured as it is, with all that lies between its products.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from course.cost.amounts import Part, attention_amount, mlp_amount
from course.cost.steps import CONTEXT, SEQUENCES, Kind
from course.random_weights import write_random
from tplab.llm.llm import LLM
from tplab.pool import RankPool, available_cores
from tplab.ranks import all_reduce, barrier
from tplab.shard import ShardPlan

PROMPTS = 64, 512  # tokens of those that are timed
LONG = 960  # tokens before each of 4 sequences that decode, where many keys are read
WORKING_SET = 1 << 28  # bytes of a rank's weights, at most: beyond a cache of its own
WORDS = 1024  # of a vocabulary, so many are enough
REPEATS = 3
IN_A_ROW = 20  # all-reduces that are timed at once
TINY = dict(model_type="qwen2", hidden_size=64, intermediate_size=64, num_attention_heads=8, num_key_value_heads=8,
            vocab_size=64, num_hidden_layers=1)


@dataclass(frozen=True)
class Machine:
    """Seconds that one rank takes per unit of work while all of them work.

    Attributes:
        places: how many ranks can work at the same time; more take turns.
        weight: ``{rows: seconds per number}`` of a layer's weights, from one row up, with all that is done to a row.
        kv_byte: per byte of keys and values that a single query reads.
        score: per operation of attention where many queries meet many keys.
        reduce_latency, reduce_byte: of an all-reduce: whatever its size, and per byte of its message.
        step, sequence: per step, and per step and further sequence: scheduling, sending, sampling, answering.
        request: per request that comes alone: from the call to its first step, and from its last to the answer.
    """

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


def measure_machine(config, dtype: torch.dtype) -> Machine:
    """This machine as one rank finds it, with the sizes of a model (a ``ModelConfig``); without collectives, which
    :func:`reduce_seconds` times.

    The layers are a Llama's of these sizes, on the reference for a model that the fast path does not support: a weight
    takes as long. Other processes disturb the times, so a difference of two can be negative; a cost must not be.
    """
    options = {"enforce_eager": True} if config.traits else {}
    config = replace(config, experts=None)
    plan = ShardPlan.from_config(config, 1)
    of_layer, layers = _sizes(config, plan, dtype)
    with RankPool(1, timeout=120) as pool:
        tiny = _step_seconds(pool, TINY, [ALONE, CROWD, FIRST], dtype, **options)
        seconds = _step_seconds(pool, of_layer | {"num_hidden_layers": layers}, [*TIMED.values(), MANY_KEYS,
                                                                                SHORT_PROMPTS], dtype, **options)
    step = tiny[ALONE]
    sequence = max(0.0, tiny[CROWD] - step) / (CROWD.sequences - 1)
    request = max(0.0, tiny[FIRST] - step)
    work = {kind: took - step - sequence * (kind.sequences - 1) - request * (kind.what == "prompt")
            for kind, took in seconds.items()}
    amounts = {kind: attention_amount(config, plan.ranks[0], kind.parts, dtype) for kind in seconds}
    keys = amounts[MANY_KEYS].kv_bytes - amounts[FEW_KEYS].kv_bytes
    scores = amounts[ONE_PROMPT].scores - amounts[SHORT_PROMPTS].scores
    kv_byte = max(0.0, work[MANY_KEYS] - work[FEW_KEYS]) / (layers * keys)
    score = max(0.0, work[ONE_PROMPT] - work[SHORT_PROMPTS]) / (layers * scores)
    weight, weights = {}, layers * (amounts[FEW_KEYS].weights + mlp_amount(config, plan.ranks[0], 1).weights)
    for rows, kind in TIMED.items():
        amount = amounts[kind]
        attention = amount.kv_bytes * kv_byte if kind.what == "decode" else amount.scores * score
        # Where other processes disturb, more may be subtracted than there is.
        weight[rows] = max(work[kind] - layers * attention, seconds[kind] / 10) / weights
    return Machine(available_cores(), weight, kv_byte, score, step=step, sequence=sequence, request=request)


def _sizes(config, plan: ShardPlan, dtype: torch.dtype) -> tuple[dict, int]:
    """A model with such layers and few words, as Hugging Face's fields; and as many of its layers as are timed."""
    token = [Part(0, 1)]
    layer_bytes = dtype.itemsize * (attention_amount(config, plan.ranks[0], token, dtype).weights
                                    + mlp_amount(config, plan.ranks[0], 1).weights)
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

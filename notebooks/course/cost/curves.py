"""How decoding grows: with ranks, with sequences, with context, beside what memory and arithmetic would allow."""

from dataclasses import replace

from course.cost.amounts import Part
from course.cost.cost import step_cost
from course.cost.machine import measure_machines
from course.cost.steps import TOKENS, decode_seconds
from tplab.checkpoint import Checkpoint
from tplab.checks import counted
from tplab.engine.config import longest_sequence
from tplab.llm.llm import LLM
from tplab.model.dtypes import parse_dtype
from tplab.pool import RankPool
from tplab.shard import ShardPlan

BATCHES, CONTEXTS, SHORT = (1, 4, 16, 64), (128, 512, 1024, 2048, 4096), 64


def bench_curves(ckpt: Checkpoint, model: str, tp: int, dtype: str, show) -> dict:
    """Tokens per second on 1, 2, 4, … up to ``tp`` ranks, measured, and the limit of the layers alone."""
    config, longest = ckpt.config, longest_sequence(ckpt.config)
    contexts = [n for n in CONTEXTS if n + TOKENS <= longest]
    sizes = [n for n in (1, 2, 4, 8, 16) if n < tp] + [tp]
    found: dict = {"sequences": {}, "context": {}}
    show(f"curves, {model}, {dtype}: tokens/s while decoding, and the limit: products and attention of that machine")
    machines = measure_machines(config, sizes, parse_dtype(dtype))
    for size in sizes:
        plan = ShardPlan.from_config(config, size)
        bare = replace(machines[size], reduce_latency=0.0, reduce_byte=0.0, sequence=0.0, step=0.0)
        with RankPool(size, timeout=600) as pool, LLM(
                ckpt, size, dtype, pool=pool, max_num_seqs=max(BATCHES), enable_prefix_caching=False) as llm:
            for axis, points in (("sequences", [(n, SHORT) for n in BATCHES]),
                                 ("context", [(1, context) for context in contexts])):
                line = found[axis].setdefault(size, {})
                for sequences, context in points:
                    decode_seconds(llm, sequences, context)  # warm up
                    seconds = decode_seconds(llm, sequences, context)
                    parts = [Part(context + TOKENS // 2, 1)] * sequences
                    limit = step_cost(config, plan, parts, sequences, parse_dtype(dtype), bare).total
                    line[sequences if axis == "sequences" else context] = [sequences / seconds, sequences / limit]
                    show(f"{counted(size, 'rank')}, {sequences} × {context} tokens{sequences / seconds:12.1f}"
                         f"{sequences / limit:12.1f}")
    return {"benchmark": "curves", "model": model, "dtype": dtype, **found}

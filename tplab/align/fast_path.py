"""``align_fast``: compares the fast path with the reference and with float64, on this machine.

Compiled code has no trace points, so it is compared at its ends: the residual stream that leaves the last layer, the
logits, and the keys and values in the cache. Its distance from float64 may be a small multiple of the distance of the
reference in the same dtype; both depend on the processor.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tplab.align.run import AlignError, check_prompts, pool_for
from tplab.cache import Segment, blocks_needed
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.engine.config import EngineConfig
from tplab.engine.runner import ModelRunner
from tplab.fast import make_runner, why_not
from tplab.llm.executor import LOAD_TIMEOUT
from tplab.model.dtypes import parse_dtype
from tplab.model.trace import recording
from tplab.pool import RankPool
from tplab.shard import ShardPlan

ALLOWED = 3.0  # times the reference's distance from float64
ROUNDING = {torch.float32: 2.0 ** -22, torch.bfloat16: 2.0 ** -8}  # relative; where the reference is exact by chance
BLOCK = 16


@dataclass(frozen=True)
class FastDiff:
    """One end of the fast path: distances from float64, relative to its norm; the largest of all steps and ranks."""

    point: str
    fast: float
    reference: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether the distance is allowed; NaN is not."""
        return self.fast <= self.allowed


@dataclass(frozen=True)
class FastReport:
    """What :func:`align_fast` found, point by point."""

    model: str
    tensor_parallel_size: int
    dtype: torch.dtype
    diffs: tuple[FastDiff, ...]

    @property
    def ok(self) -> bool:
        """Whether the distances of all points are allowed."""
        return all(diff.ok for diff in self.diffs)

    def __str__(self) -> str:
        lines = [f"{self.model}, {self.tensor_parallel_size} ranks, {str(self.dtype)[6:]}: relative distance from "
                 "float64", f"{'point':<10}{'fast':>10}{'reference':>12}{'allowed':>10}"]
        lines += [f"{d.point:<10}{d.fast:>10.1e}{d.reference:>12.1e}{d.allowed:>10.1e}{'' if d.ok else '   too far'}"
                  for d in self.diffs]
        return "\n".join(lines)


def align_fast(model: str | Checkpoint, prompts, *, tensor_parallel_size: int = 2,
               dtype: str | torch.dtype = "float32", pool: RankPool | None = None) -> FastReport:
    """Compare the fast path with the reference, in ``dtype``, and both with the reference in float64.

    The prompts are read together, in two chunks; their last tokens, up to eight, are fed one at a time. Arguments and
    errors are those of :func:`tplab.align.align_decode`.

    Raises:
        AlignError: the fast path does not compute this model, in this dtype, on this machine.
    """
    ckpt, dtype = open_checkpoint(model), parse_dtype(dtype)
    plan, texts = ShardPlan.from_config(ckpt.config, tensor_parallel_size), check_prompts(ckpt, prompts)
    if reason := why_not(ckpt.config, dtype):
        raise AlignError(f"the fast path does not compute {ckpt.name}: {reason}")
    shortest = min(map(len, texts))
    if shortest < 3:
        raise AlignError("each prompt needs three tokens or more: two chunks to read, and one to decode; the shortest "
                         f"has {shortest}")
    config = EngineConfig(vocab_size=ckpt.config.vocab_size, max_model_len=max(map(len, texts)), block_size=BLOCK,
                          num_blocks=sum(blocks_needed(len(text), BLOCK) for text in texts), dtype=dtype,
                          tensor_parallel_size=tensor_parallel_size)
    distances = pool_for(tensor_parallel_size, pool).run(_on_rank, ckpt, plan, config, texts, min(8, shortest - 2),
                                                         timeout=LOAD_TIMEOUT)
    diffs = []
    for name in distances[0]:
        fast, reference = (max(rank[name][way] for rank in distances) for way in (0, 1))
        allowed = max(ALLOWED * reference, ROUNDING[dtype])
        diffs.append(FastDiff(name, fast, reference, allowed))
    return FastReport(ckpt.name, tensor_parallel_size, dtype, tuple(diffs))


def _on_rank(ckpt, plan, config, texts, new_tokens) -> dict[str, tuple[float, float]]:
    """``{point: (fast, reference)}``: the largest distances of this rank."""
    fast = make_runner(ckpt, plan, config)
    if type(fast) is ModelRunner:
        raise AlignError("this rank has no fast path: something is patched")
    reference, exact = ModelRunner(ckpt, plan, config), ModelRunner(ckpt, plan, replace(config, dtype=torch.float64))
    distances: dict[str, tuple[float, float]] = {}

    def compare(name: str, ours, right, judge) -> None:
        scale = judge.double().norm().clamp(min=1e-30)
        far = [((x.double() - judge).norm() / scale).item() for x in (ours, right)]
        distances[name] = tuple(max(pair) for pair in zip(far, distances.get(name, (0.0, 0.0))))

    for ids, positions, segments, rows in _steps(texts, new_tokens):
        seen = []
        with torch.inference_mode():
            ours, _ = fast.forward(ids, positions, segments, rows)
            for runner in (reference, exact):
                with recording() as points:
                    logits, _ = runner.forward(ids, positions, segments, rows)
                seen.append((points[f"layers.{ckpt.config.num_layers - 1}.output"][rows], logits))
        compare("hidden", fast.fast.hidden(len(rows)), seen[0][0], seen[1][0])
        compare("logits", ours, seen[0][1], seen[1][1])
    for name in ("k_cache", "v_cache"):
        compare(name, *(getattr(runner.cache, name) for runner in (fast, reference, exact)))
    return distances


def _steps(texts: Sequence[list[int]], new_tokens: int):
    """``(ids, positions, segments, last rows)`` of each step: two chunks of all prompts, then token by token."""
    tables, first = [], 0
    for text in texts:
        blocks = blocks_needed(len(text), BLOCK)
        tables.append(tuple(reversed(range(first, first + blocks))))  # in no order that reading would need
        first += blocks
    read = [len(text) - new_tokens for text in texts]
    bounds = [[max(1, length * 2 // 3) for length in read], read]
    bounds += [[length + n for length in read] for n in range(1, new_tokens + 1)]
    starts = [0] * len(texts)
    for ends in bounds:
        segments = [Segment(start, end - start, table, length) for start, end, table, length
                    in zip(starts, ends, tables, read) if end > start]
        ids = [token for text, start, end in zip(texts, starts, ends) for token in text[start:end]]
        positions = [position for start, end in zip(starts, ends) for position in range(start, end)]
        counts = torch.tensor([segment.count for segment in segments])
        yield torch.tensor(ids), torch.tensor(positions), segments, (counts.cumsum(0) - 1).tolist()
        starts = ends

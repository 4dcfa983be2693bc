"""Rounds, medians, ratios."""

import math
import random
import statistics
import time
from contextlib import ExitStack, nullcontext

from tplab.bench.loading import bench_load
from tplab.bench.memory import bandwidth
from tplab.bench.peers import HuggingFace, HuggingFaceTP, Tplab, Work
from tplab.bench.shapes import RANDOM_MODELS, random_checkpoint
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.engine.errors import EngineError
from tplab.model.dtypes import parse_dtype
from tplab.pool import RankPool
from tplab.ranks import RankError

PAUSE = 0.3  # seconds between contestants: threads that spin for a while after their work have gone to sleep
STREAMED = 1 << 28  # bytes per rank: far beyond any cache


class BenchError(EngineError):
    """There is no such benchmark, or the sizes make no sense."""


def decode_work(vocab: int, longest: int) -> Work:
    """One short prompt, many tokens."""
    return Work([_ids(32, vocab)], [64])


def prefill_work(vocab: int, longest: int) -> Work:
    """One long prompt, two tokens."""
    return Work([_ids(min(512, longest - 2), vocab)], [2])


def batch_work(vocab: int, longest: int) -> Work:
    """16 requests of mixed prompt and output length, as a server meets them."""
    draw = random.Random(16)
    lengths = [draw.choice((8, 16, 32, 64, 128)) for _ in range(16)]
    return Work([_ids(n, vocab, i) for i, n in enumerate(lengths)], [draw.choice((8, 16, 32, 64, 96)) for _ in lengths])


WORKS = {"decode": decode_work, "prefill": prefill_work, "batch": batch_work}
KINDS = (*WORKS, "load")


def _ids(count: int, vocab: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, vocab) for _ in range(count)]


def bench(kind: str, model: str = "smollm2", tp: int = 2, *, rounds: int = 5, dtype: str = "float32",
          show=print) -> dict:
    """Run one benchmark and show its table line by line; returns it as plain values, ready for JSON.

    Args:
        kind: ``"decode"`` (one sequence, time per token), ``"prefill"`` (one long prompt), ``"batch"`` (16 mixed
            requests, useful tokens per second) or ``"load"`` (bytes read, private memory).
        model: as for :class:`tplab.LLM`, or ``"random-qwen2.5-0.5b"``: that shape with random weights.
        tp: ranks of one thread each; the peers get as many threads or ranks.
        rounds: how often every contestant runs, at least 5.
    """
    if kind not in KINDS:
        raise BenchError(f"there is no benchmark {kind!r}; there are {', '.join(KINDS)}")
    if not isinstance(rounds, int) or rounds < 5:
        raise BenchError(f"a median needs at least 5 rounds, not {rounds!r}")
    with random_checkpoint(model) if model in RANDOM_MODELS else nullcontext(model) as folder:
        ckpt = open_checkpoint(folder)
        if kind == "load":
            return bench_load(ckpt, model, tp, dtype, show)
        values, limits, absent = _race(kind, ckpt, tp, rounds, dtype)
    return _table(kind, model, tp, dtype, values, limits, absent, show)


def _race(kind: str, ckpt: Checkpoint, tp: int, rounds: int, dtype: str
          ) -> tuple[dict[str, list[float]], list[float], dict[str, str]]:
    """What each contestant reached in each round, the limit in each round, and who could not take part, and why."""
    work = WORKS[kind](ckpt.config.vocab_size, ckpt.config.max_position_embeddings)
    with ExitStack() as stack:
        peers, absent = [], {}
        for make in (Tplab, HuggingFace, HuggingFaceTP):
            if make is HuggingFaceTP and (tp == 1 or kind == "batch"):
                continue
            try:
                peer = make(ckpt, tp, dtype)
                stack.callback(peer.close)
                peer.time(work)  # warm up; Hugging Face's tensor parallelism loads models that it cannot run
            except RankError as error:
                if make is Tplab:
                    raise
                absent["HF tensor parallel"] = error.summary
                continue
            peers.append(peer)
        limit = Limit(ckpt, tp, dtype) if kind == "decode" else None
        if limit:
            stack.callback(limit.close)
        values: dict[str, list[float]] = {peer.name: [] for peer in peers}
        limits: list[float] = []
        for number in range(rounds):
            for peer in peers[number % len(peers):] + peers[:number % len(peers)]:
                time.sleep(PAUSE)
                values[peer.name].append(_value(kind, work, peer.time(work)))
            if limit:
                time.sleep(PAUSE)
                limits.append(limit.measure())
    return values, limits, absent


class Limit:
    """Tokens per second if decoding did nothing but read every weight once."""

    def __init__(self, ckpt: Checkpoint, tp: int, dtype: str):
        self.pool = RankPool(tp, timeout=600)
        weights = sum(math.prod(info.shape) for name, info in ckpt.tensors.items()
                      if ckpt.config.tie_word_embeddings or "embed_tokens" not in name)
        self.bytes = weights * parse_dtype(dtype).itemsize

    def measure(self) -> float:
        """One round."""
        return bandwidth(self.pool, STREAMED) / self.bytes

    def close(self) -> None:
        """End its processes."""
        self.pool.close()


def _value(kind: str, work: Work, timing) -> float:
    """What the table shows, larger is better: tokens per second of the phase that the benchmark is about."""
    if kind == "decode":
        return (work.useful_tokens - 1) / (timing.total - timing.first)
    if kind == "prefill":
        return sum(map(len, work.prompts)) / timing.first
    return work.useful_tokens / timing.total


def _table(kind, model, tp, dtype, values, limits, absent, show) -> dict:
    ours = next(iter(values.values()))
    unit = {"decode": "tokens/s", "prefill": "prompt tokens/s", "batch": "useful tokens/s"}[kind]
    rows = []
    show(f"{kind}, {model}, {dtype}, {tp} rank{'s' * (tp > 1)}, {len(ours)} rounds")
    show(f"{'':32}{unit:>18}{'spread':>18}{'tplab is':>12}")
    for name, seen in {**values, **({"limit: weights once from memory": limits} if limits else {})}.items():
        # The ratio of each round, then the median: what disturbs a round disturbs both.
        ratio = statistics.median(a / b for a, b in zip(ours, seen))
        row = {"name": name, "median": statistics.median(seen), "low": min(seen), "high": max(seen), "ratio": ratio}
        rows.append(row)
        spread = f"{row['low']:.1f} to {row['high']:.1f}"
        show(f"{name:32}{row['median']:18.1f}{spread:>18}{ratio:>10.2f} ×")
    for name, why in absent.items():
        show(f"{name}: not possible here: {why}")
    return {"benchmark": kind, "model": model, "tp": tp, "dtype": dtype, "unit": unit, "rows": rows, "absent": absent}

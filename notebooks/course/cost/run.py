"""Rounds, medians, ratios."""

import math
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import NamedTuple

from tqdm import tqdm

from course.cost.curves import bench_curves
from course.cost.loading import bench_load
from course.cost.memory import bandwidth
from course.cost.peers import VLLM, HuggingFace, HuggingFaceTP, LlamaCpp, Tplab, Work
from course.cost.processes import PeerError, alone, private_bytes, send, signals_end_properly
from course.cost.shapes import RANDOM_MODELS, random_checkpoint
from course.cost.steps import busy_process
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checks import counted
from tplab.engine.errors import EngineError
from tplab.model.dtypes import parse_dtype
from tplab.pool import RankPool
from tplab.ranks import RankError

PAUSE = 0.3  # seconds between contestants: threads that spin for a while after their work have gone to sleep
SETTLED = 2.0  # seconds of work beside a busy process before a contestant is measured there
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


def prefix_work(vocab: int, longest: int) -> Work:
    """16 requests that begin alike and end apart, as those of one application do."""
    common = _ids(min(256, longest // 2), vocab, 99)
    return Work([common + _ids(16, vocab, i) for i in range(16)], [16] * 16)


def long_work(vocab: int, longest: int) -> Work:
    """A long prompt with an answer."""
    return Work([_ids(min(2048, longest - 32), vocab)], [32])


WORKS = {"decode": decode_work, "prefill": prefill_work, "batch": batch_work, "prefix": prefix_work, "long": long_work}
KINDS = (*WORKS, "load", "curves")
UNITS = {"decode": "tokens/s", "prefill": "prompt tokens/s", "batch": "useful tokens/s", "prefix": "useful tokens/s",
         "long": "tokens/s, prompt too"}


def _ids(count: int, vocab: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(10, vocab) for _ in range(count)]


def bench(kind: str, model: str = "smollm2", tp: int = 2, *, rounds: int = 5, dtype: str = "float32",
          vllm: str | None = None, llama_cpp: str | None = None, batch_invariant: bool = False, busy: bool = False,
          show=print) -> dict:
    """Run one benchmark and show its table line by line; returns it as plain values, ready for JSON.

    Args:
        kind: ``"decode"`` (one sequence, time per token), ``"prefill"`` (one long prompt), ``"batch"`` (16 mixed
            requests, useful tokens per second), ``"prefix"`` (16 requests that begin alike; caches are on), ``"long"``
            (2,048 tokens and an answer), ``"load"`` (bytes read, private memory) or ``"curves"`` (tplab alone: with
            more ranks, sequences and context).
        model: as for :class:`tplab.LLM`, or ``"random-qwen2.5-0.5b"``: that shape with random weights.
        tp: ranks of one thread each; the peers, and tplab on one rank, get as many threads or ranks.
        rounds: how often every contestant runs, at least 5.
        vllm, llama_cpp: the Python of an environment in which vLLM, or llama-cpp-python and gguf, are installed, to
            race against them too (llama.cpp not for ``"prefix"``: its caller has to share the prefix).
        batch_invariant: let tplab with this option take part as well.
        busy: one more process keeps a core busy, as soon as all contestants are ready.
    """
    if kind not in KINDS:
        raise BenchError(f"there is no benchmark {kind!r}; there are {', '.join(KINDS)}")
    if not isinstance(rounds, int) or rounds < 5:
        raise BenchError(f"a median needs at least 5 rounds, not {rounds!r}")
    if kind not in WORKS and (vllm or llama_cpp or batch_invariant or busy):
        raise BenchError(f"{kind} has no peers and is not disturbed; --vllm, --llama-cpp, --batch-invariant and --busy "
                         f"are for {', '.join(WORKS)}")
    if kind == "prefix" and llama_cpp:
        raise BenchError("llama.cpp does not share a prefix by itself; --llama-cpp is for "
                         f"{', '.join(other for other in WORKS if other != kind)}")
    for option, whose, python in (("--vllm", "vLLM's", vllm), ("--llama-cpp", "llama.cpp's", llama_cpp)):
        if python is not None and not os.access(python, os.X_OK):
            raise BenchError(f"{option} takes the Python of {whose} environment; {python!r} cannot be run")
    with random_checkpoint(model) if model in RANDOM_MODELS else nullcontext(model) as folder:
        ckpt = open_checkpoint(folder)
        if kind == "load":
            return bench_load(ckpt, model, tp, dtype, show)
        if kind == "curves":
            return bench_curves(ckpt, model, tp, dtype, show)
        race = _race(kind, ckpt, tp, rounds, dtype, vllm, llama_cpp, busy, batch_invariant)
    return _table(kind, model, tp, dtype, race, busy, show)


class Race(NamedTuple):
    """What came of a race, by contestant's name.

    Attributes:
        values: what each reached in each round; larger is better.
        limits: what memory would have allowed in each round, where that is known.
        ready: seconds until each could be given work.
        held: the most private bytes that its processes were seen to hold.
        equal: the part of tplab's tokens that it has at the same places in the last round.
        absent: peers that could not take part, and why.
    """

    values: dict[str, list[float]]
    limits: list[float]
    ready: dict[str, float]
    held: dict[str, int]
    equal: dict[str, float]
    absent: dict[str, str]


def _contestants(kind: str, ckpt: Checkpoint, tp: int, dtype: str, vllm: str | None, llama_cpp: str | None, work: Work,
                 batch_invariant: bool) -> Iterator[tuple[str, Callable]]:
    """``(name if it cannot come, how it is made)``."""
    prefix = kind == "prefix"
    yield "tplab", lambda: Tplab(ckpt, tp, dtype, prefix)
    if tp > 1:  # what ranks cost beside threads
        yield "tplab, 1 rank", lambda: Tplab(ckpt, 1, dtype, prefix, threads=tp)
    if batch_invariant:
        yield "tplab, batch-invariant", lambda: Tplab(ckpt, tp, dtype, prefix, batch_invariant=True)
    yield "HF generate", lambda: HuggingFace(ckpt, tp, dtype)
    if tp > 1 and kind not in ("batch", "prefix"):
        yield "HF tensor parallel", lambda: HuggingFaceTP(ckpt, tp, dtype)
    if vllm is not None:
        yield "vLLM", lambda: VLLM(ckpt, 1, dtype, prefix, python=vllm, threads=tp)
        if tp > 1 and ckpt.config.num_heads % tp == 0:  # else it refuses, after a minute
            yield f"vLLM, {tp} ranks", lambda: VLLM(ckpt, tp, dtype, prefix, python=vllm)
    if llama_cpp is not None:
        yield "llama.cpp", lambda: LlamaCpp(ckpt, tp, dtype, work, python=llama_cpp)


def _race(kind: str, ckpt: Checkpoint, tp: int, rounds: int, dtype: str, vllm: str | None, llama_cpp: str | None,
          busy: bool, batch_invariant: bool = False) -> Race:
    vocab = ckpt.config.vocab_size
    work = WORKS[kind](vocab, ckpt.config.max_position_embeddings)
    race = Race({}, [], {}, {}, {}, {})
    with signals_end_properly(), ExitStack() as stack, tqdm(bar_format="{desc}", disable=None, leave=False) as bar:
        peers, ends = [], {}  # one that drops out is ended at once, or its processes would disturb the others
        for name, make in _contestants(kind, ckpt, tp, dtype, vllm, llama_cpp, work,
                                       batch_invariant):
            bar.set_description_str(f"{name} gets ready")
            others = [pid for peer in peers for pid in peer.pids]
            send(others, signal.SIGSTOP)
            end = stack.enter_context(ExitStack())
            try:
                begin = time.perf_counter()
                peer = make()
                end.callback(peer.close)
                race.ready[peer.name] = time.perf_counter() - begin
                peer.time(work)  # warm up; Hugging Face's tensor parallelism loads models that it cannot run
            except (RankError, PeerError) as error:
                if name == "tplab":
                    raise
                race.absent[name] = _why(error)
                end.close()
                continue
            finally:
                send(others, signal.SIGCONT)
            peers.append(peer)
            ends[peer.name] = end
        limit = Limit(ckpt, tp, dtype) if kind == "decode" else None
        if limit:
            stack.callback(limit.close)
        race.values.update((peer.name, []) for peer in peers)
        if busy:  # only now: no peer gets ready beside it
            stack.enter_context(busy_process())
        for number in range(rounds):
            todo = work.shifted(1 + number, vocab) if kind == "prefix" else work
            tokens = {}
            for peer in peers[number % len(peers):] + peers[:number % len(peers)]:
                bar.set_description_str(f"round {number + 1} of {rounds}: {peer.name}")
                try:
                    timing = _measured(peer, peers, todo, work if busy else None)
                except (RankError, PeerError) as error:
                    if peer is peers[0]:
                        raise
                    race.absent[peer.name] = f"round {number + 1}: {_why(error)}"
                    peers.remove(peer)
                    ends[peer.name].close()
                    del race.values[peer.name]
                    continue
                race.values[peer.name].append(_value(kind, todo, timing))
                race.held[peer.name] = max(race.held.get(peer.name, 0), private_bytes(peer.pids))
                tokens[peer.name] = timing.tokens
            if limit:
                with alone((), [pid for peer in peers for pid in peer.pids]):
                    time.sleep(PAUSE)
                    race.limits.append(limit.measure())
        race.equal.update((name, equal_part(tokens[peers[0].name], found)) for name, found in tokens.items())
    return race


def _why(error: RankError | PeerError) -> str:
    return getattr(error, "summary", str(error))


def _measured(peer, peers, work: Work, before: Work | None):
    """One piece of work, while all other contestants stand still.

    ``before``: work that is done first, beside a busy process. The scheduler gives a process that stood still more than
    its share for a while, and that must be over before the measurement.
    """
    with alone(peer.pids, [pid for other in peers if other is not peer for pid in other.pids]):
        time.sleep(PAUSE)
        begin = time.perf_counter()
        while before is not None and time.perf_counter() - begin < SETTLED:
            peer.time(before)
        return peer.time(work)


def equal_part(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """The part of our tokens that stand at the same places in theirs."""
    pairs = [(a, b) for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other)]
    return sum(a == b for a, b in pairs) / max(1, sum(map(len, ours)))


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
    prompts = sum(map(len, work.prompts))
    if kind == "decode":
        return (work.useful_tokens - 1) / (timing.total - timing.first)
    if kind == "prefill":
        return prompts / timing.first
    return (work.useful_tokens + prompts * (kind == "long")) / timing.total


def _table(kind: str, model: str, tp: int, dtype: str, race: Race, busy: bool, show) -> dict:
    ours, rows = next(iter(race.values.values())), []
    show(f"{kind}, {model}, {dtype}, {counted(tp, 'rank')}, {len(ours)} rounds{', one busy process' * busy}")
    show(f"{'':32}{UNITS[kind]:>20}{'spread':>18}{'tplab is':>10}{'ready':>9}{'memory':>10}{'same tokens':>13}")
    limit = {"limit: weights once from memory": race.limits} if race.limits else {}
    for name, seen in {**race.values, **limit}.items():
        # The ratio of each round, then the median: what disturbs a round disturbs both.
        ratio = statistics.median(a / b for a, b in zip(ours, seen))
        row = {"name": name, "median": statistics.median(seen), "low": min(seen), "high": max(seen), "ratio": ratio}
        line = f"{name:32}{row['median']:20.1f}{row['low']:9.1f}{' to ' + format(row['high'], '.1f'):>9}{ratio:8.2f} ×"
        if name in race.values:
            row |= {"ready": race.ready[name], "bytes": race.held[name], "equal": race.equal[name]}
            line += f"{row['ready']:7.1f} s{row['bytes'] / 1e6:7.0f} MB{row['equal']:13.0%}"
        rows.append(row)
        show(line)
    for name, why in race.absent.items():
        show(f"{name}: not possible here: {why}")
    return {"benchmark": kind, "model": model, "tp": tp, "dtype": dtype, "busy": busy, "unit": UNITS[kind],
            "rows": rows, "absent": race.absent}

"""A race: tplab, Hugging Face and vLLM continue the same prompt, alternately, in one run; medians and ratios.

On a busy machine, milliseconds say little and ratios say something. So in every round all contestants work one after
the other, each in processes of its own. The others are stopped meanwhile (SIGSTOP): workers that wait for work spin,
and would take its cores.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil
import torch

from course.cost import vllm_side
from tplab.checkpoint import Checkpoint, open_checkpoint
from tplab.checks import counted
from tplab.errors import TplabError
from tplab.llm.llm import LLM
from tplab.llm.sampling_params import SamplingParams
from tplab.model.dtypes import parse_dtype
from tplab.pool import RankPool
from tplab.ranks import state

PAUSE = 0.3  # seconds between contestants: threads that spin for a while after their work have gone to sleep
PROMPT, NEW_TOKENS = 32, 64  # in tokens; the first new one belongs to the prompt


@dataclass(frozen=True)
class Timing:
    """Seconds until the first new token, and until the last one; and the new tokens."""

    first: float
    total: float
    tokens: list[int]

    @property
    def speed(self) -> float:
        """Tokens per second of decoding."""
        return (NEW_TOKENS - 1) / (self.total - self.first)


class Tplab:
    """This engine on ``tp`` ranks of one thread."""

    def __init__(self, ckpt: Checkpoint, tp: int, dtype: str):
        self.name, self.pool = f"tplab, {counted(tp, 'rank')}", RankPool(tp, timeout=600)
        self.pool.run(torch.set_num_threads, 1)
        self.llm = LLM(ckpt, tp, dtype, pool=self.pool, enable_prefix_caching=False)

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return [pid for pid in self.pool.pids if pid is not None]

    def time(self, prompt: list[int]) -> Timing:
        """Continue the prompt once."""
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        begin = time.perf_counter()
        (output,) = self.llm.generate([prompt], params, use_tqdm=False)
        total = time.perf_counter() - begin
        return Timing(output.metrics.time_to_first_token, total, list(output.outputs[0].token_ids))

    def close(self) -> None:
        """End its processes."""
        self.llm.close()
        self.pool.close()


class HuggingFace:
    """Hugging Face's ``generate`` in one process with ``threads`` threads."""

    def __init__(self, ckpt: Checkpoint, threads: int, dtype: str):
        self.name, self.pool = f"HF generate, {counted(threads, 'thread')}", RankPool(1, timeout=600)
        self.pool.run(_load_hf, str(ckpt.folder), dtype, threads)

    pids = Tplab.pids

    def time(self, prompt: list[int]) -> Timing:
        """Continue the prompt once."""
        return self.pool.run(_time_hf, prompt)[0]

    def close(self) -> None:
        """End its process."""
        self.pool.close()


def _load_hf(folder: str, dtype: str, threads: int) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    state["hf"] = AutoModelForCausalLM.from_pretrained(folder, dtype=parse_dtype(dtype)).eval()


def _time_hf(prompt: list[int]) -> Timing:
    ids, seconds = torch.tensor([prompt]), {}
    with torch.inference_mode():
        for count in (1, NEW_TOKENS):
            begin = time.perf_counter()
            made = state["hf"].generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count,
                                        do_sample=False, eos_token_id=None, pad_token_id=0)
            seconds[count] = time.perf_counter() - begin
    return Timing(seconds[1], seconds[NEW_TOKENS], made[0, len(prompt):].tolist())


class VLLM:
    """vLLM in an environment whose Python is ``python``: one process bound to ``threads`` cores.

    Unbound, vLLM on a CPU keeps one core idle; bound to both cores of a machine with two it is 1.5 times as quick.
    """

    def __init__(self, ckpt: Checkpoint, threads: int, dtype: str, python: str):
        self.name, self.printed = f"vLLM, {counted(threads, 'thread')}", tempfile.TemporaryFile()
        read, write = os.pipe()
        environment = {**os.environ, "PYTHONPATH": "", "VLLM_CPU_KVCACHE_SPACE": "1",
                       "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads)))}
        length = min(ckpt.config.max_position_embeddings, 4096)
        try:
            self.process = subprocess.Popen(
                [python, vllm_side.__file__, str(write), str(ckpt.folder), dtype, str(length)], stdin=subprocess.PIPE,
                stdout=self.printed, stderr=subprocess.STDOUT, pass_fds=[write], start_new_session=True, text=True,
                env=environment)
        except OSError as error:
            raise TplabError(f"{python} cannot be started: {error.strerror}") from error
        finally:
            os.close(write)
        self.answers, self.pids = open(read), [self.process.pid]
        try:
            self._hear()
        except BaseException:
            self.close()
            raise

    def time(self, prompt: list[int]) -> Timing:
        """Continue the prompt once; before it, its first token alone, for ``first``."""
        with suppress(BrokenPipeError):  # it has ended, and that is said below
            print(json.dumps({"prompt": prompt, "new_tokens": NEW_TOKENS}), file=self.process.stdin, flush=True)
        return Timing(**self._hear())

    def _hear(self) -> dict:
        line = self.answers.readline()
        if not line:
            self.printed.seek(0)
            printed = self.printed.read().decode(errors="replace").strip() or "it has printed nothing"
            raise TplabError(f"{self.name} has ended: {printed.splitlines()[-1][:300]}")
        return json.loads(line)

    def close(self) -> None:
        """End it and all that it has started, at once, stopped or not."""
        _send(self.pids, signal.SIGKILL)
        self.process.wait()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.answers.close()
        self.printed.close()


def _send(pids: Iterable[int], number: int) -> None:
    """A signal to these processes and all that they have started."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)


@contextmanager
def _alone(chosen, everybody) -> Iterator[None]:
    """``chosen`` may work, the others are stopped."""
    others = [pid for peer in everybody if peer is not chosen for pid in peer.pids]
    _send(others, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(others, signal.SIGCONT)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends what runs here as Ctrl-C does: else stopped contestants would stay stopped for ever."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def race(model: str = "smollm2", tp: int = 2, *, rounds: int = 5, dtype: str = "float32", vllm: str | None = None,
         show: Callable[[str], None] = print) -> list[dict]:
    """Race tplab on ``tp`` ranks against Hugging Face on as many threads, each decoding behind one short prompt; shows
    a table and returns its rows.

    Args:
        model: as for :class:`tplab.LLM`.
        rounds: how often every contestant works, at least 5; another one begins each round.
        vllm: the Python of vLLM's own environment, to race against it too, on ``tp`` cores.

    A row: ``name``, ``median``, ``low`` and ``high`` of the speeds, ``ratio`` (the median of each round's: how many
    times as quick tplab is), ``ready`` (seconds) and ``equal`` (the part of tplab's tokens at the same places).
    """
    if not isinstance(rounds, int) or rounds < 5:
        raise TplabError(f"a median needs at least 5 rounds, not {rounds!r}")
    ckpt, peers, ready = open_checkpoint(model), [], []
    draw = random.Random("decode")
    prompt = [draw.randrange(10, ckpt.config.vocab_size) for _ in range(PROMPT)]
    makers = [lambda: Tplab(ckpt, tp, dtype), lambda: HuggingFace(ckpt, tp, dtype)]
    makers += [lambda: VLLM(ckpt, tp, dtype, vllm)] if vllm is not None else []
    with _ended_by_signals(), ExitStack() as stack:
        for make in makers:
            with _alone(None, peers):
                begin = time.perf_counter()
                peers.append(make())
                ready.append(time.perf_counter() - begin)
                stack.callback(peers[-1].close)
                peers[-1].time(prompt)  # warm up
        speeds, tokens = [[] for _ in peers], {}
        for number in range(rounds):
            for at in [(number + i) % len(peers) for i in range(len(peers))]:
                with _alone(peers[at], peers):
                    time.sleep(PAUSE)
                    timing = peers[at].time(prompt)
                speeds[at].append(timing.speed)
                tokens[at] = timing.tokens
    rows = [{"name": peer.name, "median": statistics.median(speeds[at]), "low": min(speeds[at]),
             # The ratio of each round, then the median: what disturbs a round disturbs both.
             "high": max(speeds[at]), "ratio": statistics.median(a / b for a, b in zip(speeds[0], speeds[at])),
             "ready": ready[at], "equal": sum(a == b for a, b in zip(tokens[0], tokens[at])) / NEW_TOKENS}
            for at, peer in enumerate(peers)]
    show(f"decode, {model}, {dtype}, {counted(rounds, 'round')}")
    show(f"{'':26}{'tokens/s':>22}{'spread':>18}{'tplab is':>10}{'ready':>9}{'same tokens':>13}")
    for row in rows:
        show("{name:26}{median:22.1f}{low:9.1f} to {high:5.1f}{ratio:8.2f} ×{ready:7.1f} s{equal:13.0%}".format(**row))
    return rows


def add_options(parser: argparse.ArgumentParser, models: str) -> None:
    """``models``: the models' names, for the help."""
    parser.add_argument("--model", default="smollm2", metavar="MODEL", help=f"{models} (smollm2)")
    parser.add_argument("--tp", type=int, default=2, metavar="N", help="number of ranks (2)")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="5 or more (5)")
    parser.add_argument("--dtype", default="float32", help="float32, float64 or bfloat16 (float32)")
    parser.add_argument("--vllm", metavar="PYTHON", help="race against vLLM too: the Python of its own environment")


def main(chosen: argparse.Namespace) -> int:
    """Measure and show."""
    race(chosen.model, chosen.tp, rounds=chosen.rounds, dtype=chosen.dtype, vllm=chosen.vllm)
    return 0

"""The contestants. Each keeps its processes through all rounds: ``time(work)`` carries a piece of work out once."""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from course.cost import gguf_file, llama_side, vllm_side
from course.cost.processes import Child, PeerError
from tplab.checkpoint import Checkpoint
from tplab.checks import counted
from tplab.llm.llm import LLM
from tplab.llm.sampling_params import SamplingParams
from tplab.model.dtypes import parse_dtype
from tplab.pool import RankPool
from tplab.ranks import rank, state, world_size


@dataclass(frozen=True)
class Work:
    """Prompts in token ids, and how many tokens each is to get."""

    prompts: list[list[int]]
    new_tokens: list[int]

    @property
    def useful_tokens(self) -> int:
        """What was asked for, padding and overshoot apart."""
        return sum(self.new_tokens)

    def shifted(self, by: int, vocab: int) -> "Work":
        """As much work on other tokens, so that no cache has met them."""
        return Work([[10 + (token - 10 + by) % (vocab - 10) for token in prompt] for prompt in self.prompts],
                    self.new_tokens)


@dataclass(frozen=True)
class Timing:
    """Seconds until the first step was done (all prompts read, one token each), and until everything was; and the
    new tokens of each prompt.
    """

    first: float
    total: float
    tokens: list[list[int]] | None = None


def _ranks(count: int, threads: int) -> str:
    return counted(count, "rank") + f" of {threads} threads" * (threads > 1)


class Tplab:
    """This engine on ``tp`` ranks of so many threads."""

    def __init__(self, ckpt: Checkpoint, tp: int, dtype: str, prefix: bool = False, *, threads: int = 1,
                 batch_invariant: bool = False):
        self.name = f"tplab, {_ranks(tp, threads)}" + ", batch-invariant" * batch_invariant
        self.pool = RankPool(tp, timeout=600)
        self.pool.run(torch.set_num_threads, threads)  # a pool deals out all cores but one
        self.llm = LLM(ckpt, tp, dtype, pool=self.pool, enable_prefix_caching=prefix, batch_invariant=batch_invariant)

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return _living(self.pool)

    def time(self, work: Work) -> Timing:
        """Carry ``work`` out once."""
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in work.new_tokens]
        begin = time.perf_counter()
        outputs = self.llm.generate(work.prompts, params, use_tqdm=False)
        total = time.perf_counter() - begin
        return Timing(max(output.metrics.time_to_first_token for output in outputs), total,
                      [list(output.outputs[0].token_ids) for output in outputs])

    def close(self) -> None:
        """End its processes."""
        self.llm.close()
        self.pool.close()


class _HuggingFacePeer:
    """Hugging Face's ``generate`` on the ranks of a pool, of which each loads with ``load(folder, *arguments)``."""

    def __init__(self, name: str, ranks: int, load: Callable, ckpt: Checkpoint, *arguments):
        self.name = name
        self.pool = RankPool(ranks, timeout=600)
        self.pool.run(load, str(ckpt.folder), *arguments)

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return _living(self.pool)

    def time(self, work: Work) -> Timing:
        """Carry ``work`` out once."""
        return self.pool.run(_time_hf, work)[0]

    def close(self) -> None:
        """End its processes."""
        self.pool.close()


class HuggingFace(_HuggingFacePeer):
    """One process with ``threads`` threads; several prompts as one padded batch."""

    def __init__(self, ckpt: Checkpoint, threads: int, dtype: str):
        super().__init__(f"HF generate, {counted(threads, 'thread')}", 1, _load_hf, ckpt, dtype, threads)


class HuggingFaceTP(_HuggingFacePeer):
    """Hugging Face's own tensor parallelism on ``tp`` processes of one thread, over gloo."""

    def __init__(self, ckpt: Checkpoint, tp: int, dtype: str):
        super().__init__(f"HF tensor parallel, {tp} ranks", tp, load_hf_tp, ckpt, dtype)


class _Elsewhere:
    """A contestant in an environment of its own, which answers lines with lines; ``child`` is ready when it speaks."""

    def __init__(self, name: str, child: Child):
        self.name, self.child = name, child
        try:
            self.version = child.hear(timeout=600)["ready"]
        except BaseException:
            child.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Its processes."""
        return [self.child.pid]

    def time(self, work: Work) -> Timing:
        """Carry ``work`` out once."""
        return Timing(**self.child.ask(self.question(work), timeout=600))

    def question(self, work: Work) -> dict:
        """What it is asked."""
        return {"prompts": work.prompts, "new_tokens": work.new_tokens}

    def close(self) -> None:
        """End its processes."""
        self.child.close()


class VLLM(_Elsewhere):
    """vLLM, in an environment whose Python is ``python``: ``tp`` ranks of one thread, or one of as many.

    It gets the machine's cores as :class:`Tplab` does, one for each rank or thread.
    """

    def __init__(self, ckpt: Checkpoint, tp: int, dtype: str, prefix: bool = False, *, python: str, threads: int = 1):
        cores = [str(core) for core in range(tp * threads)]
        bind = "|".join(",".join(cores[rank * threads:(rank + 1) * threads]) for rank in range(tp))
        length = min(ckpt.config.max_position_embeddings, 4096)
        super().__init__(f"vLLM, {_ranks(tp, threads)}", Child(
            python, vllm_side.__file__, str(ckpt.folder), str(tp), dtype, str(length), str(int(prefix)),
            env={"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bind, "PYTHONPATH": ""}))

    def question(self, work: Work) -> dict:
        """Before it, where one prompt stands alone, its first token alone, for ``first``."""
        return super().question(work) | {"first": len(work.prompts) == 1}


class LlamaCpp(_Elsewhere):
    """llama.cpp on so many threads, in an environment whose Python is ``python``, with the checkpoint as GGUF.

    It has room for ``work``.
    """

    def __init__(self, ckpt: Checkpoint, threads: int, dtype: str, work: Work, *, python: str):
        tokens = sum(map(len, work.prompts)) + work.useful_tokens
        with tempfile.TemporaryDirectory() as place:
            file = os.path.join(place, "model.gguf")
            written = subprocess.run([python, gguf_file.__file__, str(ckpt.folder), file, dtype], text=True,
                                     capture_output=True, env={**os.environ, "PYTHONPATH": ""})
            if written.returncode:
                said = written.stderr.splitlines() or ["nothing is said"]
                raise PeerError(f"no GGUF of the checkpoint: {said[-1]}")
            super().__init__(f"llama.cpp, {counted(threads, 'thread')}", Child(
                python, llama_side.__file__, file, dtype, str(tokens), str(len(work.prompts)), str(threads),
                env={"PYTHONPATH": ""}))


def _living(pool: RankPool) -> list[int]:
    return [pid for pid in pool.pids if pid is not None]


def _load_hf(folder: str, dtype: str, threads: int) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    state["hf"] = AutoModelForCausalLM.from_pretrained(folder, dtype=parse_dtype(dtype)).eval()


def load_hf_tp(folder: str, dtype: str) -> None:
    """The ranks of a pool are in a gloo group already; Hugging Face asks the environment which of them this is."""
    from unittest import mock

    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    prepare = PreTrainedModel.prepare_distribute_model

    def stay(config, device_map=None):
        # Told "cpu", Hugging Face demands accelerate, which moves models between devices. Told nothing, it stays here.
        config, _, mesh = prepare(config, device_map=device_map)
        return config, None, mesh

    logging.disable_progress_bar()
    os.environ |= {"RANK": str(rank()), "WORLD_SIZE": str(world_size()), "LOCAL_RANK": str(rank())}
    with mock.patch.object(PreTrainedModel, "prepare_distribute_model", stay):
        state["hf"] = AutoModelForCausalLM.from_pretrained(
            folder, dtype=parse_dtype(dtype), distributed_config=DistributedConfig(tp_plan="auto")).eval()


def _time_hf(work: Work) -> Timing:
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """Hugging Face gives it the prompt first, then each token."""

        def __init__(self):
            self.times = []

        def put(self, value):
            self.times.append(time.perf_counter())

        def end(self):
            pass

    longest = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in work.prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in work.prompts])
    streamer = Clock() if len(work.prompts) == 1 else None  # it takes no batches
    with torch.inference_mode():
        begin = time.perf_counter()
        made = state["hf"].generate(ids, attention_mask=mask, max_new_tokens=max(work.new_tokens), do_sample=False,
                             eos_token_id=None, pad_token_id=0, streamer=streamer)
        total = time.perf_counter() - begin
    tokens = [row[longest:longest + count] for row, count in zip(made.tolist(), work.new_tokens)]
    return Timing(streamer.times[1] - begin if streamer else total, total, tokens)

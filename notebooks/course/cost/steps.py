"""Steps of the engine by the clock: one sequence decodes, sixteen do, a prompt is read."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from course.cost.amounts import Part
from tplab.engine.config import longest_sequence
from tplab.llm.llm import LLM
from tplab.llm.sampling_params import SamplingParams

CONTEXT, SEQUENCES, PROMPT, TOKENS = 64, 16, 256, 24


class Kind(NamedTuple):
    """A step that is timed: ``sequences`` that decode behind ``length`` tokens, or that many prompts of this length."""

    what: str
    sequences: int
    length: int

    def seconds(self, llm: LLM, repeats: int) -> float:
        """The least of ``repeats``: what disturbs a step makes it slower, never faster."""
        if self.what == "decode":  # the middle one of TOKENS steps has `length` tokens in the cache
            return min(decode_seconds(llm, self.sequences, self.length - TOKENS // 2) for _ in range(repeats))
        return min(prompt_seconds(llm, self.sequences, self.length) for _ in range(repeats))

    @property
    def parts(self) -> list[Part]:
        """What the step computes."""
        return [Part(self.length, 1) if self.what == "decode" else Part(0, self.length)] * self.sequences


def _kinds(config) -> dict[str, Kind]:
    return {"decode": Kind("decode", 1, CONTEXT), f"{SEQUENCES} sequences": Kind("decode", SEQUENCES, CONTEXT),
            "prompt": Kind("prompt", 1, min(PROMPT, longest_sequence(config) // 2))}


def step_kinds(config) -> dict[str, list[Part]]:
    """The steps that are counted, predicted and timed side by side, as :mod:`course.cost.amounts` takes them."""
    return {name: kind.parts for name, kind in _kinds(config).items()}


def time_steps(llm: LLM, repeats: int = 12) -> dict[str, float]:
    """``{kind: seconds of a step}`` of :func:`step_kinds`."""
    return {name: kind.seconds(llm, repeats) for name, kind in _kinds(llm.checkpoint.config).items()}


def decode_seconds(llm: LLM, sequences: int, context: int) -> float:
    """Seconds per step while so many sequences decode behind prompts of ``context`` tokens."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    begin = time.perf_counter()
    outputs = llm.generate([[2 + number] * context for number in range(sequences)], params, use_tqdm=False)
    total = time.perf_counter() - begin
    return (total - max(output.metrics.time_to_first_token for output in outputs)) / (TOKENS - 1)


def prompt_seconds(llm: LLM, prompts: int, length: int) -> float:
    """Seconds until so many prompts of ``length`` tokens have their first token."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate([[2 + number] * length for number in range(prompts)], params, use_tqdm=False)
    return time.perf_counter() - begin


_SPIN = "import os; parent = os.getppid(); print(flush=True)\nwhile os.getppid() == parent: sum(range(10000))"


@contextmanager
def busy_process() -> Iterator[int]:
    """One more process that always wants a core, as long as the context lasts; gives its number."""
    process = subprocess.Popen([sys.executable, "-S", "-c", _SPIN], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()  # it is at work
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()

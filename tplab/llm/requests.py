"""Requests: prompts and parameters as the user gives them, checked; text kept beside the token ids."""

from dataclasses import replace
from typing import Any

from tplab.checks import quoted, readable, whole_number
from tplab.engine.errors import RequestError
from tplab.llm.detokenizer import Detokenizer
from tplab.llm.outputs import CompletionOutput, Logprob, RequestOutput
from tplab.llm.sampling_params import SamplingParams


def as_list(prompts):
    """A single prompt, a text or token ids, as a list of it; a list of prompts as it is."""
    is_ids = isinstance(prompts, list | tuple) and prompts and all(whole_number(t) is not None for t in prompts)
    return [prompts] if isinstance(prompts, str) or is_ids else prompts


def parse_prompts(prompts, params) -> list[tuple[object, SamplingParams]]:
    """Pairs of prompt and parameters; whether a prompt can run is decided later.

    Raises RequestError if there is no prompt, or if the number of parameters is not that of the prompts.
    """
    if not isinstance(prompts, list | tuple) or not prompts:
        raise RequestError("prompts must be a text, token ids, or a list of these with at least one, not "
                           f"{quoted(prompts)}")
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if not isinstance(params, list | tuple) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, not {quoted(params)}")
    if len(params) != len(prompts):
        raise RequestError(f"there are {len(prompts)} prompts, but {len(params)} sampling_params")
    return list(zip(prompts, params))


def check_messages(messages) -> None:
    """RequestError says which form a conversation must have."""
    if not isinstance(messages, list | tuple) or not messages or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in messages):
        raise RequestError('messages must look like [{"role": "user", "content": "…"}, …]')


class Request:
    """One prompt in work: its sequence of tokens and its text. Raises RequestError if it cannot run."""

    def __init__(self, llm, prompt, params: SamplingParams):
        if not isinstance(prompt, str | list | tuple):
            raise RequestError(f"a prompt must be a text or a list of token ids, not {quoted(prompt)}")
        self.prompt, self.params = prompt if isinstance(prompt, str) else None, params
        self.sequence: Any = None  # the engine's, once it is queued
        tokenizer = llm.tokenizer
        if tokenizer is None and (self.prompt is not None or params.stop):
            raise RequestError(f"{llm.checkpoint.name} has no tokenizer: give token ids, and no stop texts")
        ids = list(prompt) if self.prompt is None else tokenizer(readable(self.prompt, RequestError)).input_ids
        llm.engine.check_prompt(ids, params)
        self.prompt_token_ids = [int(token) for token in ids]
        self.tokenizer = tokenizer
        self.detokenizer = tokenizer and Detokenizer(tokenizer, self.prompt_token_ids, tuple(params.stop or ()))
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._taken = 0  # tokens of the output that were taken in

    @property
    def request_id(self) -> int:
        """The engine's number for it."""
        return self.sequence.request_id

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.sequence.finish_reason is not None

    @property
    def error(self) -> Exception | None:
        """Why it could not go on."""
        return self.sequence and self.sequence.error

    def advance(self, engine) -> int:
        """Process the tokens that the sequence got since the last call; returns how many."""
        sequence, stop = self.sequence, None
        new = sequence.num_tokens - sequence.num_prompt_tokens - self._taken
        for token in sequence.token_ids[sequence.num_tokens - new:]:
            if self.logprobs is not None:
                self.logprobs.append({t: Logprob(value, rank, self.tokenizer.decode([t]) if self.tokenizer else "")
                                      for t, value, rank in sequence.logprobs[self._taken]})
            self._taken += 1
            if self.detokenizer is not None:
                stop = self.detokenizer.add(token)
                if stop is not None:
                    sequence.keep_output(self._taken)
                    break
        if stop is None and self.finished and self.detokenizer is not None:
            stop = self.detokenizer.finish()
        if stop is not None:
            # A stop text that the last allowed token completes counts as "stop", not "length".
            engine.finish(sequence, "stop")
            sequence.finish_reason, sequence.stop_reason = "stop", stop
        return new

    def take_certain(self) -> str:
        """New text that can be shown already."""
        return "" if self.detokenizer is None else self.detokenizer.take_certain(self.finished)

    def output(self) -> RequestOutput:
        """The output so far: a copy, which later tokens do not change."""
        s = self.sequence
        text = "" if self.detokenizer is None else self.detokenizer.text
        completion = CompletionOutput(0, text, s.output_token_ids, s.finish_reason, s.stop_reason,
                                      self.logprobs and list(self.logprobs))
        return RequestOutput(s.request_id, self.prompt, list(self.prompt_token_ids), [completion], self.finished,
                             replace(s.metrics), s.error)

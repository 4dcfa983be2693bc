"""Requests: prompts and parameters as the user gives them, checked; text kept beside the token ids."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tplab.checks import quoted, readable, whole_number
from tplab.engine.errors import RequestError
from tplab.llm.detokenizer import Detokenizer
from tplab.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tplab.llm.sampling_params import SamplingParams


def _is_ids(prompt) -> bool:
    return isinstance(prompt, list | tuple) and all(whole_number(t) is not None for t in prompt)


def parse_prompt(prompt):
    """``prompt`` itself, a text or a list of token ids. Raises RequestError for anything else. A ``prompt`` that is a
    RequestError (a conversation that could not be written) is raised."""
    if isinstance(prompt, RequestError):
        raise prompt
    if not isinstance(prompt, str | list | tuple):
        raise RequestError(f"a prompt must be a text or a list of token ids, not {quoted(prompt)}")
    return prompt


def parse_prompts(prompts, params) -> Iterator[tuple[object, SamplingParams]]:
    """Pairs of prompt and parameters; whether a prompt can run is decided later.

    Raises RequestError if there is no prompt, or if the number of parameters is not that of the prompts.
    """
    prompts = [prompts] if isinstance(prompts, str) or (_is_ids(prompts) and prompts) else prompts
    if not isinstance(prompts, list | tuple) or not prompts:
        raise RequestError("prompts must be a text, token ids, or a list of these with at least one, not "
                           f"{quoted(prompts)}")
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if not isinstance(params, list | tuple) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"sampling_params must be SamplingParams or a list of them, not {quoted(params)}")
    if len(params) != len(prompts):
        raise RequestError(f"there are {len(prompts)} prompts, but {len(params)} sampling_params")
    return zip(prompts, params)


def parse_messages(messages) -> list[list[dict]]:
    """One conversation or several → a list of conversations; RequestError says which form they must have."""
    single = isinstance(messages, list | tuple) and messages and isinstance(messages[0], dict)
    conversations = [messages] if single else messages
    good = isinstance(conversations, list | tuple) and conversations and all(
        isinstance(c, list | tuple) and c and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in c)
        for c in conversations)
    if not good:
        raise RequestError('messages must look like [{"role": "user", "content": "…"}, …], or be a list of such lists')
    return list(conversations)


class Request:
    """One prompt in work: its sequence of tokens and its text. Raises RequestError if it cannot run.

    ``is_stepped``: ``LLM.step`` returns it, not the call that queued it.
    """

    def __init__(self, llm, prompt, params: SamplingParams, is_stepped: bool = False):
        self.prompt = prompt if isinstance(parse_prompt(prompt), str) else None
        self.params, self.is_stepped = params, is_stepped
        self.sequence: Any = None  # the engine's, once it is queued
        tokenizer = llm.tokenizer
        if tokenizer is None and (self.prompt is not None or params.stop):
            raise RequestError(f"{llm.checkpoint.name} has no tokenizer: give token ids, and no stop texts")
        ids = list(prompt) if self.prompt is None else tokenizer(readable(prompt, RequestError)).input_ids
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


class RejectedRequest:
    """A request that cannot run, beside others that can."""

    request_id = None
    finished = True

    def __init__(self, prompt, error: RequestError):
        self.prompt, self.error = prompt, error

    def take_certain(self) -> str:
        """Nothing to show."""
        return ""

    def output(self) -> RequestOutput:
        """No output, and why."""
        text = self.prompt if isinstance(self.prompt, str) else None
        ids = list(self.prompt) if isinstance(self.prompt, list | tuple) else []
        return RequestOutput(-1, text, ids, [CompletionOutput(finish_reason="error")], True, RequestMetrics(),
                             self.error)


def raise_or_warn(requests: list, new: list, what: str, stacklevel: int) -> None:
    """Raise the first error if all of a call's requests failed; otherwise warn of each, so that the others can go on.

    ``new``: requests whose errors were not reported yet. ``what``: the end of the warning's sentence.
    ``stacklevel``: how many calls up, from here, the user's is.
    """
    failed = [request.error for request in requests if request.error]
    if len(failed) == len(requests):
        for error in failed[1:]:
            failed[0].add_note(f"also: {error}")
        raise failed[0]
    for i, request in enumerate(requests):
        if request in new and request.error:
            warnings.warn(f"prompt {i} {what}: {request.error}", stacklevel=stacklevel)

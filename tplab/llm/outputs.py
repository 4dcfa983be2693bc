"""What ``generate`` returns, in vLLM's shape."""

from dataclasses import dataclass, field
from typing import NamedTuple

from tplab.engine.sequence import RequestMetrics


class Logprob(NamedTuple):
    """A token's log probability, before temperature and filters."""

    logprob: float  # natural logarithm
    rank: int  # 1 for the most probable token
    decoded_token: str


@dataclass
class CompletionOutput:
    """What was generated for a prompt.

    ``finish_reason``: ``"stop"`` (end of text, stop text or stop id), ``"length"``, ``"abort"``, ``"error"``, or None
    while it goes on.
    """

    index: int = 0
    text: str = ""  # without special tokens and without the stop text
    token_ids: list[int] = field(default_factory=list)  # all of them, the end of text included
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # the text or id that stopped it, where it was one from the parameters
    logprobs: list[dict[int, Logprob]] | None = None  # per token, if asked for, by token id


@dataclass
class RequestOutput:
    """A request and its result."""

    request_id: int  # the engine's number for it
    prompt: str | None  # the text, if it was given as text
    prompt_token_ids: list[int]  # what the model saw
    outputs: list[CompletionOutput]  # always one
    finished: bool  # False while more will come
    metrics: RequestMetrics  # what it cost
    error: Exception | None = None  # why it could not run; only where ``finish_reason`` is ``"error"``

    @property
    def text(self) -> str:
        """The text of the one output."""
        return self.outputs[0].text

    def to_dict(self) -> dict:
        """Plain values, ready for JSON."""
        out, m = self.outputs[0], self.metrics
        return {"request_id": self.request_id, "prompt": self.prompt, "prompt_token_ids": self.prompt_token_ids,
                "text": out.text, "token_ids": out.token_ids, "finish_reason": out.finish_reason,
                "stop_reason": out.stop_reason,
                "logprobs": out.logprobs and [{str(t): p._asdict() for t, p in step.items()} for step in out.logprobs],
                "error": self.error and str(self.error),
                "metrics": {"time_to_first_token": m.time_to_first_token, "tokens_per_second": m.tokens_per_second,
                            "num_prompt_tokens": m.num_prompt_tokens, "num_output_tokens": m.num_output_tokens,
                            "blocks_used": m.blocks_used, "prefix_hit_tokens": m.prefix_hit_tokens,
                            "preemptions": m.preemptions}}


@dataclass(frozen=True)
class StreamChunk:
    """A piece of text as it becomes certain; ``print(chunk, end="")`` prints it."""

    index: int  # which prompt of the call it belongs to
    text: str  # what is new
    output: RequestOutput  # the whole output so far

    def __str__(self) -> str:
        return self.text

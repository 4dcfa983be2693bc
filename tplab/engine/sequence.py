"""``Sequence``: one request in the engine, and what it cost."""

from dataclasses import dataclass
from enum import Enum

from tplab.cache import BlockPool, BlockTable


@dataclass
class RequestMetrics:
    """What one request cost. Times in seconds, ``None`` until known.

    Attributes:
        arrival_time, first_token_time, finished_time: readings of one clock (``time.perf_counter``).
        blocks_used: the most cache blocks it held at one time.
        prefix_hit_tokens: prompt tokens whose keys and values were in the cache already, when it was first admitted.
        preemptions: how often its blocks were taken away and its tokens computed again.
        num_draft_tokens, num_accepted_tokens: draft tokens that were computed, and those that were kept.
    """

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    blocks_used: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """From arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second, from arrival to the end."""
        if self.finished_time is None or self.finished_time == self.arrival_time:
            return None
        return self.num_output_tokens / (self.finished_time - self.arrival_time)


class Status(Enum):
    """Where a sequence is. ``finish_reason`` says how it ended."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # waiting again, its blocks given back
    FINISHED = "finished"


class Sequence:
    """A prompt, its output so far, and where its keys and values are.

    Args:
        request_id: the engine's number for it; grows with every request.
        max_tokens: ``params.max_tokens`` within what the model's length allows.

    ``num_computed_tokens`` of its ``num_tokens`` have their keys and values in the cache. While it decodes, that is all
    but the last one.
    """

    def __init__(self, request_id: int, prompt_token_ids: list[int], params, pool: BlockPool, max_tokens: int,
                 seed: int = 0):
        self.request_id, self.prompt_token_ids, self.params = request_id, prompt_token_ids, params
        self.max_tokens, self.seed = max_tokens, seed
        self.token_ids = list(prompt_token_ids)
        self.logprobs: list[list[tuple[int, float, int]] | None] = []  # per new token, where asked for
        self.block_table = BlockTable(pool)
        self.num_computed_tokens = 0
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.error: Exception | None = None
        self.sampled_in_step = -1
        self.metrics = RequestMetrics()

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """What has been generated."""
        return self.token_ids[len(self.prompt_token_ids):]

    def keep_output(self, count: int) -> None:
        """Drop the output after its first ``count`` tokens: a draft went beyond the end."""
        del self.token_ids[self.num_prompt_tokens + count:], self.logprobs[count:]
        self.metrics.num_output_tokens = count

    def __repr__(self) -> str:
        return (f"<Sequence {self.request_id}: {self.status.value}, {self.num_prompt_tokens} prompt tokens + "
                f"{self.num_tokens - self.num_prompt_tokens} new, {self.num_computed_tokens} computed, "
                f"blocks {self.block_table.block_ids}>")

"""``RequestMetrics``: what one request cost."""

from dataclasses import dataclass


@dataclass
class RequestMetrics:
    """What one request cost. Times in seconds, ``None`` until known.

    Attributes:
        arrival_time, first_token_time, finished_time: readings of one clock (``time.perf_counter``).
        num_prompt_tokens, num_output_tokens: lengths.
        blocks_used: the most cache blocks it held at one time.
        prefix_hit_tokens: prompt tokens whose keys and values were in the cache already, when it was first admitted.
        preemptions: how often its blocks were taken away and its tokens computed again.
    """

    arrival_time: float = 0.0
    first_token_time: float | None = None
    finished_time: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    blocks_used: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0

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

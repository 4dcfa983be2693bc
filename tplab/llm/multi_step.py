"""Multi-step scheduling, as vLLM's ``num_scheduler_steps`` once was: one call computes several decode steps.

As long as no request is added or ends, the ranks have all that they need for the next step. With several steps in one
call, the ranks wait only once for the driver process and for the messages to it and from it.
"""

from collections import deque
from collections.abc import Iterable

from tplab.engine.step import ModelRunnerOutput, ScheduledRequest, SchedulerOutput

LONGEST = 0.1  # seconds that one call takes at most; a request that is added meanwhile waits for its end


class MultiStep:
    """Steps that the ranks have computed ahead of the scheduler, and how many more they may compute."""

    def __init__(self):
        self.steps: deque[tuple[dict[int, ScheduledRequest], list[ModelRunnerOutput]]] = deque()
        self.most, self.seconds = 0, 0.0  # more steps than one, in the next call; seconds of a step in the last one
        self.drawn: dict[int, int] | None = None  # in the last step handed out, where ranks remember a later one

    def take(self, asked: SchedulerOutput) -> list[ModelRunnerOutput] | None:
        """All ranks' outputs of ``asked`` if it was computed ahead; None if it was not."""
        if not self.steps:
            return None
        expected, outputs = self.steps[0]
        if not all(_is_same(expected.get(request.request_id), request) for request in asked.requests):
            self.drop()
            return None
        self.steps.popleft()
        kept = {request.request_id for request in asked.requests}
        found = [_of(kept, expected, output) for output in outputs]
        self.drawn = found[0].sampled_token_ids if self.steps else None
        return found

    def drop(self) -> None:
        """Drop the steps computed ahead. The next call computes fewer."""
        if self.steps:
            self.steps.clear()
            self.most = 0

    def description(self, asked: SchedulerOutput, alone: bool) -> SchedulerOutput:
        """What to send: with the tokens, if ranks remember those of a later step; ``alone``: of this step only."""
        requests = asked.requests
        if self.drawn is not None:
            requests = tuple(request if request.token_ids else
                             request._replace(token_ids=(self.drawn[request.request_id],)) for request in requests)
        in_time = int(LONGEST / self.seconds) - 1 if self.seconds else 0
        ahead = 0 if alone else max(0, min(asked.num_lookahead_steps, self.most, in_time))
        return asked._replace(requests=requests, num_lookahead_steps=ahead)

    def keep(self, sent: SchedulerOutput, outputs: list[list[ModelRunnerOutput]], seconds: float
             ) -> list[ModelRunnerOutput]:
        """What each rank has computed for a call, which took so long; the outputs of its first step."""
        first, *others = zip(*outputs, strict=True)
        self.seconds, step = seconds / (1 + len(others)), sent
        for one in others:
            step = step.next_step()
            self.steps.append(({request.request_id: request for request in step.requests}, list(one)))
        self.drawn = first[0].sampled_token_ids if others else None
        self.most = 2 * self.most + 1
        return list(first)


def _is_same(expected: ScheduledRequest | None, asked: ScheduledRequest) -> bool:
    """Whether the computed part of a step is the part asked for; the block table may have grown since."""
    if expected is None:
        return False
    blocks = expected.segment.block_ids
    of_before = asked._replace(segment=asked.segment._replace(block_ids=asked.segment.block_ids[:len(blocks)]))
    return of_before == expected


def _of(kept: set[int], computed: Iterable[int], output: ModelRunnerOutput) -> ModelRunnerOutput:
    """A rank's output, reduced to the sequences in ``kept``, out of the ``computed`` ones."""
    tokens = {number: token for number, token in output.sampled_token_ids.items() if number in kept}
    logprobs = {number: found for number, found in output.logprobs.items() if number in kept}
    slots = output.slots and [slots for number, slots in zip(computed, output.slots, strict=True) if number in kept]
    return ModelRunnerOutput(tokens, logprobs, slots, tuple(number for number in output.nan if number in kept))

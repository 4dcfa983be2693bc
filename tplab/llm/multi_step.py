"""Multi-step scheduling, as vLLM's ``num_scheduler_steps`` once was: one call computes several decode steps.

From a step to the next one the ranks know all that they need, as long as no request comes or ends. For several steps at
once, the ranks wait once for the driver's process, its description of the step, and the way there and back.
"""

from collections import deque
from collections.abc import Iterable

from tplab.engine.step import ModelRunnerOutput, ScheduledRequest, SchedulerOutput

LONGEST = 0.1  # seconds of one call at most: a request that comes meanwhile waits so long


class MultiStep:
    """What the ranks have computed beyond the last step that was asked for, and how far they may go."""

    def __init__(self):
        self.steps: deque[tuple[dict[int, ScheduledRequest], list[ModelRunnerOutput]]] = deque()
        self.most, self.seconds = 0, 0.0  # more steps than one, in the next call; seconds of a step in the last one
        self.drawn: dict[int, int] | None = None  # in the last step handed out, where ranks remember a later one

    def take(self, asked: SchedulerOutput) -> list[ModelRunnerOutput] | None:
        """All ranks' outputs of a step that they have computed; None if it is another one than they thought."""
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
        """It is not needed. Next time they go less far."""
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
    """Whether what was computed is what is asked for; more blocks may stand behind those of before."""
    if expected is None:
        return False
    blocks = expected.segment.block_ids
    of_before = asked._replace(segment=asked.segment._replace(block_ids=asked.segment.block_ids[:len(blocks)]))
    return of_before == expected


def _of(kept: set[int], computed: Iterable[int], output: ModelRunnerOutput) -> ModelRunnerOutput:
    """The output of those that are still asked for, of those that were computed."""
    tokens = {number: token for number, token in output.sampled_token_ids.items() if number in kept}
    logprobs = {number: found for number, found in output.logprobs.items() if number in kept}
    slots = output.slots and [slots for number, slots in zip(computed, output.slots, strict=True) if number in kept]
    return ModelRunnerOutput(tokens, logprobs, slots, tuple(number for number in output.nan if number in kept))

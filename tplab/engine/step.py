"""What a step sends to the ranks, and what they answer.

Plain numbers in tuples: it goes through a pipe to the ranks of a pool, and as JSON to ranks on other machines.
"""

import json
from typing import NamedTuple

from tplab.cache import Segment
from tplab.engine.sequence import Sequence


class SamplingMetadata(NamedTuple):
    """How a sequence's next token is chosen.

    Attributes:
        temperature, top_k, top_p, min_p, logprobs: from :class:`SamplingParams`.
        seed: of the request; drawn by the engine where the user gave none.
        position: how many tokens were drawn for it before; with the seed, it determines the noise.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int
    logprobs: int | None


class ScheduledRequest(NamedTuple):
    """One sequence's part of a step.

    Attributes:
        segment: which of its positions are computed, and its block table.
        token_ids: the new tokens; empty where it is the one token that the ranks drew in the step before.
        sampling: how its next token is drawn; None where its prompt is not done yet.
        num_draft_tokens: how many of the last ``token_ids`` are a draft.
    """

    request_id: int
    segment: Segment
    token_ids: tuple[int, ...]
    sampling: SamplingMetadata | None
    num_draft_tokens: int = 0

    @property
    def draft(self) -> tuple[int, ...]:
        """The draft's tokens."""
        return self.token_ids[len(self.token_ids) - self.num_draft_tokens:]


class SchedulerOutput(NamedTuple):
    """What a step computes, in the order of the flattened tokens.

    Attributes:
        num_lookahead_steps: how many more steps the ranks compute in the same call, each as :meth:`next_step` says.
            Until then no sequence needs another block or reaches its ``max_tokens``, and none waits.
    """

    step_number: int
    requests: tuple[ScheduledRequest, ...]
    num_lookahead_steps: int = 0

    def next_step(self) -> "SchedulerOutput":
        """The step after one in which all sequences decode, if none of them ends."""
        return SchedulerOutput(self.step_number + 1, tuple(
            request._replace(segment=request.segment._replace(start=request.segment.start + 1), token_ids=(),
                             sampling=sampling._replace(position=sampling.position + 1))
            for request in self.requests if (sampling := request.sampling)), self.num_lookahead_steps - 1)

    def to_json(self) -> bytes:
        """For ranks that are reached over a pipe or a socket."""
        return json.dumps(self).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "SchedulerOutput":
        """The inverse of :meth:`to_json`."""
        step_number, requests, ahead = json.loads(data)
        return cls(step_number, tuple(
            ScheduledRequest(request_id, Segment(*segment), tuple(token_ids), sampling and SamplingMetadata(*sampling),
                             num_draft_tokens)
            for request_id, segment, token_ids, sampling, num_draft_tokens in requests), ahead)


class ModelRunnerOutput(NamedTuple):
    """What a rank answers, by ``request_id``.

    Attributes:
        sampled_token_ids: the drawn token of each sequence for which one was due; it follows the accepted draft tokens.
        logprobs: ``[(token, log probability, rank), …]``, the drawn token first, where asked for.
        slots: in the order of the step, the slots that each sequence wrote; only under ``strict``.
        nan: sequences for which no token could be drawn, since their logits are NaN.
        num_accepted: of sequences with a draft, how many of its tokens stay.
    """

    sampled_token_ids: dict[int, int]
    logprobs: dict[int, list[tuple[int, float, int]]]
    slots: list[list[int]] | None = None
    nan: tuple[int, ...] = ()
    num_accepted: dict[int, int] = {}


def block_ids_for_ranks(sequence: Sequence) -> tuple[int, ...]:
    """The block table as the ranks will see it in this step."""
    return tuple(sequence.block_table.block_ids)


def scheduled_request(step_number: int, sequence: Sequence, count: int, draft: tuple[int, ...] = ()
                      ) -> ScheduledRequest:
    """What the ranks need to compute ``count`` new tokens of a sequence and a draft after them."""
    start, p = sequence.num_computed_tokens, sequence.params
    segment = Segment(start, count + len(draft), block_ids_for_ranks(sequence), sequence.num_prompt_tokens)
    # Only from the last step: after a step that failed, ranks may hold different tokens.
    drawn_just_now = count == 1 and not draft and sequence.sampled_in_step == step_number - 1
    token_ids = () if drawn_just_now else (*sequence.token_ids[start:start + count], *draft)
    sampling = None
    if start + count == sequence.num_tokens:
        sampling = SamplingMetadata(0.0 if p.greedy else p.temperature, p.top_k, p.top_p, p.min_p, sequence.seed,
                                    sequence.num_tokens - sequence.num_prompt_tokens, p.logprobs)
    return ScheduledRequest(sequence.request_id, segment, token_ids, sampling, len(draft))

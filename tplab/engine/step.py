"""The compact description of one step: all that the ranks learn from the scheduler.

Plain numbers in tuples: it goes through a pipe to the ranks of a pool, and as JSON to ranks on other machines.
"""

import json
from typing import NamedTuple

from tplab.cache import Segment
from tplab.engine.sequence import Sequence


class Draw(NamedTuple):
    """How a sequence's next token is chosen.

    Attributes:
        temperature, top_k, top_p, min_p, logprobs: from :class:`SamplingParams`.
        seed: of the request; drawn by the engine where the user gave none.
        position: how many tokens were drawn for it before: which place in the seed's stream of chance.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int
    logprobs: int | None


class SequenceStep(NamedTuple):
    """One sequence's part of a step.

    Attributes:
        number: the sequence.
        segment: which of its positions are computed, and its block table.
        token_ids: the new tokens; empty where it is the one token that the ranks drew in the step before.
        draw: how its next token is drawn; None where its prompt is not done yet.
    """

    number: int
    segment: Segment
    token_ids: tuple[int, ...]
    draw: Draw | None


class StepInput(NamedTuple):
    """What a step computes, in the order of the flattened tokens."""

    number: int
    sequences: tuple[SequenceStep, ...]

    def to_json(self) -> bytes:
        """For ranks that are reached over a socket."""
        return json.dumps(self).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "StepInput":
        """The inverse of :meth:`to_json`."""
        number, sequences = json.loads(data)
        return cls(number, tuple(SequenceStep(n, Segment(*segment), tuple(token_ids), draw and Draw(*draw))
                                 for n, segment, token_ids, draw in sequences))


class StepOutput(NamedTuple):
    """What a rank answers.

    Attributes:
        token_ids: ``{sequence: drawn token}`` for the sequences that were to draw.
        logprobs: ``{sequence: [(token, log probability, rank), …]}``, the drawn token first, where asked for.
        slots: per sequence the slots it wrote, only under ``strict``.
        nan: sequences for which nothing could be drawn, since their logits are NaN.
    """

    token_ids: dict[int, int]
    logprobs: dict[int, list[tuple[int, float, int]]]
    slots: list[list[int]] | None = None
    nan: tuple[int, ...] = ()


def block_ids_for_ranks(sequence: Sequence) -> tuple[int, ...]:
    """The block table as the ranks will see it in this step."""
    return tuple(sequence.table.blocks)


def describe(number: int, scheduled: list[tuple[Sequence, int]]) -> StepInput:
    """What the ranks must know to compute ``count`` new tokens of each ``(sequence, count)``."""
    return StepInput(number, tuple(_describe_one(number, *pair) for pair in scheduled))


def _describe_one(number: int, sequence: Sequence, count: int) -> SequenceStep:
    start, p = sequence.num_computed_tokens, sequence.params
    segment = Segment(start, count, block_ids_for_ranks(sequence), sequence.num_prompt_tokens)
    # Only from the very last step: after one that failed, ranks may remember different tokens.
    drawn_just_now = count == 1 and sequence.sampled_in_step == number - 1
    token_ids = () if drawn_just_now else tuple(sequence.token_ids[start:start + count])
    draw = None
    if start + count == sequence.num_tokens:
        draw = Draw(0.0 if p.greedy else p.temperature, p.top_k, p.top_p, p.min_p, sequence.seed,
                    sequence.num_tokens - sequence.num_prompt_tokens, p.logprobs)
    return SequenceStep(sequence.number, segment, token_ids, draw)

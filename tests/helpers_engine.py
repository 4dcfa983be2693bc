"""A stand-in for the ranks: a paged memory of *tokens* and a model that is a function of the tokens it finds there."""

import hashlib

from tplab.cache import slot_mapping
from tplab.engine.runner import token_positions
from tplab.engine.step import StepInput, StepOutput

VOCAB, EOS = 11, 0
NOTHING = -1


def next_token(token_ids) -> int:
    """What the pretended model says after ``token_ids``: every token matters, and so does their order."""
    return hashlib.blake2b(bytes(token_ids), digest_size=2).digest()[0] % VOCAB


def one_at_a_time(prompt, max_tokens, stop_token_ids=(), ignore_eos=False) -> list[int]:
    """The output that the prompt must get, whatever else happens."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stop_token_ids or (tokens[-1] == EOS and not ignore_eos):
            break
    return tokens[len(prompt):]


class RanksFailed(Exception):
    """What the pretended ranks raise."""


class TokenRanks:
    """Executes steps on pretended ranks. A wrong slot, table, position or order changes the tokens that come out.

    ``fail_after``: that many ranks carry out the next step before it fails.
    """

    def __init__(self, size: int, num_blocks: int, block_size: int):
        self.size, self.num_slots, self.block_size = size, num_blocks * block_size, block_size
        self.fail_after = None
        self.steps = 0
        self.lose_everything()

    def lose_everything(self) -> None:
        """As after a restart."""
        self.memory = [[NOTHING] * self.num_slots for _ in range(self.size)]
        self.drawn = [{} for _ in range(self.size)]

    def execute(self, step: StepInput) -> list[StepOutput]:
        # Over JSON, so that what is sent to other machines is tested on the way.
        step = StepInput.from_json(step.to_json())
        fail_after, self.fail_after = self.fail_after, None
        outputs = []
        for rank in range(self.size):
            if rank == fail_after:
                raise RanksFailed
            outputs.append(self._rank(step, self.memory[rank], rank))
        self.steps += 1
        return outputs

    def _rank(self, step, memory, rank):
        drawn, slots = {}, []
        for number, segment, token_ids, draw in step.sequences:
            new = token_ids or (self.drawn[rank][number],)
            assert len(new) == segment.count
            slots.append(slot_mapping(segment.block_ids, token_positions(segment), self.block_size))
            for slot, token in zip(slots[-1], new, strict=True):
                memory[slot] = token
            if draw is not None:
                seen = slot_mapping(segment.block_ids, range(segment.start + segment.count), self.block_size)
                tokens = [memory[slot] for slot in seen]
                assert NOTHING not in tokens, f"sequence {number} reads a slot that was never written"
                drawn[number] = next_token(tokens)
        self.drawn[rank] = drawn
        return StepOutput(drawn, {}, slots)

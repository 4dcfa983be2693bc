"""A stand-in for the ranks: a paged memory, and a model that is a function of what it finds there."""

import hashlib

from tplab.cache import slot_mapping
from tplab.engine.config import EngineConfig
from tplab.engine.core import Engine
from tplab.engine.draft import num_accepted
from tplab.engine.runner import token_positions
from tplab.engine.step import ModelRunnerOutput, SchedulerOutput

VOCAB, EOS = 11, 0
NOTHING = None


def content(before: bytes, token: int) -> bytes:
    """What stands in a slot: it depends on the token and, as keys and values do, on everything before it."""
    return hashlib.blake2b(before + bytes([token]), digest_size=4).digest()


def next_token(contents) -> int:
    """What the pretended model says when it sees these slots: each of them matters, and so does their order."""
    return hashlib.blake2b(b"".join(contents), digest_size=2).digest()[0] % VOCAB


def one_at_a_time(prompt, max_tokens, stop_token_ids=(), ignore_eos=False) -> list[int]:
    """The output that the prompt must get, whatever else happens."""
    contents, output = [b""], []
    for token in prompt:
        contents.append(content(contents[-1], token))
    while len(output) < max_tokens:
        output.append(next_token(contents[1:]))
        contents.append(content(contents[-1], output[-1]))
        if output[-1] in stop_token_ids or (output[-1] == EOS and not ignore_eos):
            break
    return output


class RanksFailed(Exception):
    """What the pretended ranks raise."""


def make_engine(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64, ranks=1, max_model_len=60,
                **options) -> Engine:
    """An engine on :class:`TokenRanks`, which are its ``executor``."""
    return Engine(TokenRanks(ranks, num_blocks, block_size), EngineConfig(
        vocab_size=VOCAB, eos_token_ids=(EOS,), max_model_len=max_model_len, num_blocks=num_blocks,
        block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **options))


class TokenRanks:
    """Executes steps on pretended ranks. A wrong slot, table, position or order changes the tokens that come out.

    ``carry_out``: if not None, only these ranks carry out the next step, which then fails.
    ``told``: every step that was asked for, as the ranks saw it. ``accepted``: of the last one's drafts.
    """

    def __init__(self, size: int, num_blocks: int, block_size: int):
        self.size, self.num_slots, self.block_size = size, num_blocks * block_size, block_size
        self.carry_out = None
        self.told: list[SchedulerOutput] = []
        self.lose_everything()

    def lose_everything(self) -> None:
        """As after a restart."""
        self.memory = [[NOTHING] * self.num_slots for _ in range(self.size)]
        self.drawn = [{} for _ in range(self.size)]

    def execute_model(self, step: SchedulerOutput) -> list[ModelRunnerOutput]:
        # Over JSON, so that what is sent to other machines is tested on the way.
        step = SchedulerOutput.from_json(step.to_json())
        self.told.append(step)
        carry_out, self.carry_out = self.carry_out, None
        ranks = range(self.size) if carry_out is None else sorted(carry_out)
        outputs = [self._rank(step, self.memory[rank], rank) for rank in ranks]
        if carry_out is not None:
            raise RanksFailed
        return outputs

    def execute_steps(self, step: SchedulerOutput) -> list[list[ModelRunnerOutput]]:
        outputs = [self.execute_model(step)]
        while step.num_lookahead_steps:
            step = step.next_step()
            outputs.append(self.execute_model(step))
        return outputs

    def _rank(self, step, memory, rank):
        drawn, slots, accepted = {}, [], {}
        for request in step.requests:
            request_id, segment, token_ids, sampling, num_draft_tokens = request
            new = token_ids or (self.drawn[rank][request_id],)
            assert len(new) == segment.count
            slots.append(slot_mapping(segment.block_ids, token_positions(segment), self.block_size))
            seen = slot_mapping(segment.block_ids, range(segment.start + segment.count), self.block_size)
            for position, slot, token in zip(token_positions(segment), slots[-1], new, strict=True):
                memory[slot] = content(memory[seen[position - 1]] if position else b"", token)
            contents = [memory[slot] for slot in seen]
            assert NOTHING not in contents, f"sequence {request_id} reads a slot that was never written"
            if sampling is not None:
                chosen = [next_token(contents[:len(contents) - n]) for n in range(num_draft_tokens, -1, -1)]
                kept = num_accepted(request.draft, chosen)
                drawn[request_id] = chosen[kept]
                if num_draft_tokens:
                    accepted[request_id] = kept
        self.drawn[rank], self.accepted = drawn, accepted
        return ModelRunnerOutput(drawn, {}, slots, num_accepted=accepted)

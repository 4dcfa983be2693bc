"""The scheduler under random load: no token lost, repeated or swapped, no block leaked, no sequence overtaken."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from helpers.engine import VOCAB, RanksFailed, content, make_engine, one_at_a_time
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tplab.cache import block_key, blocks_needed
from tplab.engine.errors import RequestError
from tplab.llm import SamplingParams

STEPS = {"engine steps": 0, "preemptions": 0, "prefix hits": 0, "aborted": 0, "failed steps": 0,
         "restarts": 0, "finished": 0, "drafted": 0, "accepted": 0}


# Beginnings that many share, ends of their own.
PROMPTS = st.builds(lambda base, cut, end: ([base, 2, 3, 4] * 3)[:cut] + end, st.sampled_from([1, 5]),
                    st.sampled_from([0, 1, 6, 9, 12]), st.lists(st.integers(1, 9), min_size=1, max_size=3))


class Load(RuleBasedStateMachine):
    """Requests arrive, end, are cancelled, meet full caches and failing ranks, in any order."""

    @initialize(num_blocks=st.integers(3, 12), block_size=st.sampled_from([1, 2, 3, 4, 5]), seqs=st.integers(1, 5),
                budget=st.sampled_from([1, 2, 3, 7, 20]), prefix=st.booleans(), size=st.integers(1, 3),
                drafts=st.sampled_from([0, 1, 4]))
    def make(self, num_blocks, block_size, seqs, budget, prefix, size, drafts):
        self.engine = make_engine(num_blocks, block_size, seqs, budget, ranks=size, max_model_len=30,
                                  enable_prefix_caching=prefix, strict=True, num_speculative_tokens=drafts)
        self.ranks, self.scheduler, self.pool = self.engine.executor, self.engine.scheduler, self.engine.pool
        self.expected = {}

    @rule(requests=st.lists(st.tuples(PROMPTS, st.integers(4, 20), st.sets(st.integers(1, VOCAB - 1), max_size=1),
                                      st.booleans()), min_size=1, max_size=3))
    def arrive(self, requests):
        for prompt, max_tokens, stop, ignore_eos in requests:
            params = SamplingParams(temperature=0, max_tokens=max_tokens, stop_token_ids=sorted(stop),
                                    ignore_eos=ignore_eos)
            try:
                sequence = self.engine.add(prompt, params)
            except RequestError as error:
                assert "blocks" in str(error)
                assert len(prompt) + max_tokens - 1 > self.pool.num_blocks * self.pool.block_size
                continue
            self.expected[sequence] = one_at_a_time(prompt, min(max_tokens, 30 - len(prompt)), stop, ignore_eos)

    def busy(self):
        return hasattr(self, "engine") and self.scheduler.has_unfinished

    def one_step(self):
        """A step, and whether what its record tells is what happened, and all that could happen."""
        running = {s.request_id for s in self.scheduler.running}
        computed = {s.request_id: (s.num_computed_tokens, s.num_tokens) for s in self.expected}
        advanced = self.engine.step()
        STEPS["engine steps"] += 1
        record, spare = self.scheduler.history[-1], self.scheduler.max_num_batched_tokens
        assert record.step_number == self.scheduler.step_number == self.ranks.told[-1].step_number
        spare -= sum(record.tokens.values())
        assert spare >= 0 and min(record.tokens.values()) > 0, "the budget of a step"
        assert len(record.tokens) <= self.scheduler.max_num_seqs
        assert {s.request_id for s in advanced} <= set(record.tokens)
        assert set(record.admitted) == set(record.tokens) - running and not set(record.preempted) & set(record.tokens)
        assert not (record.admitted and record.preempted), "blocks were missing, and a sequence was admitted"
        by_number = {s.request_id: s for s in self.expected}
        drafted = {request.request_id: request.num_draft_tokens for request in self.ranks.told[-1].requests}
        for number, count in record.tokens.items():
            sequence = by_number[number]
            rejected = drafted[number] - self.ranks.accepted.get(number, 0)
            begun, before = sequence.num_computed_tokens - count + rejected, computed[number][1]
            count -= drafted[number]
            assert begun == computed[number][0] if number in running else begun >= 0
            assert before < sequence.num_tokens <= before + 1 + drafted[number] - rejected or sequence not in advanced
            assert begun + count <= before and (begun + count == before) == (sequence in advanced)
            assert begun + count == before or not spare, "tokens were left out, and the budget was not used up"
            assert (number in record.prefill) == (begun < max(sequence.num_prompt_tokens, before - 1))
        place = len(record.tokens) < self.scheduler.max_num_seqs
        if spare and place and self.scheduler.waiting and not record.preempted:
            first, free = self.scheduler.waiting[0], self.pool.num_blocks - record.used_blocks
            full = blocks_needed(first.num_tokens, self.pool.block_size) > free
            assert full or self.filled_for_others(first.token_ids, 0, record, None), "it could have been admitted"
        for place, (number, count) in enumerate(record.tokens.items()):
            sequence = by_number[number]
            known = sequence.token_ids[:-1] if sequence in advanced else sequence.token_ids
            if number in record.admitted:  # without a draft
                begun = sequence.num_computed_tokens - count
                assert not self.filled_for_others(known, begun, record, place), "a block is computed twice"

    def filled_for_others(self, token_ids, begun, record, place):
        """Whether the step filled, for those before ``place`` in it, a block of these tokens that can be found."""
        size = self.pool.block_size
        filled = [s.token_ids[:stop] for s in self.expected if s.request_id in list(record.tokens)[:place]
                  for stop in range(size, s.num_computed_tokens + 1, size)
                  if stop > s.num_computed_tokens - record.tokens[s.request_id]]
        return self.pool.enable_prefix_caching and any(
            begun < len(tokens) < len(token_ids) and token_ids[:len(tokens)] == tokens for tokens in filled)

    @precondition(busy)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            if self.busy():
                self.one_step()

    @precondition(busy)
    @rule(which=st.integers(0, 100))
    def cancel(self, which):
        unfinished = [s for s in self.expected if s.finish_reason is None]
        self.engine.finish(unfinished[which % len(unfinished)], "abort")
        STEPS["aborted"] += 1

    @precondition(busy)
    @rule(carry_out=st.sets(st.integers(0, 2)), lost=st.booleans())
    def ranks_fail(self, carry_out, lost):
        """In a step that some of them carry out, in any order: after it they remember different tokens."""
        self.ranks.carry_out = {rank for rank in carry_out if rank < self.ranks.size}
        with pytest.raises(RanksFailed):
            self.engine.step()
        if lost:
            self.restart()
        STEPS["failed steps"] += 1

    @precondition(busy)
    @rule()
    def restart(self):
        self.ranks.lose_everything()
        self.engine.recompute()
        STEPS["restarts"] += 1

    @invariant()
    def tokens_are_right(self):
        for sequence, expected in getattr(self, "expected", {}).items():
            output = sequence.output_token_ids
            assert output == expected[:len(output)]
            if sequence.finish_reason in ("stop", "length"):
                assert output == expected

    @invariant()
    def no_sequence_is_overtaken(self):
        """First come, first served: a preempted sequence stands before all that came later."""
        if hasattr(self, "engine"):
            numbers = [s.request_id for s in (*self.scheduler.running, *self.scheduler.waiting)]
            assert numbers == sorted(numbers) and len(self.scheduler.running) <= self.scheduler.max_num_seqs

    @invariant()
    def blocks_contain_what_their_keys_say(self):
        """Every user of a block is counted, every other block is free; what is found by key stands on every rank."""
        if not hasattr(self, "engine"):
            return
        users = Counter(block for s in self.expected for block in s.block_table.block_ids)
        assert self.pool.ref_counts == [users[block] for block in range(self.pool.num_blocks)]
        assert all(self.pool.is_free(block) == (not users[block]) for block in range(self.pool.num_blocks))
        assert self.pool.num_used == len(users) and self.pool.num_free == self.pool.num_blocks - len(users)
        size, found = self.pool.block_size, 0
        contents = {}
        for s in self.expected:
            key, before = b"", b""
            for start in range(0, s.num_tokens - size + 1, size):
                tokens, full = s.token_ids[start:start + size], []
                for token in tokens:
                    full.append(before := content(before, token))
                contents[key := block_key(key, tokens)] = full
        for key, full in contents.items():
            block = self.pool.get_cached_block(key)
            if block is not None:
                found += 1
                assert all(memory[block * size:(block + 1) * size] == full for memory in self.ranks.memory)
        # A draft that went beyond its text's end may have filled one more.
        assert found == self.pool.num_cached or found < self.pool.num_cached and any(
            s.metrics.num_accepted_tokens for s in self.expected)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.busy():
            self.one_step()
        self.tokens_are_right()
        assert all(s.finish_reason for s in self.expected)
        assert self.pool.num_free == self.pool.num_blocks
        STEPS["preemptions"] += sum(s.metrics.preemptions for s in self.expected)
        STEPS["prefix hits"] += sum(s.metrics.prefix_hit_tokens > 0 for s in self.expected)
        STEPS["finished"] += len(self.expected)
        STEPS["drafted"] += sum(s.metrics.num_draft_tokens for s in self.expected)
        STEPS["accepted"] += sum(s.metrics.num_accepted_tokens for s in self.expected)


def test_random_load():
    """At least 2,000 engine steps, and each of the hard things really happened."""
    for name in STEPS:
        STEPS[name] = 0
    # Nothing is shrunk: that takes minutes, and what went wrong is said by the assertion.
    while STEPS["engine steps"] < 2000 or min(STEPS.values()) < 20:
        run_state_machine_as_test(Load, settings=settings(phases=[Phase.generate], max_examples=25,
                                                          stateful_step_count=40, deadline=None))
    print(STEPS)

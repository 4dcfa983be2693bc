"""The scheduler under random load: no token lost, repeated or swapped, no block leaked."""

import hypothesis.strategies as st
import pytest
from helpers_engine import EOS, VOCAB, RanksFailed, TokenRanks, one_at_a_time
from hypothesis import settings
from hypothesis.stateful import (RuleBasedStateMachine, initialize, invariant, precondition, rule,
                                 run_state_machine_as_test)

from tplab.engine import Engine, SamplingParams
from tplab.engine.errors import RequestError

STEPS = {"engine steps": 0, "preemptions": 0, "prefix hits": 0, "aborted": 0, "failed steps": 0,
         "restarts": 0, "finished": 0}


# Beginnings that many share, ends of their own.
PROMPTS = st.builds(lambda base, cut, end: ([base, 2, 3, 4] * 3)[:cut] + end, st.sampled_from([1, 5]),
                    st.sampled_from([0, 1, 6, 9, 12]), st.lists(st.integers(1, 9), min_size=1, max_size=3))


class Load(RuleBasedStateMachine):
    """Requests arrive, end, are cancelled, meet full caches and failing ranks, in any order."""

    @initialize(num_blocks=st.integers(3, 12), block_size=st.sampled_from([1, 2, 3, 4, 5]), seqs=st.integers(1, 5),
                budget=st.sampled_from([1, 2, 3, 7, 20]), prefix=st.booleans(), size=st.integers(1, 2))
    def make(self, num_blocks, block_size, seqs, budget, prefix, size):
        self.ranks = TokenRanks(size, num_blocks, block_size)
        self.engine = Engine(self.ranks, vocab_size=VOCAB, eos_token_ids=(EOS,), max_model_len=30,
                             num_blocks=num_blocks, block_size=block_size, max_num_seqs=seqs,
                             max_num_batched_tokens=budget, enable_prefix_caching=prefix, strict=True)
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
                assert len(prompt) + max_tokens - 1 > self.engine.pool.num_blocks * self.engine.pool.block_size
                continue
            self.expected[sequence] = one_at_a_time(prompt, min(max_tokens, 30 - len(prompt)), stop, ignore_eos)

    def busy(self):
        return hasattr(self, "engine") and self.engine.scheduler.has_unfinished

    @precondition(busy)
    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            if self.busy():
                self.engine.step()
                STEPS["engine steps"] += 1

    @precondition(busy)
    @rule(which=st.integers(0, 100))
    def cancel(self, which):
        unfinished = [s for s in self.expected if s.finish_reason is None]
        self.engine.finish(unfinished[which % len(unfinished)], "abort")
        STEPS["aborted"] += 1

    @precondition(busy)
    @rule(rank=st.integers(0, 1), lost=st.booleans())
    def ranks_fail(self, rank, lost):
        self.ranks.fail_after = min(rank, self.ranks.size - 1)
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

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.busy():
            self.engine.step()
            STEPS["engine steps"] += 1
        self.tokens_are_right()
        assert all(s.finish_reason for s in self.expected)
        assert self.engine.pool.num_free == self.engine.pool.num_blocks
        STEPS["preemptions"] += sum(s.metrics.preemptions for s in self.expected)
        STEPS["prefix hits"] += sum(s.metrics.prefix_hit_tokens > 0 for s in self.expected)
        STEPS["finished"] += len(self.expected)


def test_random_load():
    """At least 5,000 engine steps, and each of the hard things really happened."""
    for name in STEPS:
        STEPS[name] = 0
    while STEPS["engine steps"] < 5000 or min(STEPS.values()) < 50:
        run_state_machine_as_test(Load, settings=settings(max_examples=50, stateful_step_count=40, deadline=None))
    print(STEPS)

"""The scheduler, step by step: how many tokens each sequence gets, which wait, which are preempted. No model."""

import random

import pytest
from helpers.engine import make_engine, one_at_a_time

from tplab.engine.step import ModelRunnerOutput
from tplab.llm import SamplingParams


class Steps:
    """A scheduler with requests that go on until they are ended; every step draws token 7 for each that is due."""

    def __init__(self, *prompts, **options):
        self.engine = make_engine(**options)
        self.scheduler, self.pool = self.engine.scheduler, self.engine.pool
        self.sequences = [self.add(prompt) for prompt in prompts]

    def add(self, prompt):
        """A prompt as token ids, or so many tokens of its own."""
        if isinstance(prompt, int):
            prompt = [1 + self.engine.scheduler.step_number % 3, *[2 + prompt % 5] * (prompt - 1)]
        return self.engine.add(prompt, SamplingParams(temperature=0, max_tokens=1))  # the tests do not count them

    def step(self):
        """One step; its record."""
        scheduled = self.scheduler.schedule()
        due = {r.request_id: 7 for r in scheduled.requests if r.sampling is not None}
        advanced = self.scheduler.update_from_output(scheduled, ModelRunnerOutput(due, {}))
        assert [s.request_id for s in advanced] == list(due)
        return self.record

    @property
    def record(self):
        return self.scheduler.history[-1]

    def steps(self, count):
        return [self.step() for _ in range(count)]

    def waiting(self):
        return [s.request_id for s in self.scheduler.waiting]

    def running(self):
        return [s.request_id for s in self.scheduler.running]


def test_one_budget_for_all():
    """Running sequences come first, in order of admission, and what they take is not there for newcomers."""
    run = Steps(3, 5, 6, max_num_batched_tokens=4)
    records = run.steps(7)
    assert [r.tokens for r in records] == [{0: 3, 1: 1}, {0: 1, 1: 3}, {0: 1, 1: 1, 2: 2}, {0: 1, 1: 1, 2: 2},
                                           {0: 1, 1: 1, 2: 2}, {0: 1, 1: 1, 2: 1}, {0: 1, 1: 1, 2: 1}]
    assert [r.admitted for r in records] == [(0, 1), (), (2,), (), (), (), ()]
    assert [r.prefill for r in records] == [(0, 1), (1,), (1, 2), (2,), (2,), (), ()]
    assert [r.step_number for r in records] == [1, 2, 3, 4, 5, 6, 7]


def test_no_sequence_is_admitted_in_a_step_that_preempted():
    """Blocks of 2: after two steps both need a third block, and none is there. What the one gives back stays free."""
    run = Steps(3, 3, num_blocks=5, block_size=2, enable_prefix_caching=False)
    first, second = run.sequences
    records = run.steps(3)
    assert [r.preempted for r in records] == [(), (), (1,)]
    small = run.add(1)
    assert records[2].tokens == {0: 1} and records[2].admitted == ()
    assert second.num_computed_tokens == 0 and not second.block_table.block_ids and second.metrics.preemptions == 1
    assert first.metrics.preemptions == 0 and second.num_tokens == 5, "its tokens are kept"
    assert run.waiting() == [1, small.request_id], "and it stands before those that came later"
    assert run.pool.num_used == 3 == records[2].used_blocks


def test_a_prefix_hit_is_counted_and_not_computed_again():
    run = Steps([1, 2, 3, 4, 5, 6, 7, 8, 9], block_size=4)
    run.step()
    other = run.add([1, 2, 3, 4, 5, 6, 7, 8])  # the block with the last token is never taken
    longer = run.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 9])
    record = run.step()
    assert record.tokens == {0: 1, other.request_id: 4, longer.request_id: 2}
    assert other.metrics.prefix_hit_tokens == 4 and longer.metrics.prefix_hit_tokens == 8
    assert other.block_table.block_ids[0] == run.sequences[0].block_table.block_ids[0]


def test_after_a_restart_of_the_ranks_all_requests_wait_in_order():
    run = Steps(3, 2, 4, 2, max_num_seqs=3, block_size=2)
    run.steps(3)
    assert run.running() == [0, 1, 2] and run.waiting() == [3] and run.pool.num_cached > 0
    run.engine.recompute()
    assert run.running() == [] and run.waiting() == [0, 1, 2, 3]
    assert run.pool.num_used == 0 and run.pool.num_cached == 0, "nothing is found that the ranks have lost"
    assert [s.metrics.preemptions for s in run.sequences] == [1, 1, 1, 0]
    assert run.step().tokens == {0: 6, 1: 5, 2: 7}


def test_what_a_scheduler_prints():
    run = Steps(3, 2, max_num_seqs=1)
    run.steps(2)
    assert str(run.scheduler).splitlines() == [
        "step 2: 1 running, 1 waiting, 1 of 64 blocks used",
        "    0 running   prompt    3 +   2 new, computed    4, blocks [0]",
        "    1 waiting   prompt    2 +   0 new, computed    0, blocks []"]
    run.scheduler.reset()
    assert "preempted" in str(run.scheduler)


# Several steps at once, where there is nothing to decide.


def params(max_tokens, **more):
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | more)


@pytest.mark.parametrize("options, max_tokens, is_waiting, ahead", [
    ({}, 20, False, 3), ({}, 20, True, 0), ({}, 6, False, 2), ({}, 5, False, 1), ({}, 4, False, 0),
    ({"num_blocks": 5}, 9, False, 3), ({"num_blocks": 4}, 9, False, 0), ({"num_speculative_tokens": 2}, 20, False, 0)])
def test_how_many_steps_need_no_scheduling(options, max_tokens, is_waiting, ahead):
    """Two sequences that have drawn three tokens each, in blocks of four: six and five slots are needed now."""
    engine = make_engine(max_num_seqs=2, **options)
    sequences = [engine.add(prompt, params(max_tokens)) for prompt in ([1, 2, 3], [4, 5])]
    if is_waiting:
        engine.add([6], params(20))
    engine.step(4), engine.step(), engine.step()
    output = engine.scheduler.schedule(4)
    assert output.num_lookahead_steps == ahead or "num_speculative_tokens" in options and not output.num_lookahead_steps
    if ahead:
        assert [len(s.block_table.block_ids) for s in sequences] == [-(-(n + ahead) // 4) for n in (6, 5)]
        following = output.next_step()
        assert following.num_lookahead_steps == ahead - 1 and following.step_number == output.step_number + 1
        for now, then in zip(output.requests, following.requests, strict=True):
            assert then.segment == now.segment._replace(start=now.segment.start + 1) and then.token_ids == ()
            assert then.sampling == now.sampling._replace(position=now.sampling.position + 1)


@pytest.mark.parametrize("seed", range(12))
def test_requests_that_come_and_go_get_their_tokens(seed):
    """Any lengths at any time, few blocks, shared beginnings, ends of all kinds; up to eight steps in a call."""
    draw = random.Random(seed)
    engine = make_engine(draw.choice([12, 20, 64]), max_num_seqs=draw.choice([2, 5]), ranks=2, strict=seed % 2 == 0,
                         enable_prefix_caching=draw.random() < 0.5)
    beginning, wanted = [draw.randrange(11) for _ in range(9)], {}
    while len(wanted) < 12 or engine.scheduler.has_unfinished:
        if draw.random() < 0.15 and len(wanted) < 12:
            prompt = beginning[:draw.randrange(10)] + [draw.randrange(11) for _ in range(draw.randrange(1, 8))]
            p = params(draw.randrange(1, 25), stop_token_ids=draw.choice([(), (5,)]), ignore_eos=draw.random() < 0.5)
            wanted[engine.add(prompt, p)] = one_at_a_time(prompt, p.max_tokens, p.stop_token_ids, p.ignore_eos)
        engine.step(draw.choice([1, 3, 8]))
    assert all(sequence.output_token_ids == tokens for sequence, tokens in wanted.items())
    steps = [record.step_number for record in engine.scheduler.history]
    assert engine.pool.num_used == 0 and steps == list(range(1, engine.scheduler.step_number + 1))

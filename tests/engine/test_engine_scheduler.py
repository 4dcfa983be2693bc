"""The scheduler, step by step: how many tokens each sequence gets, which wait, which are preempted. No model."""

import pytest
from helpers.engine import make_engine

from tplab.engine import EngineError
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


def test_a_budget_smaller_than_the_number_running():
    """The later ones wait for a turn; no sequence is scheduled twice."""
    run = Steps(1, 1, 1, max_num_batched_tokens=2)
    assert [r.tokens for r in run.steps(3)] == [{0: 1, 1: 1}] * 3
    assert run.waiting() == [2] and run.running() == [0, 1]
    run.engine.finish(run.sequences[0], "abort")
    assert run.step().tokens == {1: 1, 2: 1}


def test_max_num_seqs_run_and_one_more_waits():
    run = Steps(2, 2, 2, max_num_seqs=2)
    assert run.step().admitted == (0, 1) and run.waiting() == [2]
    run.engine.finish(run.sequences[1], "stop")
    record = run.step()
    assert record.admitted == (2,) and record.tokens == {0: 1, 2: 2} and run.running() == [0, 2]


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


def test_a_preempting_step_leaves_the_queue_alone_even_where_there_is_room():
    """Three run, the last loses its place for the first; a piece of it, and the small one behind it, would fit."""
    run = Steps(4, 4, 8, 1, num_blocks=8, block_size=2, max_num_seqs=3, enable_prefix_caching=False)
    assert run.step().admitted == (0, 1, 2) and run.waiting() == [3]
    run.scheduler.max_num_batched_tokens = 5
    record = run.step()
    assert record.preempted == (2,) and record.tokens == {0: 1, 1: 1} and record.admitted == ()
    assert run.waiting() == [2, 3] and run.pool.num_free == 2


def test_no_newcomer_overtakes_a_preempted_one():
    """The preempted sequence needs more than is free; one that would fit has to wait after it."""
    run = Steps(4, 4, 8, 1, num_blocks=10, block_size=2, max_num_seqs=3, enable_prefix_caching=False)
    records = run.steps(3)
    assert [r.admitted for r in records] == [(0, 1, 2), (), ()] and [r.preempted for r in records] == [(), (2,), ()]
    assert run.waiting() == [2, 3] and run.pool.num_free == 4
    run.engine.finish(run.sequences[0], "abort")
    assert run.step().admitted == (2, 3), "in their order"


def test_a_sequence_that_runs_last_loses_its_own_place():
    run = Steps(4, 4, num_blocks=5, block_size=2, enable_prefix_caching=False)
    run.step()
    run.engine.pool.get_new_block()  # the last block is in use elsewhere
    run.engine.finish(run.sequences[0], "abort")
    held = [run.pool.get_new_block() for _ in range(run.pool.num_free)]
    assert run.step().preempted == (1,) and run.record.tokens == {}
    run.pool.free_blocks(held)
    assert run.step().admitted == (1,)


def test_several_lose_their_place_last_first_and_keep_their_order():
    """The first one needs what the others hold; the second one has none after it and is preempted itself."""
    run = Steps(3, 2, 2, 2, num_blocks=6, block_size=2, enable_prefix_caching=False)
    run.step()
    assert run.running() == [0, 1, 2, 3] and run.pool.num_free == 1
    first = run.sequences[0]
    first.token_ids.extend([5] * 5)  # nine tokens, of which three are computed
    record = run.step()
    assert record.preempted == (3, 2, 1) and run.waiting() == [1, 2, 3] and record.tokens == {0: 6}


def test_reading_again_is_prefill_and_not_decoding():
    """Until only its last token is missing, as when it had never lost its place."""
    run = Steps(3, max_num_batched_tokens=2)
    records = run.steps(5)
    assert [bool(r.prefill) for r in records] == [True, True, False, False, False]
    run.scheduler.reset()
    assert run.sequences[0].num_tokens == 7
    records = run.steps(5)
    assert [r.tokens[0] for r in records] == [2, 2, 2, 1, 1]
    # The fourth chunk is the one token that decoding would have computed.
    assert [bool(r.prefill) for r in records] == [True, True, True, False, False]


def test_the_last_token_of_a_prompt_is_read_not_written():
    run = Steps(3, 1, max_num_batched_tokens=3)
    assert run.step().prefill == (0,)
    assert run.step().prefill == (1,)
    assert run.step().prefill == ()


def test_ones_own_blocks_are_no_prefix_hit():
    """After it lost its place it finds what it had computed itself; that says nothing about its prompt."""
    run = Steps(9, block_size=4)
    run.steps(4)
    run.scheduler.reset()
    run.pool.reset_prefix_cache()
    run.steps(2)
    (sequence,) = run.sequences
    sequence_blocks = list(sequence.block_table.block_ids)
    run.scheduler._preempt(run.scheduler.running.pop())
    record = run.step()
    assert sequence.block_table.block_ids[:3] == sequence_blocks[:3]
    assert record.tokens == {0: sequence.num_tokens - 1 - 12}
    assert sequence.metrics.prefix_hit_tokens == 0 and sequence.metrics.preemptions == 2


def test_a_prefix_hit_is_counted_and_not_computed_again():
    run = Steps([1, 2, 3, 4, 5, 6, 7, 8, 9], block_size=4)
    run.step()
    other = run.add([1, 2, 3, 4, 5, 6, 7, 8])  # the block with the last token is never taken
    longer = run.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 9])
    record = run.step()
    assert record.tokens == {0: 1, other.request_id: 4, longer.request_id: 2}
    assert other.metrics.prefix_hit_tokens == 4 and longer.metrics.prefix_hit_tokens == 8
    assert other.block_table.block_ids[0] == run.sequences[0].block_table.block_ids[0]


def test_a_block_that_the_step_computes_already_is_waited_for():
    """A request that needs it is admitted a step later and finds it; those behind keep their places."""
    first, alike, other = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 10, 9], [9] * 4
    run = Steps(first, alike, other, block_size=4, max_num_batched_tokens=16)
    assert [r.tokens for r in run.steps(2)] == [{0: 9}, {0: 1, 1: 2, 2: 4}]
    assert [s.metrics.prefix_hit_tokens for s in run.sequences] == [0, 8, 0]


@pytest.mark.parametrize("options", [{"enable_prefix_caching": False}, {"block_size": 16}])
def test_no_sequence_waits_for_a_block_that_will_not_be_found(options):
    run = Steps([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 10], **{"block_size": 4, **options})
    assert run.step().tokens == {0: 9, 1: 9}


def test_a_prompt_whose_last_token_ends_the_block_does_not_wait_for_it():
    """The last token must be computed, so the block would not be taken."""
    run = Steps([1, 2, 3, 4], [1, 2, 3, 4], block_size=4)
    assert run.step().tokens == {0: 4, 1: 4}


def test_a_chunk_that_does_not_reach_the_end_of_the_block_is_not_waited_for():
    """It fills no block that the other could find."""
    run = Steps([1, 2, 3], [1, 2, 3, 4, 5], block_size=4, max_num_batched_tokens=8)
    assert run.step().tokens == {0: 3, 1: 5}


def test_a_block_filled_by_drawn_tokens_is_waited_for_as_well():
    run = Steps([1, 2, 3], block_size=4)
    run.step()  # draws a 7, and the step that computes it fills the block
    later = run.add([1, 2, 3, 7, 8])
    assert [r.tokens for r in run.steps(2)] == [{0: 1}, {0: 1, later.request_id: 1}]


def test_found_blocks_without_a_user_are_not_handed_out_as_well():
    """Three of four blocks are found and free: a sequence that needs two more has to wait, one that needs one fits."""
    run = Steps(list(range(1, 8)), num_blocks=5, block_size=2)
    run.step()
    run.engine.finish(run.sequences[0], "abort")
    assert run.pool.num_free == 5 and run.pool.num_cached == 3
    other = run.pool.get_new_block()
    too_long = run.add([1, 2, 3, 4, 5, 6, 9, 9, 9])
    assert run.step().tokens == {} and run.waiting() == [too_long.request_id] and run.pool.num_free == 4
    assert too_long.block_table.block_ids == [] and too_long.num_computed_tokens == 0
    run.pool.free_blocks([other])
    assert run.step().tokens == {too_long.request_id: 3} and run.pool.num_free == 0


def test_found_blocks_in_use_cost_nothing():
    """One block is free; a prompt whose three full blocks are in use already needs just that one."""
    run = Steps(list(range(1, 8)), num_blocks=5, block_size=2)
    run.step()
    other = run.add([1, 2, 3, 4, 5, 6, 9])
    assert run.step().tokens == {0: 1, other.request_id: 1} and run.pool.num_free == 0


def test_only_the_first_in_line_is_looked_at():
    """It does not fit, so the sequences after it wait too."""
    run = Steps(5, 8, 1, num_blocks=6, block_size=2, enable_prefix_caching=False)
    assert run.step().tokens == {0: 5} and run.waiting() == [1, 2]


def test_the_budget_decides_how_much_must_fit():
    """Of a long prompt only the first chunk needs blocks now."""
    run = Steps(3, 8, num_blocks=5, block_size=2, max_num_batched_tokens=5, enable_prefix_caching=False)
    assert run.step().tokens == {0: 3, 1: 2} and run.pool.num_used == 3


def test_after_a_restart_of_the_ranks_all_requests_wait_in_order():
    run = Steps(3, 2, 4, 2, max_num_seqs=3, block_size=2)
    run.steps(3)
    assert run.running() == [0, 1, 2] and run.waiting() == [3] and run.pool.num_cached > 0
    run.engine.recompute()
    assert run.running() == [] and run.waiting() == [0, 1, 2, 3]
    assert run.pool.num_used == 0 and run.pool.num_cached == 0, "nothing is found that the ranks have lost"
    assert [s.metrics.preemptions for s in run.sequences] == [1, 1, 1, 0]
    assert run.step().tokens == {0: 6, 1: 5, 2: 7}


def test_every_step_is_remembered():
    run = Steps(1)
    found = [[r.step_number for r in records] for records in (run.steps(40), run.scheduler.history)]
    assert run.scheduler.history.maxlen == 10_000, "an engine that runs for days must not keep them all"
    assert found == [list(range(1, 41))] * 2


def test_ending_gives_back_what_it_held_wherever_it_stands():
    run = Steps(3, 3, 3, max_num_seqs=2)
    run.step()
    running, other, waiting = run.sequences
    run.scheduler.finish(waiting, "abort")
    run.scheduler.finish(running, "stop")
    run.scheduler.finish(running, "abort")
    assert [s.finish_reason for s in run.sequences] == ["stop", None, "abort"]
    assert run.running() == [1] and run.waiting() == [] and run.pool.num_used == 1 and run.scheduler.has_unfinished
    run.scheduler.reset()
    assert run.scheduler.has_unfinished
    run.scheduler.finish(other, "abort")
    assert not run.scheduler.has_unfinished and run.pool.num_free == run.pool.num_blocks


def test_most_blocks_are_counted_over_all_lives():
    run = Steps(6, block_size=2)
    run.steps(4)
    assert run.sequences[0].metrics.blocks_used == 5
    run.sequences[0].block_table.free()
    run.sequences[0].num_computed_tokens = 0
    run.scheduler.running.clear()
    run.sequences[0].token_ids = run.sequences[0].token_ids[:3]
    run.scheduler.waiting.append(run.sequences[0])
    run.step()
    assert run.sequences[0].metrics.blocks_used == 5


def test_full_blocks_are_found_as_soon_as_they_are_computed_and_not_before():
    run = Steps([1, 2, 3, 4, 5, 6, 7, 8, 9], block_size=2, max_num_batched_tokens=5)
    scheduled = run.scheduler.schedule()
    assert run.pool.num_cached == 0
    run.scheduler.update_from_output(scheduled, ModelRunnerOutput({}, {}))
    assert run.pool.num_cached == 2


def test_a_table_for_people():
    run = Steps(3, 2, max_num_seqs=1)
    run.steps(2)
    first, second = run.scheduler.rows()
    assert first == {"sequence": 0, "status": "running", "prompt": 3, "output": 2, "computed": 4, "block table": [0]}
    assert second["status"] == "waiting" and second["block table"] == []
    assert str(run.scheduler).splitlines()[0] == "step 2: 1 running, 1 waiting, 1 of 64 blocks used"
    run.scheduler.reset()
    assert run.scheduler.rows()[0]["status"] == "preempted"


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "4", None])
@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens"])
def test_bounds_that_cannot_be(name, wrong):
    with pytest.raises(EngineError, match=f"{name} must be a whole number from 1 up"):
        make_engine(**{name: wrong})

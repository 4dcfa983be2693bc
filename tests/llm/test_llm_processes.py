"""The engine on real rank processes, and what happens when one of them goes."""

import gc
import os
import signal
import threading
import time

import pytest
from helpers.checkpoints import make_checkpoint

from tplab import fast
from tplab.engine import EngineError, GenerationError
from tplab.llm import LLM, SamplingParams
from tplab.patch import Patch, original
from tplab.pool import RankPool
from tplab.ranks import RankError, rank, state

pytestmark = pytest.mark.pool

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("processes") / "m", heads=6, kv_heads=3, hidden=48,
                           max_positions=4096)


@pytest.fixture(scope="module")
def pool():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def expected(folder):
    with LLM(folder, 1, logical=True) as llm:
        return tokens(llm.generate(PROMPTS, PARAMS))


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def engines_on_ranks():
    return [key for key in state if str(key).startswith("engine ")]


def test_processes_give_the_same_tokens(folder, pool, expected):
    with LLM(folder, 2, pool=pool, strict=True) as llm:
        assert tokens(llm.generate(PROMPTS, PARAMS)) == expected
        sampled = SamplingParams(temperature=1.0, seed=4, max_tokens=8, top_p=0.9, logprobs=1)
        assert len(llm.generate(PROMPTS, sampled)[0].outputs[0].logprobs) == 8
        assert pool.run(engines_on_ranks) == [[llm.engine.executor.key]] * 2
    assert pool.run(engines_on_ranks) == [[], []]


def same_norm(self, x):
    return original("tplab.model.norm.RMSNorm.forward")(self, x)


def test_the_ranks_get_one_command_a_step_also_from_a_stream(folder, pool):
    """With a patch, so that no command holds several steps."""
    with LLM(folder, 2, pool=pool, patches=[Patch("tplab.model.norm.RMSNorm.forward", same_norm)]) as llm:
        for call in (llm.generate, llm.stream):
            commands, steps = pool.number_of_runs, llm.scheduler.step_number
            assert list(call(PROMPTS, PARAMS))
            assert pool.number_of_runs - commands == llm.scheduler.step_number - steps > 0


def test_a_thrown_away_engine_is_forgotten_by_its_own_pool(folder, pool):
    """Whichever pool loads next, and also where the load itself had failed on one rank."""
    def fails_on_rank_1(self, *arguments):
        if rank() == 1:
            raise MemoryError
    with pytest.raises(RankError, match="rank 1 raised MemoryError"):
        LLM(folder, 2, pool=pool, patches=[Patch("tplab.cache.paged.PagedKVCache.__init__", fails_on_rank_1)])
    first = LLM(folder, 2, pool=pool)
    del first
    gc.collect()
    with RankPool(1) as other:
        LLM(folder, 1, pool=other).close()
    with LLM(folder, 2, pool=pool) as last:
        assert pool.run(engines_on_ranks) == [[last.engine.executor.key]] * 2


def test_patches_hold_for_one_engine_only(folder, pool, expected):
    shifted = Patch("tplab.engine.runner.token_positions",
                    lambda segment: range(segment.start + 1, segment.start + 1 + segment.count))
    with LLM(folder, 2, pool=pool, patches=[shifted]) as broken, LLM(folder, 2, pool=pool) as clean:
        assert tokens(clean.generate(PROMPTS, PARAMS)) == expected
        broken.generate(PROMPTS, PARAMS)
        assert tokens(clean.generate(PROMPTS, PARAMS)) == expected


def kill_rank_1_at(step):
    """A step that ends rank 1 in its fifth forward pass, once: the flag is a file, since the process is gone."""
    def visible_length(start, count):
        if start > 6 and rank() == 1 and not os.path.exists(step):
            open(step, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return start + count

    return Patch("tplab.cache.paged.visible_length", visible_length)


def test_a_killed_rank_costs_nothing_that_was_generated(folder, pool, expected, tmp_path):
    with LLM(folder, 2, pool=pool, patches=[kill_rank_1_at(str(tmp_path / "killed"))]) as llm:
        with pytest.raises(GenerationError, match=r"rank 1 died \(SIGKILL\)") as caught:
            llm.generate(PROMPTS, PARAMS)
        partial = tokens(caught.value.outputs)
        assert [len(part) for part in partial] == [3, 3] and all(full[:3] == part
                                                                 for full, part in zip(expected, partial))
        assert isinstance(caught.value.__cause__, RankError)
        assert not llm.has_unfinished_requests and llm.engine.pool.num_used == 0
        assert tokens(llm.generate(PROMPTS, PARAMS)) == expected


def test_stepping_goes_on_where_the_ranks_died(folder, pool, expected, tmp_path):
    """These requests were not given up, so they are computed again and end as if nothing had happened."""
    with LLM(folder, 2, pool=pool, patches=[kill_rank_1_at(str(tmp_path / "killed"))], strict=True) as llm:
        numbers = [llm.add_request(prompt, PARAMS) for prompt in PROMPTS]
        finished, failures = {}, 0
        while llm.has_unfinished_requests:
            try:
                for output in llm.step():
                    finished[output.request_id] = output
            except RankError:
                failures += 1
        assert failures == 1 and tokens(finished[n] for n in numbers) == expected


def test_ranks_that_were_restarted_between_calls(folder, pool, expected):
    with LLM(folder, 2, pool=pool) as llm:
        llm.generate(PROMPTS, PARAMS)
        os.kill(pool.pids[0], signal.SIGKILL)
        while pool.pids[0] is not None:  # on a busy machine it takes a while until that is known
            time.sleep(0.01)
        assert tokens(llm.generate(PROMPTS, PARAMS)) == expected


def test_an_interrupt_leaves_a_working_engine(folder, pool, expected):
    with LLM(folder, 2, pool=pool) as llm:
        endless = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
        timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, endless)
        assert not llm.has_unfinished_requests and llm.engine.pool.num_used == 0
        assert tokens(llm.generate(PROMPTS, PARAMS)) == expected


def test_a_pool_of_another_size(folder, pool):
    with pytest.raises(EngineError, match="the pool has 2 ranks, tensor_parallel_size is 3"):
        LLM(folder, 3, pool=pool)
    with pytest.raises(EngineError, match="the pool has 2 ranks, tensor_parallel_size is 1"):
        LLM(folder, 1, pool=pool)


@pytest.mark.parametrize("options", [{"enforce_eager": True}, {"strict": True}, {}], ids=str)
def test_several_steps_in_a_call_change_no_token(pool, options):
    """On the fast path only, a call of the ranks can be several steps: sequences end and begin within them."""
    prompts = ["Once upon", "The old fox", "A", "In the deep forest a small"]
    params = [SamplingParams(temperature=0, max_tokens=30), SamplingParams(temperature=0.8, seed=5, max_tokens=21),
              SamplingParams(temperature=0, max_tokens=40, logprobs=0),
              SamplingParams(temperature=0, max_tokens=33, ignore_eos=True, stop=["the"])]
    with LLM("fable", 2, logical=True) as llm:
        expected = [(o.text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in llm.generate(prompts, params)]
    with LLM("fable", 2, pool=pool, block_size=4, num_blocks=60, max_model_len=200, **options) as llm:
        before = pool.number_of_runs
        outputs = llm.generate(prompts, params)
        calls, steps = pool.number_of_runs - before, llm.scheduler.step_number
        assert [(o.text, o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in outputs] == expected
        assert [record.step_number for record in llm.scheduler.history] == list(range(1, steps + 1))
        assert llm.engine.pool.num_used == 0 and calls <= steps
        if options or fast.is_off():
            assert calls == steps

"""Steps that the ranks compute before they are asked for: the same tokens in fewer calls, whatever happens meanwhile.

On pretended ranks first, on which a wrong place, position or token changes what comes out; then on real ones.
"""

import itertools
import random
from types import SimpleNamespace

import pytest
from helpers.checkpoints import make_checkpoint
from helpers.engine import EOS, TokenRanks, make_engine, one_at_a_time

from tplab.cache import Segment
from tplab.engine.core import Engine
from tplab.engine.errors import EngineError
from tplab.engine.runner import ModelRunner, execute_steps_from_json, has_runner
from tplab.engine.step import ModelRunnerOutput, SamplingMetadata, ScheduledRequest, SchedulerOutput
from tplab.fast import SWITCH
from tplab.llm import LLM, SamplingParams, multi_step
from tplab.llm.executor import PoolExecutor, load_for
from tplab.patch import Patch, applied


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Every call takes a millisecond, whatever else the machine has to do."""
    readings = itertools.count()
    monkeypatch.setattr("tplab.llm.executor.time", SimpleNamespace(perf_counter=lambda: next(readings) / 1000))


class PretendedPool:
    """Carries out an executor's runs on :class:`TokenRanks`. ``calls``: how many steps each of them computed."""

    closed = False

    def __init__(self, ranks: TokenRanks):
        self.ranks, self.size, self.number_of_runs, self.calls, self.told = ranks, ranks.size, 0, [], []

    def run(self, fn, *arguments, timeout=None):
        self.number_of_runs += 1
        if fn is not execute_steps_from_json:
            assert fn in (has_runner, load_for)
            return [True] * self.size
        step = SchedulerOutput.from_json(arguments[1])
        self.told.append(step)
        found = [self.ranks.execute_model(step)]
        while step.num_lookahead_steps and any(token != EOS for token in found[-1][0].sampled_token_ids.values()):
            step = step.next_step()
            found.append(self.ranks.execute_model(step))
        self.calls.append(len(found))
        return [list(of_rank) for of_rank in zip(*found, strict=True)]


def multi_step_engine(steps=4, **options) -> Engine:
    engine = make_engine(num_scheduler_steps=steps, **options)
    pool = PretendedPool(engine.executor)
    engine.executor = PoolExecutor(engine.executor.size, pool)
    engine.executor.load()
    return engine


def params(max_tokens=12, **given):
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | given)


def finish(engine):
    for _ in range(500):
        if not engine.scheduler.has_unfinished:
            return
        engine.step()
    raise AssertionError("no end")


def calls(engine):
    return engine.executor.pool.calls


ENDLESS = next([n // 11, n % 11] for n in range(121) if len(one_at_a_time([n // 11, n % 11], 12)) == 12)


@pytest.mark.parametrize("steps, expected", [(1, [1] * 12), (2, [1, 2, 2, 2, 2, 2, 1]), (4, [1, 2, 4, 4, 1]),
                                             (9, [1, 2, 4, 5])])
def test_so_many_steps_for_a_call(steps, expected):
    """The prompt is a call of its own. They go further with each call that went well, and never past the end."""
    engine = multi_step_engine(steps)
    sequence = engine.add(ENDLESS, params())
    finish(engine)
    assert sequence.output_token_ids == one_at_a_time(ENDLESS, 12) and calls(engine) == expected
    assert engine.scheduler.step_number == 12 and len(engine.scheduler.history) == 12, "the scheduler sees every step"
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("seed", range(60))
def test_requests_that_come_and_go_get_their_tokens(seed):
    """Requests of any length at any time, few blocks, shared beginnings, ends of all kinds, other work on the ranks."""
    rnd = random.Random(seed)
    engine = multi_step_engine(rnd.choice([2, 4, 8]), num_blocks=rnd.choice([12, 20, 64]),
                               max_num_seqs=rnd.choice([2, 5]), ranks=2,
                               enable_prefix_caching=rnd.random() < 0.5, strict=seed % 3 == 0)
    beginning, wanted = [rnd.randrange(11) for _ in range(9)], {}
    for _ in range(120):
        if rnd.random() < 0.15 and len(wanted) < 12:
            prompt = beginning[:rnd.randrange(10)] + [rnd.randrange(11) for _ in range(rnd.randrange(1, 8))]
            given = params(rnd.randrange(1, 25), stop_token_ids=rnd.choice([(), (5,)]), ignore_eos=rnd.random() < 0.5)
            wanted[engine.add(prompt, given)] = one_at_a_time(prompt, given.max_tokens, given.stop_token_ids,
                                                              given.ignore_eos)
        if rnd.random() < 0.05:
            engine.executor.pool.number_of_runs += 1
        if rnd.random() < 0.05:
            assert engine.executor.loaded()
        if rnd.random() < 0.03:
            engine.executor.pool.ranks.lose_everything()
            engine.recompute()
        if engine.scheduler.running and rnd.random() < 0.02:
            aborted = rnd.choice(engine.scheduler.running)
            assert aborted.output_token_ids == wanted[aborted][:len(aborted.output_token_ids)]
            wanted[aborted] = aborted.output_token_ids
            engine.finish(aborted, "abort")
        engine.step()
    finish(engine)
    assert {s.request_id: s.output_token_ids for s in wanted} == {s.request_id: w for s, w in wanted.items()}
    assert engine.pool.num_used == 0 and max(calls(engine)) > 1


def started(steps=4, **options):
    """Two sequences that decode, for which three steps have been computed ahead."""
    engine = multi_step_engine(steps, **options)
    sequences = [engine.add([3, 1, 4], params(40)), engine.add([1, 5], params(40))]
    while not calls(engine) or calls(engine)[-1] < steps:
        engine.step()
    return engine, sequences


def test_a_sequence_that_ends_costs_the_others_nothing_computed_ahead():
    engine, (first, second) = started()
    engine.finish(first, "abort")
    for _ in range(3):
        assert [s.request_id for s in engine.step()] == [second.request_id]
    assert calls(engine)[-1] == 4, "no call was needed"
    engine.step()
    assert len(calls(engine)) == 4 and calls(engine)[-1] == 4, "and they go as far as before"
    assert second.output_token_ids == one_at_a_time([1, 5], second.num_tokens - 2, ignore_eos=True)


@pytest.mark.parametrize("what", ["a newcomer", "other work on the ranks", "a patch"])
def test_what_was_computed_is_forgotten(what):
    """Ranks remember the tokens of a step that has not been: those of the last one are said to them."""
    engine, sequences = started()
    before = len(calls(engine))
    if what == "a newcomer":
        engine.add([2, 2], params(40))
    elif what == "other work on the ranks":
        engine.executor.pool.number_of_runs += 1
    patch = Patch("tplab.engine.runner.token_positions", lambda segment: range(segment.start, segment.start + 1))
    with applied(*[patch] * (what == "a patch")):
        engine.step()
        assert calls(engine)[before:] == [1], "they go no further than asked for"
        told = engine.executor.pool.told[-1].requests
        assert [request.token_ids for request in told[:2]] == [(s.token_ids[-2],) for s in sequences]
        if what == "a patch":
            engine.step(), engine.step()
            assert calls(engine)[before:] == [1, 1, 1], "as long as it is in force"
            del calls(engine)[before:-1]
            engine.executor._multi_step.most = 1
    for _ in range(7):
        engine.step()
    assert calls(engine)[before:] == [1, 2, 4, 4], "and further again by and by"
    for sequence, prompt in zip(sequences, ([3, 1, 4], [1, 5])):
        assert sequence.output_token_ids == one_at_a_time(prompt, len(sequence.output_token_ids), ignore_eos=True)


def test_code_on_the_ranks_between_steps_finds_one_step_at_a_time():
    engine, _ = started()
    before = len(calls(engine))
    for _ in range(5):
        engine.executor.pool.number_of_runs += 1
        engine.step()
    assert calls(engine)[before:] == [1] * 5


def test_another_pool_of_the_same_age_has_computed_nothing():
    engine, _ = started()
    engine.executor._pool = PretendedPool(engine.executor.pool.ranks)
    engine.executor._pool.number_of_runs = engine.executor._command
    engine.step()
    assert calls(engine) == [1]


def description(start=8, position=6, blocks=(4, 6, 9), token_ids=(), ids=(1, 2)):
    return SchedulerOutput(7, tuple(ScheduledRequest(n, Segment(start, 1, blocks, 3), token_ids, SamplingMetadata(
        0.0, 0, 1.0, 0.0, 0, position, None)) for n in ids), 3)


@pytest.mark.parametrize("asked, answer", [
    ({}, [1, 2]), ({"blocks": (4, 6, 9, 3)}, [1, 2]), ({"ids": (2,)}, [2]), ({"ids": ()}, []), ({"ids": (2, 3)}, None),
    ({"start": 10}, None), ({"position": 8}, None), ({"blocks": (4, 7, 9)}, None), ({"token_ids": (4,)}, None)],
    ids=str)
def test_only_what_was_computed_is_handed_out(asked, answer):
    """And only for the sequences asked for."""
    steps = multi_step.MultiStep()
    second = [ModelRunnerOutput({1: 5, 2: 6}, {1: "of 1", 2: "of 2"}, [[3], [4]], (1, 2))] * 2
    first = steps.keep(description(), [[ModelRunnerOutput({1: 3, 2: 4}, {}), each] for each in second], 0.1)
    assert first == [ModelRunnerOutput({1: 3, 2: 4}, {})] * 2
    found = steps.take(description(**{"start": 9, "position": 7} | asked))
    if answer is None:
        assert found is None and not steps.steps and steps.most == 0
        assert steps.description(description(9), alone=False).requests[1].token_ids == (4,), "the last one handed out"
    else:
        assert found == [ModelRunnerOutput({n: n + 4 for n in answer}, {n: f"of {n}" for n in answer},
                                           [[n + 2] for n in answer], tuple(answer))] * 2
        assert steps.description(description(10), alone=False).requests[1].token_ids == (), "which the ranks remember"


def test_a_look_at_the_ranks_forgets_nothing_unless_they_were_disturbed():
    engine, _ = started()
    before = len(calls(engine))
    assert engine.executor.loaded() and engine.step() and len(calls(engine)) == before
    engine.executor.pool.number_of_runs += 1
    assert engine.executor.loaded() and engine.step() and len(calls(engine)) == before + 1


def test_no_further_than_a_tenth_of_a_second(monkeypatch):
    readings = itertools.count()
    monkeypatch.setattr("tplab.llm.executor.time", SimpleNamespace(perf_counter=lambda: next(readings) / 25))
    engine = multi_step_engine(8)
    engine.add([3], params(30))
    finish(engine)
    assert max(calls(engine)) > 2, "0.04 s for a call"
    monkeypatch.setattr(multi_step, "LONGEST", 0.07)
    engine.add([3], params(30))
    finish(engine)
    assert calls(engine)[-29:] == [1] * 29, "two steps would take longer"


@pytest.mark.parametrize("given, answer", [
    ({}, 3), ({"waiting": True}, 0), ({"max_tokens": 6}, 2), ({"max_tokens": 5}, 1), ({"max_tokens": 4}, 0),
    ({"num_blocks": 5, "max_tokens": 9}, 3), ({"num_blocks": 4, "max_tokens": 9}, 0), ({"num_scheduler_steps": 1}, 0)],
    ids=str)
def test_how_far_is_the_schedulers_to_say(given, answer):
    """Two sequences that have drawn three tokens each, in blocks of four: six and five slots are wanted now."""
    options = {"num_blocks": 64, "num_scheduler_steps": 4} | {k: v for k, v in given.items() if k[0] == "n"}
    engine = make_engine(max_num_seqs=2, **options)
    for prompt in ([1, 2, 3], [4, 5]):
        engine.add(prompt, params(given.get("max_tokens", 20)))
    if "waiting" in given:
        engine.add([6], params(20))
    for _ in range(3):
        engine.step()
    output = engine.scheduler.schedule()
    assert output.num_lookahead_steps == answer
    assert [len(request.segment.block_ids) for request in output.requests] == [-(-(6 + answer) // 4),
                                                                               -(-(5 + answer) // 4)]
    if answer:
        following = output.next_step()
        assert following.num_lookahead_steps == answer - 1 and following.step_number == output.step_number + 1
        for now, then in zip(output.requests, following.requests, strict=True):
            assert then.segment == now.segment._replace(start=now.segment.start + 1) and then.token_ids == ()
            assert then.sampling == now.sampling._replace(position=now.sampling.position + 1)


def test_a_prompt_is_read_without_looking_ahead():
    engine = make_engine(num_scheduler_steps=4, max_num_batched_tokens=3)
    engine.add([1, 2], params(20))
    engine.step(), engine.step()
    engine.add([1, 2, 3, 4], params(20))
    ahead_of = []
    for _ in range(4):
        engine.step()
        ahead_of.append(engine.executor.told[-1].num_lookahead_steps)
    assert ahead_of == [0, 0, 3, 3], "two chunks of it"


def test_blocks_allocated_before_are_counted_when_they_are_used():
    engine = multi_step_engine(8)
    sequence = engine.add([1, 2, 3], params(4))
    finish(engine)
    alone = make_engine().add([1, 2, 3], params(4))
    assert sequence.metrics.blocks_used == 2 and alone.metrics.blocks_used == 0


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "two"])
def test_a_number_of_steps_that_cannot_be(wrong):
    with pytest.raises(EngineError, match="num_scheduler_steps must be a whole number from 1 up"):
        LLM("fable", logical=True, num_scheduler_steps=wrong)


# On real ranks.


PROMPTS = ["Once upon", "The old fox", "A", "In the deep forest a small"]
PARAMS = [SamplingParams(temperature=0, max_tokens=30), SamplingParams(temperature=0.8, seed=5, max_tokens=21),
          SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=40, logprobs=2),
          SamplingParams(temperature=0, max_tokens=33, ignore_eos=True, stop=["the"])]


def seen(outputs):
    return [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason, o.outputs[0].logprobs)
            for o in outputs]


def test_the_same_answers_in_fewer_calls(pool):
    with LLM("fable", 2, pool=pool, enable_prefix_caching=False, num_scheduler_steps=1) as llm:
        begin = pool.number_of_runs
        right = seen(llm.generate(PROMPTS, PARAMS))
        one_by_one = pool.number_of_runs - begin
    with LLM("fable", 2, pool=pool, enable_prefix_caching=False, num_scheduler_steps=4) as llm:
        begin = pool.number_of_runs
        assert seen(llm.generate(PROMPTS, PARAMS)) == right
        assert pool.number_of_runs - begin <= 0.6 * one_by_one
        chunks, texts = 0, [""] * 4
        for chunk in llm.stream(PROMPTS, PARAMS):
            texts[chunk.index] += chunk.text
            chunks += 1
        assert texts == [text for _, text, *_ in right] and chunks > 40, "token by token"
        assert pool.number_of_runs - begin <= 3.5 * one_by_one, "half of which ask whether the model is still there"


@pytest.mark.parametrize("drawn", [
    [{1: 5, 2: 6}] * 4, [{1: 5, 2: EOS}] * 4, [{1: EOS, 2: 10}], [{1: 5, 2: 6}, {1: EOS, 2: 7}, {1: EOS, 2: EOS}],
    [{1: 5, 2: 6}, {1: 5}], [{}]], ids=str)
def test_a_rank_goes_on_until_all_are_at_an_end_or_one_cannot_draw(drawn):
    """For what is not drawn, the logits are NaN. Three more steps are allowed."""
    draws, asked = iter(drawn), []
    runner = object.__new__(ModelRunner)
    runner.config = SimpleNamespace(eos_token_ids=(EOS, 10))

    def execute_model(step):
        asked.append(step)
        runner.drawn = next(draws)
        return ModelRunnerOutput(runner.drawn, {}, nan=tuple({1, 2} - set(runner.drawn)))

    runner.execute_model = execute_model
    step = description(token_ids=(2,))
    assert [output.sampled_token_ids for output in runner.execute_steps(step)] == drawn
    assert [(s.step_number, s.num_lookahead_steps, s.requests[1].segment.start, s.requests[1].sampling.position,
             s.requests[1].token_ids) for s in asked] == [
        (7 + n, 3 - n, 8 + n, 6 + n, () if n else (2,)) for n in range(len(drawn))]


@pytest.mark.parametrize("given, steps", [({}, 8), ({"strict": True}, 1), ({"enforce_eager": True}, 1),
                                          ({"logical": True}, 1), ({"dtype": "float64"}, 1),
                                          ({"patches": ["no_mask"]}, 1), ({"num_scheduler_steps": 2}, 2)],
                         ids=str)
def test_several_steps_a_call_on_the_fast_path_alone(tmp_path, pool, given, steps, monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    folder = make_checkpoint(tmp_path, "llama", hidden=512, heads=8, head_dim=64, inter=512, layers=1)
    executor = {} if given.get("logical") else {"pool": pool}
    with LLM(str(folder), 2, **executor, **given) as llm:
        assert llm.engine.config.num_scheduler_steps == steps

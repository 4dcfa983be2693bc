"""Several callers of one LLM: a step of any caller advances all requests, and each caller gets its own."""

import threading

import pytest
from helpers.checkpoints import make_checkpoint

from tplab.engine import EngineError, GenerationError, RequestError
from tplab.llm import LLM, SamplingParams
from tplab.patch import Patch
from tplab.ranks import RankError

LONG = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
A, B = "Once there was", "Mira saw the"


@pytest.fixture(scope="module")
def fable():
    with LLM("fable", 1, logical=True, strict=True, block_size=4, num_blocks=80) as llm:
        yield llm


@pytest.fixture
def llm(fable):
    yield fable
    assert not fable.has_unfinished_requests and fable.engine.pool.num_used == 0


def tokens(output):
    return output.outputs[0].token_ids


def alone(llm, prompt, params):
    return tokens(llm.generate(prompt, params)[0])


@pytest.mark.parametrize("count", [3, 4])  # the shorter one ends in a step of its own, or in one of the other's
def test_two_streams_read_in_turn(llm, count):
    short = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    expected = alone(llm, A, LONG), alone(llm, B, short)
    streams, last = [llm.stream(A, LONG), llm.stream(B, short)], [None, None]
    reading = [0, 1]
    while reading:
        for i in list(reading):
            chunk = next(streams[i], None)
            if chunk is None:
                reading.remove(i)
            else:
                last[i] = chunk.output
    assert (tokens(last[0]), tokens(last[1])) == expected and all(output.finished for output in last)


def test_generate_and_step_inside_a_stream(llm):
    expected, other = alone(llm, A, SHORT), alone(llm, B, LONG)
    seen, stepped = [], []
    number = llm.add_request(B, LONG)
    for chunk in llm.stream(A, SHORT):
        seen.append(chunk.output)
        stepped += llm.step()
        assert alone(llm, B, LONG) == other  # more steps than the stream's own request needs
    assert tokens(seen[-1]) == expected and seen[-1].finished
    assert {output.request_id for output in stepped} == {number} and tokens(stepped[-1]) == other


def test_what_ended_in_a_generate_is_handed_out_by_the_next_step(llm):
    expected = alone(llm, A, SHORT)
    number = llm.add_request(A, SHORT)
    llm.generate(B, LONG)
    assert not llm.scheduler.has_unfinished and llm.has_unfinished_requests
    outputs = []
    while llm.has_unfinished_requests:
        outputs += llm.step()
    assert [(output.request_id, tokens(output), output.finished) for output in outputs] == [(number, expected, True)]
    assert llm.step() == []


def test_a_step_that_fails_for_one_caller_costs_the_others_nothing(llm, monkeypatch):
    expected = alone(llm, A, LONG)
    llm.add_request(A, LONG)
    execute, calls = llm.engine.executor.execute_model, []

    def fails_once(step):
        calls.append(step)
        if len(calls) == 5:
            raise RankError("rank 1 died")
        return execute(step)

    monkeypatch.setattr(llm.engine.executor, "execute_model", fails_once)
    with pytest.raises(GenerationError, match="rank 1 died\n4 tokens had been generated") as caught:
        llm.generate(B, LONG)
    assert len(tokens(caught.value.outputs[0])) == 4
    outputs = []
    while llm.has_unfinished_requests:
        outputs += llm.step()
    assert len(tokens(outputs[0])) == 5 and tokens(outputs[-1]) == expected


@pytest.mark.parametrize("prompts", [[A], [A, B]], ids=["one", "two"])
def test_aborting_in_the_loop_ends_the_stream(llm, prompts):
    chunks = []
    for chunk in llm.stream(prompts, LONG):
        if not chunks:
            first = llm.abort(chunk.output.request_id)
        chunks.append(chunk)
    assert first.outputs[0].finish_reason == "abort" and len(tokens(first)) == 1
    last = [[c.output for c in chunks if c.index == i][-1] for i in range(len(prompts))]
    assert [o.outputs[0].finish_reason for o in last] == ["abort", "length"][:len(prompts)]
    assert sum(c.output.finished for c in chunks) == len(prompts)


def test_cleaning_up_meets_requests_that_are_gone(llm):
    stream = llm.stream([A, B], LONG)
    number = next(stream).output.request_id
    llm.abort(number)
    llm.add_request(A, SHORT)
    for other in list(llm.requests.unfinished):
        llm.abort(other)
    stream.close()
    assert llm.step() == []
    with pytest.raises(RequestError, match=f"there is no unfinished request {number}; there are: none"):
        llm.abort(number)


def test_a_stream_left_at_a_prompt_that_cannot_run(llm):
    with pytest.warns(UserWarning, match="prompt 0 cannot run, the others do"):
        for chunk in llm.stream([[], A], LONG):
            assert chunk.output.outputs[0].finish_reason == "error"
            break
    assert not llm.has_unfinished_requests


def test_a_stream_thrown_away_in_the_middle_of_a_step(llm, monkeypatch):
    """As the garbage collector does, at any moment, in whatever thread it runs."""
    expected = alone(llm, B, SHORT)
    stream, execute = llm.stream(A, LONG), llm.engine.executor.execute_model
    next(stream)

    def throws_away(step):
        stream.close()
        return execute(step)

    monkeypatch.setattr(llm.engine.executor, "execute_model", throws_away)
    assert alone(llm, B, SHORT) == expected


def test_closing_under_a_paused_stream():
    llm = LLM("fable", 1, logical=True)
    llm.add_request(A, LONG)
    stream = llm.stream(B, LONG)
    next(stream)
    unfinished = list(llm.requests.unfinished.values())
    llm.close()
    assert [request.output().outputs[0].finish_reason for request in unfinished] == ["abort"] * 2
    assert not llm.has_unfinished_requests and llm.engine.pool.num_used == 0
    for call in (lambda: next(stream), llm.step, lambda: next(llm.stream(A)), lambda: llm.add_request(A)):
        with pytest.raises(EngineError, match="this LLM is closed; make a new one"):
            call()
    assert list(stream) == []


def test_threads(llm):
    """Each gets its own answers, in steps that they share."""
    prompts = [f"{name} saw the" for name in ("Mira", "Elsa", "Magnus", "The fox", "A dog", "He", "She", "Nobody")]
    expected = [alone(llm, prompt, LONG) for prompt in prompts]
    found, errors, barrier = {}, [], threading.Barrier(len(prompts))

    def work(i):
        try:
            barrier.wait()
            for turn in range(3):
                if (i + turn) % 2:
                    output = llm.generate(prompts[i], LONG)[0]
                else:
                    output = list(llm.stream([prompts[i]], LONG))[-1].output
                found[i, turn] = tokens(output)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert found == {(i, turn): expected[i] for i in range(len(prompts)) for turn in range(3)}


def test_a_second_thread_is_served_while_the_first_one_steps(llm, monkeypatch):
    """It does not wait until a long generation is over."""
    order, begun = [], threading.Event()
    alone(llm, B, SHORT)
    execute = llm.engine.executor.execute_model

    def executes(step):
        begun.set()
        return execute(step)

    monkeypatch.setattr(llm.engine.executor, "execute_model", executes)

    def work(name, prompt, params):
        llm.generate(prompt, params)
        order.append(name)

    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    long = threading.Thread(target=work, args=("long", A, params))
    long.start()
    assert begun.wait(30)
    work("short", B, SHORT)
    long.join(60)
    assert order == ["short", "long"]


def test_a_call_in_the_middle_of_a_step_is_refused(llm, monkeypatch):
    execute = llm.engine.executor.execute_model

    def calls_back(step):
        llm.add_request(A, SHORT)
        return execute(step)

    monkeypatch.setattr(llm.engine.executor, "execute_model", calls_back)
    with pytest.raises(EngineError, match="in the middle of a call of the same thread"):
        llm.generate(B, SHORT)


def test_chunks_that_are_kept_do_not_change(llm):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    kept = [(chunk.output, chunk.output.to_dict()) for chunk in llm.stream(A, params)]
    assert len(kept) > 4
    for output, then in kept:
        assert output.to_dict() == then
        assert output.metrics.num_output_tokens == len(output.outputs[0].logprobs) == len(tokens(output))


def test_a_standstill_leaves_a_clean_queue(tmp_path):
    """A prompt whose every token was found in the cache waits with blocks in its table."""
    def all_of_it(self, token_ids):
        self.extend_keys(token_ids, len(token_ids))
        return [block for key in self.keys if (block := self.pool.get_cached_block(key)) is not None]

    patch = Patch("tplab.cache.table.BlockTable.get_computed_blocks", all_of_it)
    with LLM(make_checkpoint(tmp_path / "m"), 1, logical=True, block_size=4, num_blocks=10, patches=[patch]) as llm:
        llm.generate([1, 2, 3, 4], SHORT)
        for _ in range(2):
            with pytest.raises(EngineError, match="no sequence can go on"):
                llm.generate([1, 2, 3, 4], SHORT)
            assert not llm.has_unfinished_requests and llm.engine.pool.num_used == 0
        number = llm.add_request([1, 2, 3, 4], SHORT)
        for _ in range(2):
            with pytest.raises(EngineError, match="no sequence can go on"):
                llm.step()
        llm.abort(number)
        assert len(alone(llm, [5, 2, 3], SHORT)) == 3


def test_a_failed_last_check_loses_no_token(llm, monkeypatch):
    """Strict mode checks the counts after the tokens were applied: a request that ended by then has ended."""
    expected = alone(llm, A, SHORT)
    number = llm.add_request(A, SHORT)
    accounts, calls = llm.engine.checks.accounts, []

    def fails_at_the_end():
        calls.append(1)
        if len(calls) == 3:
            raise EngineError("a block is leaked")
        accounts()

    monkeypatch.setattr(llm.engine.checks, "accounts", fails_at_the_end)
    outputs = llm.step() + llm.step()
    with pytest.raises(EngineError, match="a block is leaked"):
        llm.step()
    outputs += llm.step()
    assert outputs[-1].request_id == number and outputs[-1].finished and tokens(outputs[-1]) == expected


def failing():
    raise RankError("a rank died")


def test_the_ranks_are_asked_whether_they_have_the_model_where_they_may_have_lost_it(llm, monkeypatch):
    asked, executor = [], llm.engine.executor
    monkeypatch.setattr(executor, "loaded", lambda: asked.append(len(asked)) or True)
    for calls in (1, 2):
        llm.generate(A, SHORT)
        assert len(asked) == calls, "before the first step of a call, and never within one"
    number = llm.add_request(A, LONG)
    llm.step(), llm.step()
    assert len(asked) == 4, "and whenever time may have passed"
    with llm.requests.locked():
        llm._step()
        assert len(asked) == 4, "not within a call"
        with monkeypatch.context() as patched, pytest.raises(RankError):
            patched.setattr(llm.engine, "step", failing)
            llm._step()
        llm._step()
        assert len(asked) == 5, "a step that failed may have cost a rank"
    llm.abort(number)

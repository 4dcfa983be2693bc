"""Who calls an LLM: streams, threads, steps, calls that fail, and what of them stays behind."""

import sys
import threading

import pytest
from helpers.scripted import ended, greedy, letters

from tplab.engine import EngineError, GenerationError, RequestError
from tplab.llm import LLM, SamplingParams
from tplab.ranks import RankError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return letters(tmp_path_factory.mktemp("letters") / "m")


@pytest.fixture(scope="module")
def letters_llm(folder):
    with LLM(folder, 2, logical=True, strict=True, block_size=4, num_blocks=60) as llm:
        yield llm


@pytest.fixture
def llm(letters_llm):
    yield letters_llm
    assert not letters_llm.has_unfinished_requests and letters_llm.engine.pool.num_used == 0


def before_steps(llm, monkeypatch, function):
    """Call ``function(number)`` before each step that the ranks compute; the first has number 1."""
    execute, numbers = llm.engine.executor.execute_model, iter(range(1, 1000))

    def executes(step):
        function(next(numbers))
        return execute(step)
    monkeypatch.setattr(llm.engine.executor, "execute_model", executes)


def fails_in(number):
    def fail(step):
        if step == number:
            raise RankError("rank 1 fell over")
    return fail


def read_to_the_end(llm):
    outputs = []
    while llm.has_unfinished_requests:
        outputs += llm.step()
    return outputs


# Streams.


def test_streamed_pieces_are_the_generated_texts(llm):
    params = SamplingParams(temperature=100.0, top_k=40, seed=5, max_tokens=20, ignore_eos=True, logprobs=1)
    whole, kept, texts = llm.generate(["A", "B"], params), [], ["", ""]
    for chunk in llm.stream(["A", "B"], params):
        texts[chunk.index] += str(chunk)
        kept.append((chunk.output, chunk.output.to_dict()))
    assert texts == [output.text for output in whole]
    assert [ended(output) for output, _ in kept[-2:]] == [ended(output) for output in whole]
    assert all(output.to_dict() == then for output, then in kept), "a later step changes no chunk"


def test_a_stream_that_is_left_aborts_its_requests(llm):
    for _ in llm.stream(["A", "B"], greedy(40, ignore_eos=True)):
        break
    assert not llm.has_unfinished_requests


def test_a_stream_is_one_call_until_its_end(llm):
    """Other calls of the same thread are refused by name, and go on when it is closed."""
    stream = llm.stream("A", greedy())
    assert str(next(stream)) == "x"
    for call in (lambda: llm.generate("B"), llm.step, lambda: next(llm.stream("B")), lambda: llm.add_request("B"),
                 lambda: llm.abort(0)):
        with pytest.raises(EngineError, match="in the middle of a call of the same thread, such as a stream"):
            call()
    stream.close()
    assert llm.generate("B", greedy(2))[0].text == "pq"


def test_closing_under_a_stream_ends_it(folder):
    llm = LLM(folder, 1, logical=True)
    stream = llm.stream("A", greedy())
    next(stream)
    unfinished = list(llm.unfinished.values())
    llm.close(), llm.close()
    assert [request.output().outputs[0].finish_reason for request in unfinished] == ["abort"]
    assert not llm.has_unfinished_requests and llm.engine.pool.num_used == 0 and repr(llm).endswith(", closed>")
    for call in (lambda: next(stream), llm.step, lambda: next(llm.stream("A")), lambda: llm.add_request("A"),
                 lambda: llm.generate("A")):
        with pytest.raises(EngineError, match="this LLM is closed; make a new one"):
            call()
    assert list(stream) == []


# Threads, and calls inside of calls.


def test_threads_wait_for_each_other(llm):
    expected = {prompt: ended(llm.generate(prompt, greedy())[0]) for prompt in "ABC"}
    results, barrier = [], threading.Barrier(6)

    def work(prompt, streams):
        barrier.wait()
        for _ in range(3):
            output = ([*llm.stream(prompt, greedy())][-1].output if streams else llm.generate(prompt, greedy())[0])
            results.append(ended(output) == expected[prompt])

    threads = [threading.Thread(target=work, args=(prompt, streams)) for prompt in "ABC" for streams in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [True] * 18


def test_a_call_in_the_middle_of_a_step_is_refused(llm, monkeypatch):
    before_steps(llm, monkeypatch, lambda step: llm.add_request("A"))
    with pytest.raises(EngineError, match="in the middle of a call of the same thread"):
        llm.generate("B", greedy())


# Step by step.


def test_steps_hand_out_each_change_once(llm):
    numbers = [llm.add_request(prompt, greedy(4)) for prompt in ("A", "B")]
    texts = [[(o.request_id, o.text, o.finished) for o in llm.step()] for _ in range(2)]
    assert texts == [[(numbers[0], "x", False), (numbers[1], "p", False)],
                     [(numbers[0], "xy", False), (numbers[1], "pq", False)]]
    aborted = llm.abort(numbers[1])
    assert ended(aborted) == ("pq", "abort", None, 2) and aborted.finished and aborted.metrics.finished_time is not None
    assert [(o.request_id, o.text) for o in llm.step()] == [(numbers[0], "xyz")]
    assert [ended(o) for o in llm.step()] == [("xyz", "stop", None, 4)]
    assert llm.step() == [] and not llm.has_unfinished_requests


def test_a_whole_generation_waits_for_no_steps(llm):
    number = llm.add_request("A", greedy())
    for call in (llm.generate, lambda prompt: next(llm.stream(prompt))):
        with pytest.raises(EngineError, match=f"requests {number} of add_request have not ended; call step until"):
            call("B")
    llm.abort(number)
    assert llm.generate("B", greedy(2))[0].text == "pq"


@pytest.mark.parametrize("number", [[], True, None, 0.5, {}, 10**6])
def test_abort_of_what_is_no_request(llm, number):
    ours = llm.add_request("A", greedy())
    with pytest.raises(RequestError, match=f"there is no unfinished request .*; there are: {ours}"):
        llm.abort(number)
    assert llm.abort(ours).outputs[0].finish_reason == "abort"
    with pytest.raises(RequestError, match="there are: none"):
        llm.abort(ours)


# Ranks that fail.


def test_what_had_been_generated_when_the_ranks_failed(llm, monkeypatch):
    before_steps(llm, monkeypatch, fails_in(3))
    with pytest.raises(GenerationError, match="rank 1 fell over\n4 tokens had been generated by then") as caught:
        llm.generate(["A", "B"], greedy(4))
    assert [output.text for output in caught.value.outputs] == ["xy", "pq"]
    assert not any(output.finished for output in caught.value.outputs) and isinstance(caught.value.__cause__, RankError)


def test_ranks_that_lost_the_model_get_it_again_and_no_token_is_lost(llm):
    llm.add_request("B", greedy(7))
    for _ in range(3):
        llm.step()
    llm.engine.executor.close()  # as after a restart: nothing is there any more
    assert read_to_the_end(llm)[-1].text == "pq😀r"
    pieces = []
    for chunk in llm.stream("B", greedy(7)):
        pieces.append(chunk.text)
        llm.engine.executor.close()
    assert "".join(pieces) == "pq😀r"


# What stays behind, and what is shown.


def test_a_bar_where_it_is_wanted(llm, capsys, monkeypatch):
    llm.generate("A", greedy(2))
    llm.generate("A", greedy(2), use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.chat([{"role": "user", "content": "hi"}], greedy(2), use_tqdm=True)
    assert "generate" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    llm.generate("A", greedy(2))
    assert capsys.readouterr() == ("", ""), "in a terminal as well, a short generation has none"


def test_what_an_llm_says_of_itself(folder):
    with LLM(folder, 2, logical=True, block_size=4, num_blocks=7) as llm:
        assert repr(llm) == f"<LLM {folder}: 2 ranks, float32, 7 blocks of 4>"
        assert len(llm.load_stats) == 2 and all(stats["bytes_read"] > 0 for stats in llm.load_stats)

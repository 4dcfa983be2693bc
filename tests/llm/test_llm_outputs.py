"""What a request becomes: how it ends, and what it says of itself."""

import json

import pytest
from helpers.scripted import BOS, EOS, ended, greedy, ids, letters, scripted_checkpoint

from tplab.engine import RequestError
from tplab.llm import LLM, SamplingParams
from tplab.llm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = letters(tmp_path_factory.mktemp("letters") / "m")
    with LLM(folder, 2, logical=True, block_size=4, num_blocks=60) as llm:
        yield llm


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """A model without a tokenizer: 1 2 3 … 9, and again."""
    folder = scripted_checkpoint(tmp_path_factory.mktemp("silent") / "m", None, [[*range(1, 10), 1]], vocab=12)
    with LLM(folder, 2, logical=True) as llm:
        yield llm


Y, Q = ids(b"y")[0], ids(b"q")[0]
ENDS = [  # prompt, parameters → text, reason, what stopped it, number of tokens
    # The end of text is a token and no text; on the last token that is allowed, it counts as well.
    ("A", greedy(), "xyz", "stop", None, 4), ("A", greedy(4), "xyz", "stop", None, 4),
    ("A", greedy(3), "xyz", "length", None, 3), ("A", greedy(5, ignore_eos=True), "xyzk", "length", None, 5),
    # An unfinished last character is not lost.
    ("B", greedy(2), "pq", "length", None, 2), ("B", greedy(3), "pq�", "length", None, 3),
    ("B", greedy(5), "pq�", "length", None, 5), ("B", greedy(6), "pq😀", "length", None, 6),
    # A stop text on the last token is a stop, not a length; it is no part of the text.
    ("A", greedy(3, stop="z"), "xy", "stop", "z", 3), ("A", greedy(3, stop="yz"), "x", "stop", "yz", 3),
    ("A", greedy(3, stop="xyz"), "", "stop", "xyz", 3), ("A", greedy(3, stop="y"), "x", "stop", "y", 2),
    ("A", greedy(stop=["q", "z", "y"]), "x", "stop", "y", 2),
    # ``b`` comes with the first quarter of an emoji: it is found when the emoji is whole, or when nothing follows.
    ("C", greedy(3, stop="b"), "mn", "stop", "b", 3), ("C", greedy(stop="b"), "mn", "stop", "b", 6),
    ("C", greedy(3, stop="�"), "mnb", "stop", "�", 3), ("C", greedy(stop="�"), "mnb😀rst", "length", None, 9),
    # A stop id is kept and named, also where it is the end of text.
    ("A", greedy(stop_token_ids=[Q, Y]), "xy", "stop", Y, 2),
    ("A", greedy(stop_token_ids=[EOS]), "xyz", "stop", EOS, 4),
    ("A", greedy(stop_token_ids=[EOS], ignore_eos=True), "xyz", "stop", EOS, 4),
]


@pytest.mark.parametrize("prompt, params, text, reason, stopped_by, count", ENDS)
def test_how_a_request_ends(llm, prompt, params, text, reason, stopped_by, count):
    """Generated at once; streamed, it is the same, in pieces of which only the last says that it is the last."""
    (output,) = llm.generate(prompt, params)
    assert ended(output) == (text, reason, stopped_by, count) and llm.engine.pool.num_used == 0
    chunks = list(llm.stream(prompt, params))
    assert "".join(map(str, chunks)) == text and ended(chunks[-1].output) == ended(output)
    assert [chunk.output.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk.text for chunk in chunks[:-1])


def test_a_stop_text_frees_the_place_of_its_request_at_once(llm):
    number = llm.add_request("A", greedy(60, stop="x", ignore_eos=True))
    (output,) = llm.step()
    assert (output.request_id, output.finished) == (number, True) and not llm.has_unfinished_requests
    assert llm.engine.pool.num_used == 0 and not llm.scheduler.has_unfinished


# What was asked.


def test_the_beginning_of_text_is_put_before_a_prompt_once(llm):
    """By the tokenizer before a text; by the template, and not by the tokenizer as well, before a conversation."""
    (output,) = llm.generate("A", greedy(1))
    assert output.prompt_token_ids == [BOS, *ids(b"A")] and output.prompt == "A"
    conversation = [{"role": "user", "content": "hi"}]
    assert llm.chat_prompt(conversation) == [BOS, *ids(b"hiA")]
    (output,) = llm.chat(conversation, greedy(2))
    assert output.prompt_token_ids == [BOS, *ids(b"hiA")] and output.text == "xy"


def test_prompts_and_parameters_stay_in_pairs(llm):
    a, b = ids(b"A"), ids(b"B")
    outputs = llm.generate(["A", b, tuple(a), "B"], [greedy(1), greedy(2), greedy(3), greedy(1)])
    assert [o.text for o in outputs] == ["x", "pq", "xyz", "p"]
    assert [o.prompt for o in outputs] == ["A", None, None, "B"] and outputs[1].prompt_token_ids == b
    assert len({o.request_id for o in outputs}) == 4
    assert llm.generate(tuple(b), [greedy(1)])[0].text == "p"


def test_without_parameters_there_are_sixteen_tokens(silent):
    (output,) = silent.generate([1, 2])
    assert len(output.outputs[0].token_ids) == 16 and output.outputs[0].finish_reason == "length"
    firsts = {output.outputs[0].token_ids[0] for output in silent.generate([[10]] * 9)}  # after 10, anything may come
    assert len(firsts) > 1, "nine most probable tokens instead of nine draws"
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.seed, params.logprobs, params.stop, params.stop_token_ids) == (None, None, (), ())


def test_without_a_tokenizer_there_are_ids_and_no_text(silent):
    assert silent.tokenizer is None
    (output,) = silent.generate([3], greedy(3, logprobs=1))
    assert output.outputs[0].token_ids == [4, 5, 6] and output.text == ""
    assert output.outputs[0].logprobs[0][4].decoded_token == ""
    assert [(chunk.text, chunk.output.finished) for chunk in silent.stream([3], greedy(3))] == [("", True)]
    with pytest.raises(RequestError, match="has no tokenizer: give token ids, and no stop texts"):
        silent.generate([3], greedy(stop="a"))
    with pytest.raises(RequestError, match="has no chat template"):
        silent.chat_prompt([{"role": "user", "content": "a"}])


# What it says of itself.


def test_log_probabilities_name_their_tokens(llm):
    (output,) = llm.generate("A", greedy(2, logprobs=2))
    first, second = output.outputs[0].logprobs
    x, y = ids(b"xy")
    assert list(first)[0] == x and len(first) == 2 and first[x].decoded_token == "x" and first[x].rank == 1
    assert list(second)[0] == y and second[y].decoded_token == "y"
    assert second[y].logprob > max(p.logprob for t, p in second.items() if t != y)
    assert [len(step) for step in llm.generate("A", greedy(2, logprobs=0))[0].outputs[0].logprobs] == [1, 1]
    assert llm.generate("A", greedy(2))[0].outputs[0].logprobs is None
    chunk = list(llm.stream("A", greedy(3, logprobs=1)))[-1]
    assert [list(step) for step in chunk.output.outputs[0].logprobs] == [[t] for t in ids(b"xyz")]


def test_everything_of_an_output_is_in_its_json():
    m = RequestMetrics(10.0, 10.5, 14.0, 3, 8, blocks_used=5, prefix_hit_tokens=2, preemptions=1)
    logprobs = [{4: Logprob(-0.5, 1, "te"), 7: Logprob(-1.5, 2, "b")}]
    completion = CompletionOutput(0, "text", [4, 9], "stop", "st", logprobs)
    output = RequestOutput(6, "prompt", [1, 2, 3], [completion], True, m, RequestError("why"))
    assert json.loads(json.dumps(output.to_dict())) == {
        "request_id": 6, "prompt": "prompt", "prompt_token_ids": [1, 2, 3], "text": "text", "token_ids": [4, 9],
        "finish_reason": "stop", "stop_reason": "st", "error": "why",
        "logprobs": [{"4": {"logprob": -0.5, "rank": 1, "decoded_token": "te"},
                      "7": {"logprob": -1.5, "rank": 2, "decoded_token": "b"}}],
        "metrics": {"time_to_first_token": 0.5, "tokens_per_second": 2.0, "num_prompt_tokens": 3,
                    "num_output_tokens": 8, "blocks_used": 5, "prefix_hit_tokens": 2, "preemptions": 1}}
    assert output.text == "text" and str(StreamChunk(0, "piece", output)) == "piece"


def test_the_metrics_of_a_request(llm):
    m = RequestMetrics(arrival_time=100.0, num_output_tokens=10)
    assert m.time_to_first_token is None and m.tokens_per_second is None
    m.first_token_time, m.finished_time = 104.0, 105.0
    assert m.time_to_first_token == 4.0 and m.tokens_per_second == 2.0, "the reading of the prompt counts"
    m.finished_time = 100.0
    assert m.tokens_per_second is None
    m = llm.generate("A" * 9, greedy(3))[0].metrics
    assert (m.num_prompt_tokens, m.num_output_tokens, m.blocks_used, m.preemptions) == (10, 3, 3, 0)
    assert 0 < m.arrival_time < m.first_token_time < m.finished_time
    assert llm.generate("A" * 9, greedy(3))[0].metrics.prefix_hit_tokens == 8

"""What a request becomes: how it ends, and what it says of itself."""

import json

import pytest
from helpers.scripted import BOS, EOS, LETTERS, ended, greedy, ids, letters, scripted_checkpoint

from tplab.checkpoint import CheckpointError
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


def both_ways(llm, prompt, params):
    """Generated at once; streamed, it must be the same, in pieces of which only the last says that it is the last."""
    (output,) = llm.generate(prompt, params)
    chunks = list(llm.stream(prompt, params))
    assert "".join(map(str, chunks)) == output.text
    assert [chunk.output.finished for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(chunk.text for chunk in chunks[:-1])
    assert ended(chunks[-1].output) == ended(output)
    return output, [chunk.text for chunk in chunks]


# How it ends.


def test_the_end_of_text_is_a_token_and_no_text(llm):
    """The chunk in which it comes has no text, and says that there will be no other."""
    output, pieces = both_ways(llm, "A", greedy())
    assert ended(output) == ("xyz", "stop", None, 4) and output.outputs[0].token_ids == [*ids(b"xyz"), EOS]
    assert pieces == ["x", "y", "z", ""]
    assert ended(llm.generate("A", greedy(4))[0]) == ("xyz", "stop", None, 4), "on the last token it counts as well"
    assert ended(llm.generate("A", greedy(5, ignore_eos=True))[0]) == ("xyzk", "length", None, 5)


@pytest.mark.parametrize("max_tokens,text", [(2, "pq"), (3, "pq�"), (5, "pq�"), (6, "pq😀"), (7, "pq😀r")])
def test_an_unfinished_last_character_is_not_lost(llm, max_tokens, text):
    output, _ = both_ways(llm, "B", greedy(max_tokens))
    assert ended(output) == (text, "length", None, max_tokens)


@pytest.mark.parametrize("stop,max_tokens,text", [
    ("z", 3, "xy"), ("yz", 3, "x"), ("xyz", 3, ""), ("y", 3, "x"), (["q", "z", "y"], 9, "x")])
def test_a_stop_text_on_the_last_token_is_a_stop_and_no_length(llm, stop, max_tokens, text):
    output, _ = both_ways(llm, "A", greedy(max_tokens, stop=stop))
    met = "y" if isinstance(stop, list) else stop
    assert ended(output)[:3] == (text, "stop", met)
    assert output.outputs[0].token_ids == ids(b"xyz"[:b"xyz".index(met[-1].encode()) + 1])


@pytest.mark.parametrize("max_tokens,tokens", [(3, 3), (9, 6)])
def test_a_stop_text_inside_a_half_finished_token(llm, max_tokens, tokens):
    """``b`` comes with the first quarter of an emoji: it is found when the emoji is whole, or when nothing follows."""
    output, _ = both_ways(llm, "C", greedy(max_tokens, stop="b"))
    assert ended(output) == ("mn", "stop", "b", tokens)
    output, _ = both_ways(llm, "C", greedy(max_tokens, stop="�"))
    assert ended(output) == (("mnb", "stop", "�", 3) if max_tokens == 3 else ("mnb😀rst", "length", None, 9))


def test_a_stop_id_is_kept_and_named(llm):
    y = ids(b"y")[0]
    output, pieces = both_ways(llm, "A", greedy(stop_token_ids=[ids(b"q")[0], y]))
    assert ended(output) == ("xy", "stop", y, 2) and pieces == ["x", "y"]
    assert ended(llm.generate("A", greedy(stop_token_ids=[EOS]))[0]) == ("xyz", "stop", EOS, 4)
    assert ended(llm.generate("A", greedy(stop_token_ids=[EOS], ignore_eos=True))[0]) == ("xyz", "stop", EOS, 4)


def test_a_stop_text_frees_the_place_of_its_request_at_once(llm):
    number = llm.add_request("A", greedy(60, stop="x", ignore_eos=True))
    (output,) = llm.step()
    assert (output.request_id, output.finished) == (number, True) and not llm.has_unfinished_requests
    assert llm.engine.pool.num_used == 0 and not llm.scheduler.has_unfinished
    assert output.metrics.finished_time >= output.metrics.first_token_time


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
    found = llm.generate(["A", b, tuple(a), "B"], [greedy(1), greedy(2), greedy(3), greedy(1)])
    assert [o.text for o in found] == ["x", "pq", "xyz", "p"]
    assert [o.prompt for o in found] == ["A", None, None, "B"] and found[1].prompt_token_ids == b
    assert len({o.request_id for o in found}) == 4
    assert [o.text for o in llm.generate(["B", "A"], greedy(2))] == ["pq", "xy"]
    (output,) = llm.generate(tuple(b), [greedy(1)])
    assert output.text == "p"


def test_without_parameters_there_are_sixteen_tokens(silent):
    (output,) = silent.generate([1, 2])
    assert len(output.outputs[0].token_ids) == 16 and output.outputs[0].finish_reason == "length"
    firsts = {output.outputs[0].token_ids[0] for output in silent.generate([[10]] * 9)}  # after 10, anything may come
    assert len(firsts) > 1, "nine most probable tokens instead of nine draws"
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.seed, params.logprobs) == (None, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.greedy) == ((), (), False, False)


@pytest.mark.parametrize("good", [
    {"temperature": 100}, {"top_k": -1}, {"top_k": 2**31}, {"top_p": 1}, {"top_p": 1e-12}, {"min_p": 0}, {"min_p": 1},
    {"max_tokens": 1}, {"max_tokens": None}, {"seed": 0}, {"seed": 2**63 - 1}, {"logprobs": 0}, {"logprobs": 100},
    {"temperature": 0, "top_k": 1}, {"temperature": 0, "top_k": -1}, {"temperature": 0, "seed": 3},
], ids=str)  # fmt: skip
def test_parameters_at_the_edge_of_what_is_allowed(good):
    params = SamplingParams(**good)
    assert all(getattr(params, name) == value for name, value in good.items())
    assert params.greedy == (good.get("temperature") == 0)


@pytest.mark.parametrize("wrong,message", [
    ({"temperature": 100.1}, r"temperature must be a number from 0 up to 100, not 100.1"),
    ({"top_k": 2**31 + 1}, "top_k must be a whole number from -1 up to 2147483648"),
    ({"top_p": 0.0}, "top_p must be a number above 0 to 1, not 0.0"), ({"top_p": 1.0001}, "top_p"),
    ({"min_p": 1.0001}, "min_p"), ({"max_tokens": 2**31 + 1}, "max_tokens .* or None"),
    ({"seed": 2**63}, "seed .* or None"), ({"temperature": None}, "temperature"), ({"top_k": None}, "top_k"),
    ({"logprobs": 101}, "logprobs must be a whole number from 0 up to 100 or None, not 101"),
    ({"stop": ["a", ""]}, "stop must be"), ({"stop_token_ids": [1, -1]}, "stop_token_ids must be"),
    ({"stop_token_ids": None}, "stop_token_ids must be"), ({"ignore_eos": None}, "ignore_eos must be True or False"),
    ({"temperature": 0, "top_k": 2}, "contradicts top_k; leave top_k out"),
    ({"temperature": 0, "min_p": 0.5}, "contradicts min_p; leave min_p out"),
    ({"temperature": 0, "top_p": 0.5, "top_k": 3}, "contradicts top_k and top_p; leave top_k and top_p out"),
], ids=str)  # fmt: skip
def test_parameters_just_beyond_it(wrong, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**wrong)


def test_stop_conditions_are_kept_as_tuples():
    ids_given, texts = [3, 5], ["a", "b"]
    params = SamplingParams(stop=texts, stop_token_ids=ids_given)
    texts.append("c")
    ids_given.append(7)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3, 5))
    assert SamplingParams(stop="ab").stop == ("ab",)


# What it says of itself.


def test_log_probabilities_name_their_tokens(llm):
    (output,) = llm.generate("A", greedy(2, logprobs=2))
    first, second = output.outputs[0].logprobs
    x, y = ids(b"xy")
    assert list(first)[0] == x and len(first) == 2 and first[x].decoded_token == "x" and first[x].rank == 1
    assert list(second)[0] == y and second[y].decoded_token == "y"
    assert [p.decoded_token for p in second.values()] == [llm.tokenizer.decode([t]) for t in second] != ["y", "y"]
    assert second[y].logprob > max(p.logprob for t, p in second.items() if t != y)
    assert [len(step) for step in llm.generate("A", greedy(2, logprobs=0))[0].outputs[0].logprobs] == [1, 1]
    assert llm.generate("A", greedy(2))[0].outputs[0].logprobs is None
    chunk = list(llm.stream("A", greedy(3, logprobs=1)))[-1]
    assert [list(step) for step in chunk.output.outputs[0].logprobs] == [[t] for t in ids(b"xyz")]


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


def test_a_damaged_tokenizer_is_not_taken_for_none(tmp_path):
    folder = letters(tmp_path / "m")
    with LLM(folder, 1, logical=True) as llm:
        (folder / "tokenizer.json").write_text("{}")
        for _ in range(2):
            with pytest.raises(CheckpointError, match="tokenizer.json"):
                llm.generate("A", greedy(1))
            with pytest.raises(CheckpointError, match="tokenizer.json"):
                llm.generate([ids(b"A")], greedy(1))
        assert not llm.has_unfinished_requests
        LETTERS.save(str(folder / "tokenizer.json"))
        assert llm.generate("A", greedy(1))[0].text == "x"
        assert llm.tokenizer is llm.tokenizer


def test_everything_of_an_output_is_in_its_json(llm):
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
    assert list(output.to_dict()["logprobs"][0]) == ["4", "7"], "the keys that JSON will have"
    (stopped,) = llm.generate("A", greedy(stop="y"))
    found = json.loads(json.dumps(stopped.to_dict()))
    assert (found["finish_reason"], found["stop_reason"], found["text"]) == ("stop", "y", "x")
    assert found["error"] is None and found["logprobs"] is None
    assert output.text == "text" and str(StreamChunk(0, "piece", output)) == "piece"


def test_speed_counts_from_arrival_the_reading_of_the_prompt_included():
    m = RequestMetrics(arrival_time=100.0, num_output_tokens=10)
    assert m.time_to_first_token is None and m.tokens_per_second is None
    m.first_token_time = 104.0
    assert m.time_to_first_token == 4.0 and m.tokens_per_second is None
    m.finished_time = 105.0
    assert m.tokens_per_second == 2.0
    m.finished_time = 100.0
    assert m.tokens_per_second is None
    m.arrival_time, m.first_token_time = 0.0, 0.0
    assert m.time_to_first_token == 0.0


def test_the_metrics_of_a_request(llm):
    (output,) = llm.generate("A" * 9, greedy(3))
    m = output.metrics
    assert (m.num_prompt_tokens, m.num_output_tokens, m.blocks_used, m.preemptions) == (10, 3, 3, 0)
    assert 0 < m.arrival_time < m.first_token_time < m.finished_time
    assert llm.generate("A" * 9, greedy(3))[0].metrics.prefix_hit_tokens == 8

"""Token ids to text while they arrive: characters in pieces, stop texts, streaming, chat."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tplab.checkpoint import open_checkpoint
from tplab.engine import RequestError
from tplab.llm import LLM, SamplingParams
from tplab.llm.detokenizer import Detokenizer


@pytest.fixture(scope="module")
def by_bytes():
    """A tokenizer whose every token is one byte, plus an end-of-text token: the hardest case."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def fed(tokenizer, token_ids, stop=(), prompt=()):
    """Feed all tokens as the engine does: text, streamed pieces, the stop text if one was met."""
    detokenizer, pieces, found = Detokenizer(tokenizer, list(prompt), stop), [], None
    for i, token in enumerate(token_ids):
        found = detokenizer.add(token)
        if found is None and i == len(token_ids) - 1:
            found = detokenizer.finish()
        pieces.append(detokenizer.take_certain(found is not None or i == len(token_ids) - 1))
        if found is not None:
            break
    return detokenizer.text, pieces, found


TEXTS = st.text(alphabet=st.sampled_from("ab é€😀\n한"), min_size=1, max_size=30)


@given(TEXTS)
def test_characters_in_pieces(by_bytes, text):
    found, pieces, _ = fed(by_bytes, by_bytes(text).input_ids)
    assert found == text == "".join(pieces)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=20))
def test_bytes_that_are_no_text(by_bytes, token_ids):
    found, pieces, _ = fed(by_bytes, token_ids)
    assert found == by_bytes.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces) == found


@given(TEXTS, st.lists(st.text(alphabet="ab é€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_text_is_cut_off_and_never_shown(by_bytes, text, stop):
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    found, pieces, met = fed(by_bytes, by_bytes(text).input_ids, tuple(stop))
    assert "".join(pieces) == found
    if not ends:
        assert found == text and met is None
    else:
        # It stops at the character that first completes a stop text.
        first = min(end for end, _ in ends)
        assert found == text[:min(begin for end, begin in ends if end == first)] and met in stop


def test_special_tokens_are_not_text(by_bytes):
    ids = by_bytes("ab").input_ids
    assert fed(by_bytes, [*ids, by_bytes.eos_token_id])[0] == "ab"


@pytest.fixture(scope="module")
def llm():
    with LLM("fable", 2, logical=True) as llm:
        yield llm


def test_streamed_text_is_the_generated_text(llm):
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40)
    prompts = ["Once there was", "Mira saw the"]
    whole = llm.generate(prompts, params)
    pieces, last = ["", ""], [None, None]
    for chunk in llm.stream(prompts, params):
        pieces[chunk.index] += str(chunk)
        last[chunk.index] = chunk.output
    assert pieces == [output.text for output in whole]
    assert [output.outputs[0].token_ids for output in last] == [output.outputs[0].token_ids for output in whole]
    assert all(output.finished for output in last)
    assert [o.text for o in whole] == [llm.tokenizer.decode(o.outputs[0].token_ids, skip_special_tokens=True)
                                       for o in whole]


def test_leaving_a_stream_gives_its_blocks_back(llm):
    for _ in llm.stream(["Once there was", "Mira"], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)):
        break
    assert llm.engine.pool.num_used == 0 and not llm.has_unfinished_requests


def test_a_stop_text_ends_a_generation(llm):
    full = llm.generate("Once there was", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
    stop = full.text[10:14]
    cut = llm.generate("Once there was", SamplingParams(temperature=0, max_tokens=40, stop=stop, ignore_eos=True))[0]
    assert cut.text == full.text[:full.text.find(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert len(cut.outputs[0].token_ids) < 40


def test_ends(llm, monkeypatch):
    out = llm.generate("Once", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0].outputs[0]
    assert (out.finish_reason, len(out.token_ids)) == ("length", 3)
    token = out.token_ids[1]
    out = llm.generate("Once", SamplingParams(temperature=0, max_tokens=3, stop_token_ids=[token],
                                              ignore_eos=True))[0].outputs[0]
    assert (out.finish_reason, out.stop_reason) == ("stop", token) and out.token_ids[-1] == token
    # The end of text is a token of the output and no text.
    monkeypatch.setattr(llm.engine, "config", replace(llm.engine.config, eos_token_ids=(token,)))
    out = llm.generate("Once", SamplingParams(temperature=0, max_tokens=3))[0].outputs[0]
    assert (out.finish_reason, out.stop_reason, out.token_ids[-1]) == ("stop", None, token)


def test_chat_follows_the_template(llm):
    messages = [{"role": "user", "content": "Tell me of Mira."}]
    ids = llm.chat_prompt(messages)
    expected = llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert llm.tokenizer.decode(ids) == expected
    params = SamplingParams(temperature=0, max_tokens=5)
    assert llm.chat(messages, params)[0].outputs[0].token_ids == llm.generate(ids, params)[0].outputs[0].token_ids
    assert len(llm.chat([messages, messages], params)) == 2


@pytest.mark.parametrize("messages", [[], "hello", [{"role": "user"}], [{"content": "a"}], [[]],
                                      [{"role": 1, "content": "a"}], None,
                                      [{"role": "user", "content": None}], [[{"role": "user", "content": "a"}], [5]]])
def test_what_is_no_conversation(llm, messages):
    with pytest.raises(RequestError, match="messages must look like"):
        llm.chat(messages)


def test_outputs_become_json(llm):
    (output,) = llm.generate("Once", SamplingParams(temperature=0, max_tokens=3, logprobs=2))
    data = json.loads(json.dumps(output.to_dict()))
    assert data["text"] == output.text and len(data["logprobs"]) == 3
    assert data["metrics"]["num_output_tokens"] == 3 and data["metrics"]["time_to_first_token"] > 0


def test_fable_decodes_as_its_tokenizer_does():
    tokenizer = open_checkpoint("fable").tokenizer()
    ids = tokenizer("Once there was a girl.\nShe said: “naïve café” 😀!").input_ids
    assert fed(tokenizer, ids)[0] == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("bad", ["caf\udce9", "\ud800", "Once\udfff"])
def test_a_text_that_is_no_unicode_is_named_and_its_neighbours_run(llm, bad):
    params = SamplingParams(temperature=0, max_tokens=4)
    with pytest.raises(RequestError, match="the text cannot be read: character"):
        llm.generate(bad, params)
    with pytest.warns(UserWarning, match="prompt 1 cannot run"):
        first, wrong, last = llm.generate(["Once", bad, "There"], params)
    assert len(first.outputs[0].token_ids) == len(last.outputs[0].token_ids) == 4 and isinstance(wrong.error,
                                                                                                 RequestError)
    good = [{"role": "user", "content": "Tell me."}]
    with pytest.warns(UserWarning, match="prompt 0 cannot run"):
        wrong, right = llm.chat([[{"role": "user", "content": bad}], good], params)
    assert wrong.error and right.outputs[0].token_ids == llm.chat(good, params)[0].outputs[0].token_ids


@pytest.mark.parametrize("template, words", [
    ("{% for m in messages %}", "Unexpected end of template"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages[5]['content'] }}", "has no element 5"), ("{{ 1 / 0 }}", "division by zero"),
], ids=["syntax", "refusal", "missing", "error"])
def test_a_broken_chat_template_is_named_with_its_own_words(llm, monkeypatch, template, words):
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(RequestError, match=f"the chat template of .* cannot write this conversation: .*{words}"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_an_error_without_words_is_told_by_its_name(llm, monkeypatch):
    def fails(*_, **options):
        raise AssertionError

    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", fails)
    with pytest.raises(RequestError, match="cannot write this conversation: AssertionError$"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_chat_prompt_takes_one_conversation(llm):
    with pytest.raises(RequestError, match="chat_prompt takes one conversation, not 2; chat takes several"):
        llm.chat_prompt([[{"role": "user", "content": "hi"}]] * 2)

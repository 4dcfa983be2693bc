"""Bad requests and engines: each named, none of them takes another one down."""

import json
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.scripted import letters

from tplab.cache import CacheError
from tplab.checks import quoted
from tplab.engine import EngineError, RequestError, StrictError
from tplab.errors import TplabError
from tplab.llm import LLM, SamplingParams
from tplab.patch import Patch, PatchError
from tplab.shard import ShardPlanError

GREEDY = SamplingParams(temperature=0, max_tokens=4)
GOOD = [{"role": "user", "content": "Tell me."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("requests") / "m", max_positions=48)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, 2, logical=True, strict=True, block_size=4, num_blocks=10) as llm:
        yield llm


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """With a tokenizer and a chat template."""
    with LLM(letters(tmp_path_factory.mktemp("letters") / "m"), 2, logical=True) as llm:
        yield llm


@pytest.mark.parametrize("bad, message", [
    ([], "empty"), ([1] * 48, "has 48 tokens; prompt and output together can have 48"),
    ([1, 67], "token id 67 is not in the vocabulary: 0 to 66"), ([-1], "token id -1 is not in the vocabulary"),
    ([1.5], "token id 1.5"), ([True], "token id True"), ([10**5000], "token id a value of type int"),
    ([1] * 38, r"38 prompt tokens and 4 new ones need 11 blocks of 4, but the cache has 10; ask for at most 3 tokens "
               r"\(max_tokens\), or make an LLM with num_blocks=11"),
    ("hello", "no tokenizer"), (3.5, "must be a text or a list of token ids")], ids=lambda case: quoted(case)[:30])
def test_a_bad_prompt_is_named_before_anything_runs(llm, bad, message):
    with pytest.raises(RequestError, match=message):
        llm.generate([bad], GREEDY)
    for call in (llm.generate, lambda *request: list(llm.stream(*request))):
        with pytest.raises(RequestError, match=f"^prompt 1: .*{message}"):
            call([[1, 2, 3], bad, [4, 5]], GREEDY)
    assert not llm.has_unfinished_requests


@pytest.mark.parametrize("prompts, params, message", [
    (None, GREEDY, "a list of these with at least one"), (5, GREEDY, "a list of these with at least one"),
    ({"prompt": "a"}, GREEDY, "a list of these with at least one"), ([], GREEDY, "a list of these with at least one"),
    ("", GREEDY, "no tokenizer"), ([[1], [2]], [GREEDY], "there are 2 prompts, but 1 sampling_params"),
    ([[1], [2]], {"temperature": 0}, "sampling_params must be"),
    ([[1], [2]], [GREEDY, None], "sampling_params must be"),
    ([[1]], SamplingParams(stop_token_ids=[67]), "stop token id 67"),
    ([[1]], SamplingParams(stop="a"), "no tokenizer")], ids=str)
def test_calls_that_cannot_be(llm, prompts, params, message):
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    if not isinstance(prompts, list):
        with pytest.raises(RequestError, match="no tokenizer|a prompt must be a text or a list of token ids"):
            llm.add_request(prompts)
    assert not llm.has_unfinished_requests


def test_the_whole_cache_can_be_used(llm):
    """41 tokens fit into 10 blocks of 4: the last one is never read again. And output ends where the model ends."""
    (output,) = llm.generate([[1] * 37], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 4 and output.metrics.blocks_used == 10
    with LLM(llm.checkpoint, 1, logical=True) as roomy:
        (output,) = roomy.generate([[1] * 40], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].finish_reason == "length"


def test_numpy_numbers_are_as_good_as_pythons(folder):
    """They go to the ranks as JSON: one request with a numpy number ended the step of all."""
    params = SamplingParams(np.float32(1.5), np.int64(5), Fraction(9, 10), np.float16(0.25), np.int32(3), None,
                            [np.int64(4)], False, np.uint64(7), np.int8(2))
    plain = SamplingParams(1.5, 5, 0.9, 0.25, 3, None, [4], False, 7, 2)
    assert params == plain and repr(params) == repr(plain)
    with LLM(folder, np.int64(2), logical=True, strict=True, block_size=np.int32(4), num_blocks=np.int64(10),
             max_model_len=np.int16(40), max_num_seqs=np.uint8(2), max_num_batched_tokens=np.int64(8)) as llm:
        theirs, ours = llm.generate([list(np.array([1, 2, 3])), [1, 2, 3]], [params, plain])
        assert theirs.outputs[0].token_ids == ours.outputs[0].token_ids
        json.dumps(theirs.to_dict())
        assert all(type(size) is int for size in (llm.plan.tensor_parallel_size, llm.engine.pool.num_blocks,
                   llm.engine.pool.block_size, llm.engine.config.max_model_len, llm.engine.config.max_num_seqs))


@pytest.mark.parametrize("good", [
    {"temperature": 100}, {"top_k": -1}, {"top_k": 2**31}, {"top_p": 1e-12}, {"min_p": 0}, {"min_p": 1},
    {"max_tokens": 1}, {"max_tokens": None}, {"seed": 0}, {"seed": 2**63 - 1}, {"logprobs": 0}, {"logprobs": 100},
    {"temperature": 0, "top_k": 1}, {"temperature": 0, "top_k": -1}, {"temperature": 0, "top_p": 1}], ids=str)
def test_parameters_at_the_edge_of_what_is_allowed(good):
    params = SamplingParams(**good)
    assert all(getattr(params, name) == value for name, value in good.items())
    assert params.greedy == (good.get("temperature") == 0)


@pytest.mark.parametrize("wrong, message", [
    ({"temperature": 100.1}, "temperature must be a number from 0 up to 100, not 100.1"), ({"temperature": -1}, ""),
    ({"temperature": float("nan")}, ""), ({"temperature": "hot"}, ""), ({"temperature": True}, ""),
    ({"temperature": None}, ""), ({"temperature": 1j}, ""),
    ({"top_k": 2**31 + 1}, "top_k must be a whole number from -1 up to 2147483648"), ({"top_k": -2}, ""),
    ({"top_k": 1.5}, ""), ({"top_k": torch.tensor(3)}, ""),
    ({"top_p": 0.0}, "top_p must be a number above 0 to 1, not 0.0"), ({"top_p": 1.0001}, ""),
    ({"top_p": Decimal("0.5")}, ""), ({"top_p": Fraction(1, 10**400)}, ""), ({"min_p": 1.1}, ""), ({"min_p": -1}, ""),
    ({"max_tokens": 2**31 + 1}, "max_tokens .* or None"), ({"max_tokens": 0}, ""), ({"max_tokens": np.bool_(True)}, ""),
    ({"max_tokens": 10**5000}, ""), ({"seed": 2**63}, "seed .* or None"), ({"seed": -1}, ""), ({"seed": 1.0}, ""),
    ({"logprobs": 101}, "logprobs must be a whole number from 0 up to 100 or None, not 101"), ({"logprobs": -1}, ""),
    ({"stop": ["a", ""]}, "stop must be"), ({"stop": 5}, ""), ({"stop": b"a"}, ""), ({"stop": ["a", 3]}, ""),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids must be"), ({"stop_token_ids": "12"}, ""),
    ({"stop_token_ids": None}, ""), ({"stop_token_ids": [True]}, ""), ({"ignore_eos": 1}, "True or False"),
    ({"temperature": 0, "top_k": 2}, "contradicts top_k; leave top_k out"),
    ({"temperature": 0, "min_p": 0.5}, "contradicts min_p; leave min_p out"),
    ({"temperature": 0, "top_p": 0.5, "top_k": 3}, "contradicts top_k and top_p; leave top_k and top_p out"),
], ids=quoted)  # fmt: skip
def test_parameters_that_cannot_be(wrong, message):
    with pytest.raises(RequestError, match=message or None) as caught:
        SamplingParams(**wrong)
    assert any(name in str(caught.value) for name in wrong)


def test_stop_conditions_are_kept_as_tuples():
    ids, texts = [3, 5], ["a", "b"]
    params = SamplingParams(stop=texts, stop_token_ids=ids)
    texts.append("c"), ids.append(7)
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3, 5)) and SamplingParams(stop="ab").stop == ("ab",)


@pytest.mark.parametrize("options,error,message", [
    ({"num_blocks": 10**15}, EngineError,
     r"num_blocks=1000000000000000 with block_size=16 needs \d+\.\d GB on a rank, but this machine has \d+\.\d GB; "
     r"num_blocks times block_size can be at most \d+"),
    ({"num_blocks": True}, CacheError, "num_blocks must be"), ({"num_blocks": 0}, CacheError, "num_blocks must be"),
    ({"max_model_len": True}, EngineError, "max_model_len must be a whole number from 2 to 48"),
    ({"max_model_len": 49}, EngineError, "max_model_len must be a whole number from 2 to 48"),
    ({"tensor_parallel_size": True}, ShardPlanError, "tensor_parallel_size must be"),
    ({"tensor_parallel_size": 5}, ShardPlanError, "5 ranks cannot share 4 query heads"),
    ({"pool": 2}, EngineError, r"pool must be a RankPool, such as RankPool\(2\), or None, not 2"),
    ({"patches": None}, PatchError, "patches must be a list of faults"),
    ({"patches": [5]}, PatchError, "patches holds 5"),
    ({"patches": ["nan_musk"]}, (PatchError, TplabError), "nan_musk"),
    ({"patches": [Patch("tplab.cache.paged.no_such_thing", print)]}, PatchError, "no function"),
    ({"dtype": "float16"}, TplabError, "float32, float64, bfloat16"),
    ({"block_size": 0}, EngineError, "block_size must be"), ({"max_num_seqs": 0}, EngineError, "max_num_seqs must be"),
    ({"max_num_batched_tokens": 0}, EngineError, "max_num_batched_tokens must be"),
    ({"num_speculative_tokens": -1}, EngineError, "num_speculative_tokens must be"),
    ({"num_speculative_tokens": 1.5}, EngineError, "num_speculative_tokens must be"),
], ids=str)  # fmt: skip
def test_an_engine_that_cannot_be(folder, options, error, message):
    with pytest.raises(error, match=message) as caught:
        LLM(folder, logical=True, **options)
    assert isinstance(caught.value, TplabError)


@pytest.mark.parametrize("patch,message", [
    (Patch("tplab.cache.paged.slot_mapping",
           lambda block_ids, positions, block_size: [block_ids[p // block_size] * block_size + p % block_size + 1
                                                     for p in positions]), "but its blocks are"),
    (Patch("tplab.engine.sampler.best_offer", lambda offer_here: offer_here[:, 1].long()), "rank 1 drew"),
    (Patch("tplab.engine.scheduler.computed_after_prefix_hit", lambda blocks, block_size: 0),
     "sequences share|written before"),
    (Patch("tplab.engine.scheduler.free", lambda sequence: None), "block 0 is leaked"),
], ids=["slot off by one", "rank-local sampling", "prefix computed again", "leak"])
def test_strict_names_what_bugs_do(folder, patch, message):
    with LLM(folder, 2, logical=True, strict=True, patches=[patch], block_size=4, num_blocks=12) as llm:
        with pytest.raises(StrictError, match=message):
            for _ in range(2):
                llm.generate([[1, 2, 3, 4, 5, 6, 7, 8, 9]] * 2,
                             SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))


# Texts and conversations.


@pytest.mark.parametrize("messages", [[], "hello", [{"role": "user"}], [{"content": "a"}], [[]], None,
                                      [{"role": 1, "content": "a"}], [[{"role": "user", "content": "a"}]]])
def test_what_is_no_conversation(written, messages):
    with pytest.raises(RequestError, match="messages must look like"):
        written.chat(messages)


@pytest.mark.parametrize("bad", ["caf\udce9", "\ud800"])
def test_a_text_that_is_no_unicode_is_named(written, bad):
    for call, prompt in ((written.generate, bad), (written.chat, [{"role": "user", "content": bad}])):
        with pytest.raises(RequestError, match="the text cannot be read: character"):
            call(prompt, GREEDY)


@pytest.mark.parametrize("template, words", [
    ("{% for m in messages %}", "Unexpected end of template"), ("{{ messages[5]['content'] }}", "has no element 5"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"), ("{{ 1 / 0 }}", "division by zero")])
def test_a_broken_chat_template_is_named_with_its_own_words(written, monkeypatch, template, words):
    monkeypatch.setattr(written.tokenizer, "chat_template", template)
    with pytest.raises(RequestError, match=f"the chat template of .* cannot write this conversation: .*{words}"):
        written.chat(GOOD)

"""``batch_invariant=True``: the same log probabilities, bit for bit, in every batch and on 1 to 4 ranks."""

import pytest
from helpers.checkpoints import make_checkpoint
from helpers.trait_models import TRAITS, make_model

from tplab.checkpoint import open_checkpoint
from tplab.engine.errors import EngineError
from tplab.llm import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=60)
PROMPTS = [list(range(3, 3 + n)) for n in (21, 1, 13, 30)] + [list(range(3, 33)) + [40, 41]]
WAYS = {  # name → how the engine is made, and how many prompts it gets at a time
    "alone": ({}, 1),
    "in pairs": ({}, 2),
    "all at once": ({}, 5),
    "in chunks": ({"max_num_batched_tokens": 7, "enable_prefix_caching": False}, 5),
    "preempted": ({"num_blocks": 12, "enable_prefix_caching": False, "max_model_len": 48}, 5),
}
MODELS = {
    "9 heads, 3 kv": dict(heads=9, kv_heads=3, hidden=36, inter=43, attention_bias=True, model_type="qwen2"),
    "qk norm": dict(heads=4, kv_heads=2, inter=61, tie=True, model_type="qwen3", head_dim=12),
}
TRAITED = ["window by layer", "norm over the full width", "multipliers", "GLM-4"]


def texts(llm, at_a_time):
    """Tokens and log probabilities of every prompt."""
    outputs = [output for first in range(0, len(PROMPTS), at_a_time)
               for output in llm.generate(PROMPTS[first:first + at_a_time], GREEDY, use_tqdm=False)]
    return [[(token, [(t, found.logprob) for t, found in choices.items()])
             for token, choices in zip(output.outputs[0].token_ids, output.outputs[0].logprobs)] for output in outputs]


# All ways on one rank; on each number of ranks one of them.
ON = {1: WAYS, 2: ("in pairs",), 3: ("in chunks",), 4: ("preempted",)}


def all_ways(ckpt, ranks, dtype):
    for name in ON[ranks]:
        options, at_a_time = WAYS[name]
        with LLM(ckpt, ranks, dtype, batch_invariant=True, logical=True, strict=True, block_size=4,
                 **{"num_blocks": 64, "max_model_len": 64} | options) as llm:
            yield name, texts(llm, at_a_time)
            if name == "preempted":
                assert any(step.preempted for step in llm.scheduler.history)
            if name == "alone":
                assert sum(step.tokens.get(4, 0) for step in llm.scheduler.history) < len(PROMPTS[4])  # a prefix hit


@pytest.mark.parametrize("model, dtype", [("9 heads, 3 kv", "float32"), ("qk norm", "bfloat16")])
def test_every_way_and_every_number_of_ranks_gives_the_same_bits(tmp_path, model, dtype):
    ckpt = open_checkpoint(make_checkpoint(tmp_path, **MODELS[model]))
    expected = None
    for ranks in ON:
        for way, found in all_ways(ckpt, ranks, dtype):
            expected = expected or found
            assert found == expected, (ranks, way)


@pytest.mark.parametrize("trait", TRAITED)
def test_the_traits_of_other_models(tmp_path, trait):
    ckpt = open_checkpoint(make_model(tmp_path, **TRAITS[trait]))
    found = {}
    for ranks, way in ((1, "all at once"), (3, "in chunks")):
        options, at_a_time = WAYS[way]
        with LLM(ckpt, ranks, "float32", batch_invariant=True, logical=True, strict=True, block_size=4, num_blocks=64,
                 max_model_len=64, **options) as llm:
            found[way] = texts(llm, at_a_time)
    assert found["all at once"] == found["in chunks"]
    with LLM(ckpt, 1, "float64", logical=True) as llm:
        exact = texts(llm, 5)
    for own, true in zip(found["in chunks"], exact):
        for (token, choices), (true_token, true_choices) in zip(own, true):
            assert token == true_token
            assert max(abs(value - dict(true_choices)[t]) for t, value in choices if t in dict(true_choices)) < 1e-4


def test_on_real_ranks(tmp_path):
    """Two and three processes, with the collectives over shared memory."""
    with LLM("fable", 1, batch_invariant=True, logical=True) as llm:
        expected = texts(llm, 5)
    for ranks in (2, 3):
        with LLM("fable", ranks, batch_invariant=True) as llm:
            assert texts(llm, 5) == expected


def test_what_it_cannot_keep_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(EngineError, match="batch_invariant=True does not support experts"):
        LLM(make_model(tmp_path, **TRAITS["experts"]), 2, batch_invariant=True, logical=True)
    with pytest.raises(EngineError, match="float64"):
        LLM("fable", 2, "float64", batch_invariant=True, logical=True)

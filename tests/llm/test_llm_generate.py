"""Greedy output is Hugging Face's, token for token, however it is scheduled, paged and sharded."""

import random

import pytest
import torch
from helpers.checkpoints import LONGROPE, ROPES, make_checkpoint, shapes

from tplab.checkpoint import open_checkpoint
from tplab.llm import LLM, SamplingParams

NEW = 14  # tokens: beyond the original length of each rope type but yarn's, and more than the small caches hold


def hf_greedy(folder, prompts, max_tokens, dtype=torch.float64):
    """Each prompt by itself through Hugging Face's generate; a new model each, since some rope types remember."""
    from transformers import AutoModelForCausalLM

    outputs = []
    for prompt in prompts:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
                             eos_token_id=None, pad_token_id=0)
        outputs.append(out[0, len(prompt):].tolist())
    return outputs


def some_prompts(vocab, lengths=(5, 17, 1, 9), seed=0):
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(length)] for length in lengths]


def greedy(folder, prompts, max_tokens, tp=2, dtype="float64", **options):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(folder, tp, dtype, logical=True, strict=True, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.engine.pool.num_used == 0
    return [output.outputs[0].token_ids for output in outputs], outputs


@pytest.mark.parametrize("name", shapes())
def test_real_head_layouts_on_one_to_four_ranks(name, tmp_path):
    folder = make_checkpoint(tmp_path / "m", **shapes()[name])
    prompts = some_prompts(263, (5, 17, 1))
    expected = hf_greedy(folder, prompts, 6)
    for tp in (1, 2, 3, 4):
        assert greedy(folder, prompts, 6, tp, max_model_len=64)[0] == expected, f"tp {tp}"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A checkpoint, prompts of which two begin alike, and what Hugging Face makes of them."""
    folder = make_checkpoint(tmp_path_factory.mktemp("small") / "m", "qwen2", heads=6, kv_heads=3, hidden=48)
    prompts = some_prompts(67, (5, 23, 1, 12))
    prompts.append(prompts[1][:20] + [3, 1, 4])
    return folder, prompts, hf_greedy(folder, prompts, NEW)


@pytest.mark.parametrize("options", [
    {"block_size": 1, "max_num_batched_tokens": 7}, {"block_size": 64, "max_num_seqs": 1},
    {"max_num_batched_tokens": 1}, {"max_num_seqs": 2, "enable_prefix_caching": False},
    {"num_blocks": 12, "block_size": 4}, {"num_blocks": 16, "block_size": 3, "max_num_batched_tokens": 5},
], ids=str)  # fmt: skip
def test_scheduling_changes_nothing(small, options):
    folder, prompts, expected = small
    tokens, outputs = greedy(folder, prompts, NEW, **options)
    assert tokens == expected
    if "num_blocks" in options:
        assert sum(output.metrics.preemptions for output in outputs) > 0, "the cache was meant to be too small"


def test_prefix_hits_change_nothing(small):
    folder, prompts, expected = small
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with LLM(folder, 2, "float64", logical=True, strict=True, block_size=4) as llm:
        for _ in range(2):
            outputs = [llm.generate(prompt, params)[0] for prompt in prompts]
            assert [output.outputs[0].token_ids for output in outputs] == expected
    # The second time round, all whole blocks but the one with the last token are found.
    assert [output.metrics.prefix_hit_tokens for output in outputs] == [4, 20, 0, 8, 20]


@pytest.mark.parametrize("rope", ["dynamic", "longrope", "yarn"])
def test_rope_types_that_depend_on_the_length(tmp_path, rope):
    """Beyond the original length, in chunks and after preemption, keys are rotated as in Hugging Face."""
    rope_parameters = LONGROPE if rope == "longrope" else ROPES[rope]
    folder = make_checkpoint(tmp_path / "m", "llama", rope=rope_parameters,
                             max_positions=32 if rope == "dynamic" else 128)
    prompts = some_prompts(67, (5, 20, 30, 9))
    expected = hf_greedy(folder, prompts, NEW)
    for options in ({"max_num_batched_tokens": 7, "block_size": 3},
                    {"num_blocks": 10, "block_size": 8, "max_num_batched_tokens": 32}):
        assert greedy(folder, prompts, NEW, max_model_len=64, **options)[0] == expected, options


def test_fable_in_the_working_dtype():
    ckpt = open_checkpoint("fable")
    prompts = [ckpt.tokenizer()(text).input_ids for text in ("Once there was a girl.", "Mira had a fox")]
    expected = hf_greedy(ckpt.folder, prompts, 40, torch.float32)
    assert greedy(ckpt, prompts, 40, dtype="float32")[0] == expected

"""The long proof: 20 prompts, 128 tokens each, on one to four real ranks, against Hugging Face's generate.

Takes minutes (fable) to half an hour (smollm2, two slow cores), so it runs only when asked for:
``TPLAB_LONG=1 python -m pytest tests/test_engine_long.py``.
"""

import os

import pytest
import torch

from tplab.checkpoint import open_checkpoint
from tplab.llm import LLM, SamplingParams
from tplab.pool import RankPool

pytestmark = pytest.mark.skipif(not os.environ.get("TPLAB_LONG"), reason="the long proof runs with TPLAB_LONG=1")

TOKENS = 128
ENGLISH = [
    "The capital of France is", "Once upon a time", "def fibonacci(n):\n", "Water boils at", "Dear Sir or Madam,",
    "The three laws of robotics are", "1, 1, 2, 3, 5, 8, 13,", "In 1969, the first man", "To be, or not to be:",
    "Q: What is the largest planet?\nA:", "She opened the door and", "The recipe calls for two eggs,",
    "Naïve café, 東京, 😀:",
    "import numpy as np\n\n", "My favourite book is", "Breaking news:", "The derivative of x squared is", "Les enfants",
    "a", "The quick brown fox jumps over the lazy dog. The quick brown fox jumps over the lazy dog. The quick",
]  # fmt: skip


def prompts_of(name, tokenizer):
    if name == "smollm2":
        return [tokenizer(text).input_ids for text in ENGLISH]
    from course.fable.grammar import stories

    return [tokenizer(story.opening).input_ids for story in stories("held-out", 20)]


def hf_outputs(ckpt, prompts, dtype):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ckpt.folder, dtype=dtype, attn_implementation="eager")
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False,
                             eos_token_id=None, pad_token_id=0)
        outputs.append(out[0, len(prompt):].tolist())
    return outputs


def our_outputs(ckpt, prompts, tp, dtype, **options):
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with RankPool(tp, timeout=600) as pool, LLM(ckpt, tp, dtype, pool=pool, strict=True, max_model_len=512,
                                                **options) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="module", params=["fable", "smollm2"])
def case(request):
    ckpt = open_checkpoint(request.param)
    prompts = prompts_of(request.param, ckpt.tokenizer())
    assert len(prompts) == 20
    return ckpt, prompts, hf_outputs(ckpt, prompts, torch.float32)


def demand(case, tp, **options):
    ckpt, prompts, expected = case
    ours = our_outputs(ckpt, prompts, tp, "float32", **options)
    differing = [i for i in range(len(prompts)) if ours[i] != expected[i]]
    print(f"{ckpt.name}, tp {tp}, {options}: {len(prompts) - len(differing)} of {len(prompts)} equal in float32")
    if differing:  # rounding chose between two near-equal tokens, or there is a bug: float64 tells
        some = [prompts[i] for i in differing]
        assert our_outputs(ckpt, some, tp, "float64", **options) == hf_outputs(ckpt, some, torch.float64)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_every_number_of_ranks(case, tp):
    demand(case, tp)


@pytest.mark.parametrize("options", [
    {"block_size": 1, "enable_prefix_caching": False}, {"max_num_batched_tokens": 5, "block_size": 3},
    {"max_num_seqs": 3}, {"num_blocks": 40, "block_size": 16},
], ids=str)  # fmt: skip
def test_every_schedule(case, options):
    demand(case, 2, **options)

"""What is drawn, through an LLM: seeds, log probabilities, cold temperatures, NaN. See also tests/engine."""

from fractions import Fraction

import pytest
import torch
from helpers.checkpoints import make_checkpoint

from tplab.engine import RequestError
from tplab.faults import fault
from tplab.llm import LLM, SamplingParams
from tplab.patch import Patch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("sampling") / "m", heads=4, kv_heads=2, vocab=65)


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2, 3]]


def test_a_seed_gives_the_same_text_in_any_batch_and_on_any_ranks(folder):
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=12, top_k=k)
              for i, k in ((3, 0), (4, 9), (5, 0), (3, 0))]
    texts = []
    for tp, options in ((1, {}), (2, {"max_num_seqs": 1}), (3, {"num_blocks": 10, "block_size": 4})):
        with LLM(folder, tp, "float64", logical=True, strict=True, max_model_len=32, **options) as llm:
            texts.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)])
            texts.append([llm.generate(p, s)[0].outputs[0].token_ids for p, s in zip(PROMPTS, params)])
    assert all(tokens == texts[0] for tokens in texts)
    assert texts[0][0] == texts[0][3] != texts[0][1]


@pytest.mark.parametrize("tp", [1, 2])
def test_what_a_seed_promises_in_bfloat16(folder, tp):
    """On as many ranks and beside the same neighbours, the same text. Without a seed, outputs differ."""
    params = [SamplingParams(seed=seed, max_tokens=12) for seed in range(4)]
    with LLM(folder, tp, "bfloat16", logical=True) as llm:
        first, again = ([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)] for _ in range(2))
        a, b = llm.generate([[1, 2], [1, 2]], SamplingParams(max_tokens=20))
    assert first == again and a.outputs[0].token_ids != b.outputs[0].token_ids


def test_logprobs_are_those_of_the_model(folder):
    from transformers import AutoModelForCausalLM

    with LLM(folder, 2, "float64", logical=True) as llm:
        (output,) = llm.generate([7, 8, 9], SamplingParams(temperature=1.5, seed=1, max_tokens=6, logprobs=3))
    tokens = output.outputs[0].token_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    reference = model(torch.tensor([[7, 8, 9, *tokens]])).logits[0, 2:-1].log_softmax(-1)
    for row, token, choices in zip(reference, tokens, output.outputs[0].logprobs, strict=True):
        assert choices[token].logprob == pytest.approx(row[token].item(), abs=1e-5)
        assert choices[token].rank == int((row > row[token]).sum()) + 1
        assert set(row.topk(3).indices.tolist()) <= set(choices)


@pytest.mark.parametrize("temperature", [5e-324, 1e-250, Fraction(1, 10**400), 1e-199])
def test_the_coldest_temperatures_are_greedy(folder, temperature):
    """A logit divided by them is infinite, all infinities are equal, and the text was one token for ever."""
    with LLM(folder, 2, logical=True) as llm:
        greedy, cold, narrowed = llm.generate([[1, 2, 3]] * 3, [
            SamplingParams(temperature=0, max_tokens=8),
            SamplingParams(temperature=temperature, max_tokens=8, logprobs=1),
            SamplingParams(temperature=max(temperature, 5e-324), max_tokens=8, top_p=0.9, top_k=5)])
    assert greedy.outputs[0].token_ids == cold.outputs[0].token_ids == narrowed.outputs[0].token_ids


def nan_for_top_k(top_k):
    """A fault on the ranks: the logits of requests with this top_k are NaN from their third new token on."""
    from tplab.engine.sampler import sample as right

    def broken(model, logits_here, draws):
        rows = [row for row, draw in enumerate(draws) if draw.top_k == top_k and draw.position >= 2]
        logits_here[rows] = float("nan")
        return right(model, logits_here, draws)

    return Patch("tplab.engine.runner.sample", broken)


def test_nan_ends_the_request_and_says_so(folder):
    params = [SamplingParams(seed=1, top_k=k, max_tokens=5, ignore_eos=True, logprobs=1) for k in (60, 7)]
    message = (r"request \d+ cannot go on: the logits for its token 6 \(3 of the prompt and 2 new ones stand before "
               r"it\) are NaN, and temperature 1.0 has nothing to draw from; align\(model, prompt\) shows")
    with LLM(folder, 2, logical=True, strict=True) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate([[1, 2, 3], [4, 5, 6]], params)]
    with LLM(folder, 2, logical=True, strict=True, patches=[nan_for_top_k(7)]) as llm:
        llm.add_request([4, 5, 6], params[1])
        *_, (output,) = [llm.step() for _ in range(3)]  # first, since a caller that misses the end waits for ever
        assert output.finished and isinstance(output.error, RequestError) and not llm.has_unfinished_requests
        assert output.outputs[0].token_ids == expected[1][:2] and len(output.outputs[0].logprobs) == 2
        assert output.outputs[0].finish_reason == "error" and output.to_dict()["error"] == str(output.error)
        whole = {}
        with pytest.raises(RequestError, match=message):
            for chunk in llm.stream([[1, 2, 3], [4, 5, 6]], params):
                whole[chunk.index] = chunk.output.outputs[0].token_ids
        assert whole == {0: expected[0], 1: expected[1][:2]}, "the others go on to their ends"
        with pytest.raises(RequestError, match=message):
            llm.generate([4, 5, 6], params[1])
        assert llm.engine.pool.num_used == 0


def test_the_mask_that_writes_nan_still_shows_in_greedy_text():
    with LLM("fable", 2, logical=True, patches=[fault("nan_mask")]) as llm:
        (output,) = llm.generate("Once there was", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        assert set(output.outputs[0].token_ids) == {0}

"""One token for all ranks: ties, NaN, seeds, filters, log probabilities."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.checkpoints import make_checkpoint
from helpers.sampling import on_ranks

from tplab.checks import quoted
from tplab.engine import RequestError
from tplab.engine.sampler import best_offer, gumbel_noise, lowest_allowed, offer
from tplab.engine.step import SamplingMetadata
from tplab.faults import fault
from tplab.llm import LLM, SamplingParams
from tplab.patch import Patch
from tplab.ranks import logical_ranks, rank

GREEDY = SamplingMetadata(0.0, 0, 1.0, 0.0, 0, 0, None)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_greedy_is_argmax_ties_and_nan_included(tp, dtype):
    generator = torch.Generator().manual_seed(tp)
    logits = torch.randint(0, 4, (40, 13), generator=generator).to(dtype)  # ties everywhere
    logits[0] = 2.0
    logits[1, 5:9] = float("nan")
    logits[2] = float("nan")
    logits[3] = float("-inf")
    logits[4, 12] = float("inf")
    expected = logits.argmax(-1).tolist()
    for tokens, _ in on_ranks(tp, logits, [GREEDY] * 40):
        assert tokens == expected


def test_greedy_gathers_two_numbers_per_rank_not_the_vocabulary():
    def on_rank():
        from tplab.ranks import op_log

        best_offer(offer(torch.randn(3, 500), 500 * rank()))
        return [(record.op, list(record.shape)) for record in op_log()]

    for log in logical_ranks(2, on_rank):
        assert log == [("all_gather", [3, 2])]


@pytest.mark.parametrize("draw", [
    SamplingMetadata(1.0, 0, 1.0, 0.0, 5, 3, None), SamplingMetadata(0.7, 4, 1.0, 0.0, 5, 3, None),
    SamplingMetadata(1.3, 0, 0.8, 0.0, 5, 3, None),
    SamplingMetadata(2.0, 0, 1.0, 0.2, 5, 3, None), SamplingMetadata(0.9, 6, 0.9, 0.05, 5, 3, 4)], ids=str)
def test_a_draw_does_not_depend_on_the_ranks_nor_on_its_neighbours(draw):
    logits = torch.randn(3, 29, generator=torch.Generator().manual_seed(1))
    alone = on_ranks(1, logits[1:2], [draw])[0][0]
    for tp in (1, 2, 3, 4):
        for tokens, _ in on_ranks(tp, logits, [GREEDY, draw, draw._replace(seed=6)]):
            assert tokens[1:2] == alone


def test_frequencies_are_the_softmax():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 3.0, 0.5]])
    draws = [SamplingMetadata(0.8, 0, 1.0, 0.0, 11, i, None) for i in range(4000)]
    tokens = torch.tensor(on_ranks(2, logits.expand(4000, -1), draws)[0][0])
    expected = (logits[0] / 0.8).softmax(-1)
    counted = torch.bincount(tokens, minlength=6) / 4000
    assert (counted - expected).abs().max() < 4 * math.sqrt(0.25 / 4000)


def test_every_position_and_seed_has_noise_of_its_own():
    noises = torch.stack([gumbel_noise(seed, position, 50) for seed in range(6) for position in range(6)])
    assert len(noises.unique(dim=0)) == 36
    assert torch.equal(gumbel_noise(3, 4, 50), gumbel_noise(3, 4, 50))
    assert gumbel_noise(2**62, 10, 5).isfinite().all()


@pytest.mark.parametrize("top_k,top_p,min_p",
                         [(1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.5, 0.0), (0, 1e-6, 0.0), (0, 1.0, 0.3),
                                               (7, 0.8, 0.0), (9, 0.95, 0.1), (1000, 1.0, 0.0)])
def test_filters_keep_what_hugging_face_keeps(top_k, top_p, min_p):
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    for seed in range(20):
        kept = logits = 2 * torch.randn(1, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        if top_k > 0:
            kept = TopKLogitsWarper(top_k)(None, kept)
        if top_p < 1:
            kept = TopPLogitsWarper(top_p)(None, kept)
        if min_p > 0:
            kept = MinPLogitsWarper(min_p)(None, kept)
        lowest = lowest_allowed(logits[0], SamplingMetadata(1.0, top_k, top_p, min_p, 0, 0, None))
        assert torch.equal(logits[0] >= lowest, kept[0].isfinite())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("sampling") / "m", heads=4, kv_heads=2, vocab=65)


def test_a_seed_gives_the_same_text_in_any_batch_and_on_any_ranks(folder):
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2, 3]]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=12, top_k=k)
              for i, k in ((3, 0), (4, 9), (5, 0), (3, 0))]
    seen = []
    for tp, options in ((1, {}), (2, {"max_num_seqs": 1}), (3, {"num_blocks": 10, "block_size": 4})):
        with LLM(folder, tp, "float64", logical=True, strict=True, max_model_len=32, **options) as llm:
            seen.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])
            seen.append([llm.generate(p, s)[0].outputs[0].token_ids for p, s in zip(prompts, params)])
    assert all(tokens == seen[0] for tokens in seen)
    assert seen[0][0] == seen[0][3] != seen[0][1]


def test_without_a_seed_outputs_differ(folder):
    with LLM(folder, 1, logical=True) as llm:
        a, b = llm.generate([[1, 2], [1, 2]], SamplingParams(max_tokens=20))
    assert a.outputs[0].token_ids != b.outputs[0].token_ids


def test_logprobs_are_those_of_the_model(folder):
    from transformers import AutoModelForCausalLM

    with LLM(folder, 2, "float64", logical=True) as llm:
        (output,) = llm.generate([7, 8, 9], SamplingParams(temperature=1.5, seed=1, max_tokens=6, logprobs=3))
    tokens = output.outputs[0].token_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    reference = model(torch.tensor([[7, 8, 9, *tokens]])).logits[0, 2:-1].log_softmax(-1)
    for row, token, found in zip(reference, tokens, output.outputs[0].logprobs, strict=True):
        assert found[token].logprob == pytest.approx(row[token].item(), abs=1e-5)
        assert found[token].rank == int((row > row[token]).sum()) + 1
        assert [t for t, p in found.items() if p.rank <= 3] and set(row.topk(3).indices.tolist()) <= set(found)


def test_numbers_of_other_kinds_become_pythons_own(folder):
    """They go to the ranks as JSON: one request with a numpy number ended the step of all."""
    params = SamplingParams(np.float32(1.5), np.int64(5), Fraction(9, 10), np.float16(0.25), np.int32(3), None,
                            [np.int64(4)], False, np.uint64(7), np.int8(2))
    plain = SamplingParams(1.5, 5, 0.9, 0.25, 3, None, [4], False, 7, 2)
    assert params == plain and repr(params) == repr(plain)
    with LLM(folder, 2, logical=True) as llm:
        ours, theirs = llm.generate([[1, 2], [1, 2]], [plain, params])
    assert theirs.outputs[0].token_ids == ours.outputs[0].token_ids and len(theirs.outputs[0].token_ids) == 3


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-306, 1e-250, Fraction(1, 10**400), 1e-199])
def test_the_coldest_temperatures_are_greedy(folder, temperature):
    """A logit divided by them is infinite, all infinities are equal, and the text was one token for ever."""
    with LLM(folder, 2, logical=True) as llm:
        greedy, cold, narrowed = llm.generate([[1, 2, 3]] * 3, [
            SamplingParams(temperature=0, max_tokens=8),
            SamplingParams(temperature=temperature, max_tokens=8, logprobs=1),
            SamplingParams(temperature=max(temperature, 5e-324), max_tokens=8, top_p=0.9, top_k=5)])
    assert greedy.outputs[0].token_ids == cold.outputs[0].token_ids == narrowed.outputs[0].token_ids


@pytest.mark.parametrize("wrong", [
    {"temperature": -1}, {"temperature": float("nan")}, {"temperature": "hot"}, {"temperature": True}, {"top_k": -2},
    {"top_k": 1.5}, {"top_p": 0}, {"top_p": 1.1}, {"min_p": -0.1}, {"min_p": float("inf")}, {"max_tokens": 0},
    {"max_tokens": 2.0}, {"seed": -1}, {"seed": 2**64}, {"logprobs": -1}, {"ignore_eos": 1}, {"stop": 5},
    {"stop": [""]},
    {"stop": ["a", 3]}, {"stop": b"a"}, {"stop_token_ids": "12"}, {"stop_token_ids": [-1]}, {"stop_token_ids": [True]},
    {"temperature": 0, "top_p": 0.9}, {"temperature": 0, "top_k": 5, "min_p": 0.1}, {"max_tokens": 10**5000},
    {"top_p": Decimal("0.5")}, {"top_p": Fraction(1, 10**400)}, {"seed": np.float64(1)}, {"max_tokens": np.bool_(True)},
    {"temperature": 1j}, {"top_k": torch.tensor(3)}, {"stop_token_ids": [1.0]},
], ids=quoted)  # fmt: skip
def test_wrong_parameters_are_named(wrong):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong)
    assert any(name in str(caught.value) for name in wrong)


def test_a_greedy_token_has_rank_1_and_equals_share_a_rank():
    """bfloat16 has ties all the time; the lowest id is taken, and named first."""
    logits = torch.zeros(40, 31, dtype=torch.bfloat16)
    logits += torch.randint(0, 3, logits.shape, generator=torch.Generator().manual_seed(2))
    draws = [GREEDY._replace(logprobs=count % 6) for count in range(40)]
    for _tokens, logprobs in on_ranks(2, logits, draws):
        for row, draw in enumerate(draws):
            (token, _, rank_of_it), *top = logprobs[row]
            best = sorted(range(31), key=lambda t: (-logits[row, t], t))[:draw.logprobs]
            assert (token, rank_of_it) == (int(logits[row].argmax()), 1)
            assert [(t, r) for t, _, r in top] == [(t, int((logits[row] > logits[row, t]).sum()) + 1) for t in best]


@pytest.mark.parametrize("draw", [
    SamplingMetadata(1.0, 0, 1.0, 0.0, 5, 3, None), SamplingMetadata(0.5, 4, 1.0, 0.0, 5, 3, 2),
    SamplingMetadata(1.0, 0, 0.5, 0.0, 5, 3, None), SamplingMetadata(1.0, 0, 1.0, 0.1, 5, 3, 0)], ids=str)
@pytest.mark.parametrize("where", [slice(None), slice(3, 4), slice(12, 13)], ids=["all", "one", "last"])
def test_nothing_is_drawn_from_nan(draw, where):
    """Whichever rank has it; greedy goes on as argmax does, and so do the neighbours."""
    logits = torch.randn(3, 13, generator=torch.Generator().manual_seed(1))
    clean = on_ranks(1, logits, [draw] * 3)[0][0]
    logits[1, where] = float("nan")
    for tp in (1, 2, 3):
        for tokens, logprobs in on_ranks(tp, logits, [draw, draw, draw]):
            assert tokens == [clean[0], None, clean[2]] and 1 not in logprobs
        for tokens, logprobs in on_ranks(tp, logits, [draw, GREEDY._replace(logprobs=2), draw]):
            assert tokens[1] == int(logits[1].argmax()) and len(logprobs[1]) == 3


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
               r"it\) "
               r"are NaN, and temperature 1.0 has nothing to draw from; align\(model, prompt\) shows at which point "
               r"NaN begins")
    with LLM(folder, 2, logical=True, strict=True) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate([[1, 2, 3], [4, 5, 6]], params)]
    with LLM(folder, 2, logical=True, strict=True, patches=[nan_for_top_k(7)]) as llm:
        llm.add_request([4, 5, 6], params[1])
        *_, (output,) = [llm.step() for _ in range(3)]  # first, since a caller that misses the end waits for ever
        assert output.finished and isinstance(output.error, RequestError) and not llm.has_unfinished_requests
        with pytest.warns(UserWarning, match="prompt 1 ended early, the others did not: " + message):
            good, bad = llm.generate([[1, 2, 3], [4, 5, 6]], params)
        assert good.outputs[0].token_ids == expected[0] and good.error is None
        assert bad.outputs[0].token_ids == expected[1][:2] and len(bad.outputs[0].logprobs) == 2 and bad.finished
        assert bad.outputs[0].finish_reason == "error" and bad.to_dict()["error"] == str(bad.error)
        with pytest.raises(RequestError, match=message):
            llm.generate([4, 5, 6], params[1])
        with pytest.raises(RequestError, match=message):
            list(llm.stream([4, 5, 6], params[1]))
        assert llm.engine.pool.num_used == 0


def test_the_mask_that_writes_nan_still_shows_in_greedy_text():
    with LLM("fable", 2, logical=True, patches=[fault("nan_mask")]) as llm:
        (output,) = llm.generate("Once there was", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        assert set(output.outputs[0].token_ids) == {0}
        with pytest.raises(RequestError, match="are NaN"):
            llm.generate("Once there was", SamplingParams(max_tokens=3))


def test_what_a_seed_promises_in_bfloat16(folder):
    """On as many ranks and beside the same neighbours, the same text; on other ranks, sums are rounded elsewhere."""
    params = [SamplingParams(seed=seed, max_tokens=12) for seed in range(4)]
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2, 3]]
    for tp in (1, 2):
        with LLM(folder, tp, "bfloat16", logical=True) as llm:
            first, again = ([o.outputs[0].token_ids for o in llm.generate(prompts, params)] for _ in range(2))
        assert first == again

"""Which tokens may be drawn, and which one is: as Hugging Face's warpers say, over dtypes, vocabularies and ranks."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.sampling import on_ranks
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tplab.engine import sampler
from tplab.engine.sampler import gumbel_noise, sample
from tplab.engine.step import SamplingMetadata
from tplab.ranks import logical_ranks
from tplab.shard import split_evenly

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
VOCABULARIES = [13, 300, 1000, 32003]  # bfloat16 counts to 256
FILTERS = [(0, 1.0, 0.0), (-1, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (10**6, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.3, 0.0),
           (0, 1e-9, 0.0), (0, 1.0, 0.02), (0, 1.0, 0.4), (0, 1.0, 1.0), (7, 0.8, 0.0), (9, 1.0, 0.1), (0, 0.95, 0.05),
           (12, 0.97, 0.02)]
TEMPERATURES = [0.3, 1.0, 2.5]
DRAWS = [SamplingMetadata(temperature, *filters, seed, 2, None)
         for seed, (temperature, filters) in enumerate((t, f) for t in TEMPERATURES for f in FILTERS)]


def draws_over(vocabulary):
    """All of them; over a large vocabulary every fourth, which is every filter once, at one temperature or another."""
    return DRAWS if vocabulary < 2000 else DRAWS[::4]


def sampled(tp, logits, draws):
    """``sample`` on ``tp`` logical ranks over ``logits [n, vocabulary]``: the one answer that all ranks give."""
    answers = on_ranks(tp, logits, draws)
    assert all(answer == answers[0] for answer in answers), "ranks disagree"
    return answers[0]


def some_logits(rows, vocabulary, dtype, seed=0):
    """Of order 1 to 10; in bfloat16 many of them are equal, and the best ids are beyond 256 where there are such."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)).to(dtype)


def warped(row, draw):
    """What Hugging Face leaves of a row, in float64: -inf where a token may not be drawn."""
    scores = TemperatureLogitsWarper(draw.temperature)(None, row[None].double())
    if draw.top_k > 0:
        scores = TopKLogitsWarper(draw.top_k)(None, scores)
    if draw.top_p < 1:
        kept = TopPLogitsWarper(draw.top_p)(None, scores)
        # Of equals at the edge Hugging Face takes those that its sort puts last; here equals stay together.
        scores = scores.masked_fill(scores < kept[kept.isfinite()].min(), -torch.inf)
    if draw.min_p > 0:
        scores = MinPLogitsWarper(draw.min_p)(None, scores)
    return scores[0]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_draw_is_from_what_hugging_face_leaves(vocabulary, dtype):
    draws = draws_over(vocabulary)
    logits = some_logits(len(draws), vocabulary, dtype)
    noises = [gumbel_noise(draw.seed, draw.position, vocabulary) for draw in draws]
    expected = [int((warped(row, draw) + noise).argmax()) for row, draw, noise in zip(logits, draws, noises)]
    for tp in (1, 2, 3):
        assert sampled(tp, logits, draws) == (expected, {}), f"tp {tp}"
    if vocabulary > 300:
        assert sum(token > 256 for token in expected) > len(draws) / 2, "most ids must be beyond what bfloat16 counts"


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_least_token_that_may_be_drawn(monkeypatch, vocabulary, dtype):
    """With noise that turns the order around, the least probable token that the filters let through wins."""
    draws = draws_over(vocabulary)
    logits = some_logits(len(draws), vocabulary, dtype, seed=1)
    noises = {draw.seed: -1000 * row.double() for row, draw in zip(logits, draws)}
    monkeypatch.setattr(sampler, "gumbel_noise", lambda seed, position, vocab_size: noises[seed])
    expected = [int((warped(row, draw) + noises[draw.seed]).argmax()) for row, draw in zip(logits, draws)]
    for tp in (1, 2, 3):
        assert sampled(tp, logits, draws)[0] == expected, f"tp {tp}"


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_most_probable_token_in_any_place(vocabulary, dtype):
    """Every rank's first and last id, and ids that bfloat16 would round, among draws at a temperature."""
    ids = {0, 1, vocabulary - 1, vocabulary - 2, 257 % vocabulary, 999 % vocabulary}
    for tp in (2, 3):
        ids |= {edge for part in split_evenly(vocabulary, tp) for edge in (part.start, part.stop - 1)}
    logits = some_logits(len(ids) + 1, vocabulary, dtype)
    for row, token in enumerate(sorted(ids)):
        logits[row, token] = 30.0
    greedy = SamplingMetadata(0.0, 0, 1.0, 0.0, 0, 0, None)
    draws = [greedy] * len(ids) + [DRAWS[0]]
    for tp in (1, 2, 3):
        assert sampled(tp, logits, draws)[0][:-1] == sorted(ids), f"tp {tp}"


@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("above", [0.0, 1e-9])
def test_an_exact_tie_at_top_p(monkeypatch, kept, above):
    """Tokens that together reach top_p exactly are enough: the next one is out, as in Hugging Face."""
    logits = math.log(2) * torch.tensor([[-99.0, -1.0, -2.0, 0.0, -99.0, -2.0, -99.0]], dtype=torch.float64)
    order = [3, 1, 2]  # with a half, a quarter, and twice an eighth
    together = logits[0].sort(descending=True).values.softmax(-1).cumsum(-1)[kept - 1].item()
    assert together == pytest.approx((0.5, 0.75)[kept - 1], abs=1e-15)
    monkeypatch.setattr(sampler, "gumbel_noise", lambda seed, position, vocab_size: -1000 * logits[0].clamp(min=-50))
    for tp in (1, 2, 3):
        tokens, _ = sampled(tp, logits, [SamplingMetadata(1.0, 0, together + above, 0.0, 0, 0, None)])
        assert tokens == [order[kept - 1 + bool(above)]]


@pytest.mark.parametrize("min_p", [0.05, 0.1, 0.3, 0.7])
def test_an_exact_tie_at_min_p(min_p):
    """A token exactly that fraction as probable as the most probable one stays; a billionth less, and it is out."""
    edge = torch.tensor(min_p, dtype=torch.float64).log()
    draws = [SamplingMetadata(1.0, 0, 1.0, min_p, seed, 0, None) for seed in range(60)]
    for shift, kept in ((0.0, {1, 3}), (-1e-9, {1})):
        logits = torch.tensor([[-50.0, 2.0, -50.0, 2.0 + edge + shift, -50.0]], dtype=torch.float64).expand(60, -1)
        assert set(sampled(2, logits - 2.0, draws)[0]) == kept


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [13, 1000])
def test_log_probabilities_are_the_models_before_temperature_and_filters(temperature, dtype, vocabulary):
    counts = [None, 0, 1, 3, 13, None]
    generator = torch.Generator().manual_seed(3)
    logits = torch.stack([torch.randperm(vocabulary, generator=generator) for _ in counts]).double() / vocabulary * 6
    logits = logits.to(dtype)
    narrow = {"top_k": 4, "top_p": 0.7, "min_p": 0.05} if temperature else {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    draws = [SamplingMetadata(temperature=temperature, seed=9, position=i, logprobs=count, **narrow)
             for i, count in enumerate(counts)]
    for tp in (1, 3):
        tokens, found = sampled(tp, logits, draws)
        assert sorted(found) == [1, 2, 3, 4]
        for row, entries in found.items():
            reference = logits[row].double().log_softmax(-1)
            assert len(entries) == 1 + counts[row] and entries[0][0] == tokens[row]
            for token, value, place in entries:
                assert value == pytest.approx(reference[token].item(), abs=1e-12)
                assert place == int((reference > reference[token]).sum()) + 1
            top = [value for _, value, _ in entries[1:]]
            assert top == pytest.approx(reference.sort(descending=True).values[:counts[row]].tolist(), abs=1e-12)
            assert len({t for t, _, _ in entries[1:]}) == counts[row]


def test_more_log_probabilities_than_there_are_tokens():
    logits = some_logits(1, 13, torch.float32)
    for tp in (1, 2):
        _, found = sampled(tp, logits, [SamplingMetadata(1.0, 0, 1.0, 0.0, 0, 0, 100)])
        assert [token for token, _, _ in found[0][1:]] == logits[0].argsort(descending=True).tolist()


def test_asking_for_log_probabilities_does_not_change_the_draw():
    logits = some_logits(len(DRAWS), 300, torch.float32)
    plain = sampled(2, logits, DRAWS)[0]
    assert sampled(2, logits, [draw._replace(logprobs=0) for draw in DRAWS])[0] == plain
    assert sampled(2, logits, [draw._replace(logprobs=2) for draw in DRAWS])[0] == plain


def test_only_rows_that_need_it_are_gathered(monkeypatch):
    """The whole vocabulary of a row crosses the ranks for filters and log probabilities only."""
    gathered = []
    logits = some_logits(5, 40, torch.float32)
    draws = [SamplingMetadata(0.0, 0, 1.0, 0.0, 0, 0, None), SamplingMetadata(1.0, 0, 1.0, 0.0, 0, 0, None),
             SamplingMetadata(1.0, 0, 1.0, 0.1, 0, 0, None),
             SamplingMetadata(0.0, 0, 1.0, 0.0, 0, 0, 0), SamplingMetadata(1.0, -1, 1.0, 0.0, 0, 0, None)]

    def gather(part):
        gathered.append(part.clone())
        return part

    lm_head = SimpleNamespace(rows=range(40), num_embeddings=40, gather=gather)
    logical_ranks(1, sample, lm_head, logits, draws)
    assert len(gathered) == 1 and torch.equal(gathered[0], logits[[2, 3]])
    logical_ranks(1, sample, lm_head, logits[:2], draws[:2])
    assert len(gathered) == 1


def test_the_noise_is_gumbels():
    """Mean is Euler's constant, variance π²/6; half of it lies below -log(log 2)."""
    noise = gumbel_noise(1, 0, 200_000)
    assert noise.dtype == torch.float64 and noise.shape == (200_000,)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.03)
    assert (noise < -math.log(math.log(2))).double().mean().item() == pytest.approx(0.5, abs=0.01)


def test_no_two_draws_share_their_noise():
    seeds, positions = (0, 1, 2, 5, 2**31 + 1, 2**32, 2**32 + 1, 2**33, 2**62, 2**62 + 7), (0, 1, 2, 50)
    seen = {tuple(gumbel_noise(seed, position, 3).tolist()) for seed in seeds for position in positions}
    assert len(seen) == len(seeds) * len(positions)


def test_rows_draw_by_their_own_seed_and_position():
    logits = torch.zeros(1, 1000)
    draw = SamplingMetadata(1.0, 0, 1.0, 0.0, 3, 0, None)
    draws = [draw._replace(seed=seed, position=position) for seed in (0, 1, 2) for position in (0, 1, 2)]
    tokens = [sampled(2, logits, [one])[0][0] for one in draws]
    assert len(set(tokens)) == 9
    assert sampled(2, logits.expand(9, -1), draws)[0] == tokens

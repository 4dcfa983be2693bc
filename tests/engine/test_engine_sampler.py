"""Which tokens may be drawn, and which one is: as Hugging Face's warpers say, over dtypes, vocabularies and ranks."""

import math

import pytest
import torch
from helpers.sampling import on_ranks
from helpers.turns import by_turns
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tplab.engine import sampler
from tplab.engine.sampler import gumbel_noise
from tplab.engine.step import SamplingMetadata
from tplab.ranks import logical_ranks, op_log, rank
from tplab.shard import split_evenly

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
GREEDY = SamplingMetadata(0.0, 0, 1.0, 0.0, 0, 0, None)
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


@pytest.mark.parametrize("vocabulary, dtype", by_turns(VOCABULARIES, DTYPES))
def test_the_draw_is_from_what_hugging_face_leaves(vocabulary, dtype):
    draws = draws_over(vocabulary)
    logits = some_logits(len(draws), vocabulary, dtype)
    noises = [gumbel_noise(draw.seed, draw.position, vocabulary) for draw in draws]
    expected = [int((warped(row, draw) + noise).argmax()) for row, draw, noise in zip(logits, draws, noises)]
    for tp in (1, 2, 3):
        assert sampled(tp, logits, draws) == (expected, {}), f"tp {tp}"
    if vocabulary > 300:
        assert sum(token > 256 for token in expected) > len(draws) / 2, "most ids must be beyond what bfloat16 counts"


@pytest.mark.parametrize("vocabulary, dtype", by_turns(VOCABULARIES, DTYPES))
def test_the_least_token_that_may_be_drawn(monkeypatch, vocabulary, dtype):
    """With noise that turns the order around, the least probable token that the filters let through wins."""
    draws = draws_over(vocabulary)
    logits = some_logits(len(draws), vocabulary, dtype, seed=1)
    noises = {draw.seed: -1000 * row.double() for row, draw in zip(logits, draws)}
    monkeypatch.setattr(sampler, "gumbel_noise", lambda seed, position, vocab_size: noises[seed])
    expected = [int((warped(row, draw) + noises[draw.seed]).argmax()) for row, draw in zip(logits, draws)]
    for tp in (1, 2, 3):
        assert sampled(tp, logits, draws)[0] == expected, f"tp {tp}"


@pytest.mark.parametrize("vocabulary, dtype", by_turns(VOCABULARIES, DTYPES))
def test_the_most_probable_token_in_any_place(vocabulary, dtype):
    """Every rank's first and last id, and ids that bfloat16 would round, among draws at a temperature."""
    ids = {0, 1, vocabulary - 1, vocabulary - 2, 257 % vocabulary, 999 % vocabulary}
    for tp in (2, 3):
        ids |= {edge for part in split_evenly(vocabulary, tp) for edge in (part.start, part.stop - 1)}
    logits = some_logits(len(ids) + 1, vocabulary, dtype)
    for row, token in enumerate(sorted(ids)):
        logits[row, token] = 30.0
    draws = [GREEDY] * len(ids) + [DRAWS[0]]
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


@pytest.mark.parametrize("temperature, dtype, vocabulary", by_turns([0.0, 0.5, 2.0], DTYPES, [13, 1000]))
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


def test_no_two_draws_share_their_noise():
    seeds, positions = (0, 1, 2, 5, 2**31 + 1, 2**32, 2**32 + 1, 2**33, 2**62, 2**62 + 7), (0, 1, 2, 50)
    seen = {tuple(gumbel_noise(seed, position, 3).tolist()) for seed in seeds for position in positions}
    assert len(seen) == len(seeds) * len(positions)


@pytest.mark.parametrize("tp, dtype", by_turns([1, 2, 3, 4], DTYPES))
def test_greedy_is_argmax_ties_and_nan_included(tp, dtype):
    """Of equal scores the lowest id is taken, and named first; equals share a rank."""
    logits = torch.randint(0, 4, (40, 13), generator=torch.Generator().manual_seed(tp)).to(dtype)  # ties everywhere
    logits[1, 5:9], logits[2], logits[3], logits[4, 12] = torch.nan, torch.nan, -torch.inf, torch.inf
    tokens, logprobs = sampled(tp, logits, [GREEDY] * 5 + [GREEDY._replace(logprobs=row % 6) for row in range(5, 40)])
    assert tokens == logits.argmax(-1).tolist()
    for row, (drawn, *top) in logprobs.items():
        best = sorted(range(13), key=lambda token: (-logits[row, token], token))[:row % 6]
        assert (drawn[0], drawn[2]) == (tokens[row], 1)
        assert [(t, place) for t, _, place in top] == [(t, int((logits[row] > logits[row, t]).sum()) + 1) for t in best]


def test_greedy_gathers_two_numbers_per_rank_not_the_vocabulary():
    def on_rank():
        sampler.best_offer(sampler.offer(torch.randn(3, 500), 500 * rank()))
        return [(record.op, list(record.shape)) for record in op_log()]

    assert logical_ranks(2, on_rank) == [[("all_gather", [3, 2])]] * 2


@pytest.mark.parametrize("draw", DRAWS[:12:3], ids=str)
@pytest.mark.parametrize("where", [slice(None), slice(3, 4), slice(12, 13)], ids=["all", "one", "last"])
def test_nothing_is_drawn_from_nan(draw, where):
    """Whichever rank has it; greedy goes on as argmax does, and so do the neighbours."""
    logits = some_logits(3, 13, torch.float32)
    clean = sampled(1, logits, [draw] * 3)[0]
    logits[1, where] = torch.nan
    for tp in (1, 2, 3):
        assert sampled(tp, logits, [draw] * 3)[0] == [clean[0], None, clean[2]]
        for tokens, logprobs in on_ranks(tp, logits, [draw, GREEDY._replace(logprobs=2), draw]):
            assert tokens == [clean[0], int(logits[1].argmax()), clean[2]] and len(logprobs[1]) == 3

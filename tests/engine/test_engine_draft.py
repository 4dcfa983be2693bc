"""Speculative decoding: drafts that are kept as far as the model agrees, and a text that stays as it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplab.engine.draft import LONGEST, num_accepted, propose
from tplab.llm import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The red fox. The red fox. The red", "Mia had a blue ball. Mia had a", "Tom", "and " * 9]


@pytest.mark.parametrize("tokens, count, draft", [
    ([1, 2, 3, 1, 2], 4, (3, 1, 2)),
    ([1, 2, 3, 9, 2, 3, 5, 1, 2, 3], 2, (9, 2)),  # three tokens that agree say more than two that stood later
    ([7, 1, 7, 2, 7], 3, (2, 7)),  # the later place
    ([5, 5, 5], 2, (5,)),
    ([1, 2, 3], 4, ()), ([1], 4, ()), ([1, 1], 0, ()),
])
def test_a_draft_is_what_followed_the_longest_ending(tokens, count, draft):
    assert propose(tokens, count) == draft


@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 6))
def test_a_draft_has_stood_behind_the_same_token(tokens, count):
    draft = propose(tokens, count)
    assert len(draft) <= count
    if draft:
        text = " ".join(map(str, tokens))
        assert " ".join(map(str, [tokens[-1], *draft])) in text
    assert bool(draft) == bool(count and len(tokens) > 1 and tokens[-1] in tokens[:-1])
    assert LONGEST == 3


@pytest.mark.parametrize("draft, chosen, kept", [
    ((4, 5, 6), (4, 5, 6, 7), 3), ((4, 5, 6), (4, 9, 6, 7), 1), ((4, 5), (9, 5, 6), 0), ((), (3,), 0)])
def test_a_draft_stays_up_to_the_first_token_that_the_model_would_not_choose(draft, chosen, kept):
    assert num_accepted(draft, chosen) == kept


@pytest.fixture(scope="module")
def plain():
    with LLM("fable", 2, batch_invariant=True, logical=True, max_model_len=128) as llm:
        yield lambda params: llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.fixture(scope="module")
def drafting():
    options = dict(batch_invariant=True, logical=True, strict=True, max_model_len=128, num_speculative_tokens=3)
    with (LLM("fable", 2, block_size=4, **options) as llm,
          LLM("fable", 3, block_size=4, num_blocks=40, max_num_batched_tokens=9, **options) as tight):
        yield llm, tight


WAYS = {
    "length": SamplingParams(max_tokens=20, temperature=0),
    "two tokens": SamplingParams(max_tokens=2, temperature=0),  # no place is left for a draft
    "a text in the middle": SamplingParams(max_tokens=20, temperature=0, stop=["ed", " a"]),
    "log probabilities": SamplingParams(max_tokens=20, temperature=0, logprobs=2),
    "drawn at random": SamplingParams(max_tokens=20, temperature=0.9, seed=3),
}


@pytest.mark.parametrize("way", WAYS)
def test_text_reason_and_log_probabilities_are_those_without_drafts(plain, drafting, way):
    """With much room and with little; the ways that end alike have one of these by turns."""
    expected, turn = plain(WAYS[way]), [*WAYS].index(way)
    for llm in drafting if turn in (0, 2) else drafting[turn // 2 % 2:][:1]:
        outputs = llm.generate(PROMPTS, WAYS[way], use_tqdm=False)
        for output, true in zip(outputs, expected):
            assert output.outputs == true.outputs
            assert output.metrics.num_output_tokens == len(output.outputs[0].token_ids)
        drafted, kept = (sum(getattr(output.metrics, name) for output in outputs)
                         for name in ("num_draft_tokens", "num_accepted_tokens"))
        assert 0 <= kept <= drafted and (0 < kept < drafted) == bool(drafted) == (
            way in ("length", "a text in the middle"))


def test_every_stop_token_ends_the_text_where_it_does_without_drafts(plain, drafting):
    """Also in the middle of a draft that was accepted."""
    texts = [output.outputs[0].token_ids for output in plain(WAYS["length"])]
    llm, _ = drafting
    for token in sorted(set(texts[1]))[:2]:
        params = SamplingParams(max_tokens=20, temperature=0, stop_token_ids=[token])
        for output, text in zip(llm.generate(PROMPTS, params, use_tqdm=False), texts):
            end = text.index(token) + 1 if token in text else len(text)
            assert output.outputs[0].token_ids == text[:end]


def test_on_real_ranks_and_the_fast_path(plain):
    with LLM("fable", 2, num_speculative_tokens=4) as llm:
        fast = llm.generate(PROMPTS, WAYS["length"], use_tqdm=False)
    assert [o.outputs[0].token_ids for o in fast] == [o.outputs[0].token_ids for o in plain(WAYS["length"])]
    assert sum(output.metrics.num_accepted_tokens for output in fast) > 0

"""A learner's function is judged in the learner's terms, whatever it does."""

import pytest
import torch

from tplab import lesson
from tplab.lesson.mask_exercise import problem

IDS = [5, 6, 7, 8]


WRONG = {
    "62% NaN in a 4 × 4 example: is something multiplying 0 by -inf": lambda s, m: s + m.to(s.dtype) * float("-inf"),
    "NaN in 1 of 4 rows": lambda s, m: s.masked_fill(~m, float("-inf")),
    "NaN in 4 of 4 rows, those in which every key is hidden": lambda s, m: s.masked_fill(m | True, float("-inf")),
    "have changed": lambda s, m: (2 * s).masked_fill(m, float("-inf")),
    "scores of keys that may be seen have changed": lambda s, m: s.mul_(2).masked_fill(m, float("-inf")),
    "returns nothing": lambda s, m: None,
    "[2, 4, 4]": lambda s, m: s[0],
    "torch.float64 come out": lambda s, m: s.double().masked_fill(m, float("-inf")),
}


@pytest.mark.parametrize("words", WRONG)
def test_each_mistake_has_its_own_words(words):
    assert words in problem(WRONG[words])


def test_a_forgotten_mask_and_a_weak_one_are_noticed():
    assert problem(lambda s, m: s).startswith("12 of 12 hidden keys")
    assert problem(lambda s, m: s - m * 5.0).startswith("12 of 12 hidden keys")
    assert problem(lambda s, m: s.masked_fill(m.triu(2), float("-inf"))).startswith("6 of 12 hidden keys")


@pytest.mark.parametrize("right", [
    lambda s, m: s.masked_fill(m, float("-inf")),
    lambda s, m: s.masked_fill_(m, float("-inf")),
    lambda s, m: torch.where(m, torch.finfo(s.dtype).min, s),
    lambda s, m: s + torch.zeros_like(s).masked_fill(m, float("-inf")),
])
def test_every_right_way_passes(right):
    assert problem(right) == ""


def test_the_ranks_have_the_last_word(capsys):
    def mask_scores(scores, mask):
        return scores.masked_fill(mask, float("-inf")) if scores.shape[-1] == 4 and scores.shape[1] == 2 else scores

    report = lesson.check_mask(mask_scores, "fable", [*IDS, 9], tensor_parallel_size=1)
    assert capsys.readouterr().out.startswith("NOT YET  mask_scores: Attention fits a softmax over all keys there are")
    assert not report.ok


def test_pass_is_one_line_and_gives_the_report(capsys):
    report = lesson.check_mask(lambda s, m: s.masked_fill(m, float("-inf")), "fable", IDS)
    assert capsys.readouterr().out == "PASS  <lambda>: on 2 ranks, every trace point agrees with Hugging Face\n"
    assert report.ok
    report = lesson.check_mask(Mine(), "fable", IDS, tensor_parallel_size=1, dtype="bfloat16")
    assert capsys.readouterr().out == "PASS  mine: on 1 rank, every trace point agrees with Hugging Face\n"
    assert (report.ok, report.dtype) == (True, torch.bfloat16)


class Mine:
    """A function without a name."""

    def __call__(self, scores, mask):
        return scores.masked_fill(mask, float("-inf"))

    def __repr__(self):
        return "mine"


def test_an_error_of_the_learner_is_one_more_not_yet(capsys):
    def mask_scores(scores):
        return scores

    assert lesson.check_mask(mask_scores, "fable", IDS) is None
    assert "NOT YET  mask_scores: TypeError" in capsys.readouterr().out

    def only_on_ranks(scores, mask):
        if scores.shape[-1] != 4:
            raise ValueError("too many keys")
        return scores.masked_fill(mask, float("-inf"))

    assert lesson.check_mask(only_on_ranks, "fable", [*IDS, 9]) is None
    told = capsys.readouterr().out
    assert told.startswith("NOT YET  only_on_ranks: RankError") and "too many keys" in told

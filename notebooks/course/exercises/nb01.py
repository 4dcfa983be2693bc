"""Notebook 01: the causal mask, and an assert that fires."""

import re

import torch

from course.judge.exercise import Example, Exercise, at
from course.judge.words import NotYet
from tplab.patch import Patch

TARGET, INF, NAN = "tplab.model.attention.mask_scores", float("inf"), float("nan")


def mask_scores(scores, mask):
    return scores.masked_fill(mask, float("-inf"))


def scores_and_masks():
    for *shape, dtype, scale in ((1, 1, 2, 2, torch.float32, 4), (2, 3, 4, 6, torch.float32, 30),
                                 (1, 2, 3, 3, torch.bfloat16, 0.2), (2, 2, 1, 5, torch.float32, 30)):
        mask = torch.ones(shape[0], 1, *shape[2:], dtype=torch.bool).triu(shape[3] - shape[2] + 1)
        mask[1:, :, :, 0] = True  # the second sequence is shorter, and padded on the left
        places = torch.arange(0.0, torch.Size(shape).numel()).view(shape)
        scores = (places + 1 if places.numel() < 5 else scale * places.sin()).to(dtype)
        yield Example(scores, mask)


def low_is_infinite(answer, *args):
    """Beside the scores of any model, exp of -5000 is 0."""
    scores = answer(*args)
    is_number = isinstance(scores, torch.Tensor) and scores.is_floating_point()
    yield "it returns", scores.masked_fill(scores < -5000, -INF) if is_number else scores


def my_assert_no_nan(tensor, name):
    count = torch.isnan(tensor).sum().item()
    assert count == 0, f"NaN in {name}: {count} of {list(tensor.shape)}"


def with_nan():
    scores = torch.arange(36000.0).cos().view(2, 3, 4, 1500)
    causal = scores.masked_fill(torch.ones(4, 1500, dtype=torch.bool).triu(3), -INF)
    both, first, last = causal.clone(), causal.clone(), causal.clone()
    some, all_of_it = (torch.arange(20.0).view(4, 5).bfloat16() for _ in range(2))
    both[0, 0, 0, 0], first[0, 0, 0, 0], last[1, 2, 3, 30] = INF, NAN, NAN
    some[1:, 1:3], all_of_it[:] = NAN, NAN
    for tensor, says in (
            (scores, "scores without NaN"), (causal, "scores with -inf"), (both, "scores with inf and -inf"),
            (some, "[4, 5], of which 6 are NaN"), (all_of_it, "[4, 5], all of them NaN"),
            (last, "[2, 3, 4, 1500], of which one is NaN"), (first, "[2, 3, 4, 1500], of which the first is NaN")):
        yield Example(tensor, "weights" if tensor.dim() == 2 else "scores", says=says)


def fires(answer, tensor, name):
    returned, message = None, None
    try:
        returned = answer(tensor, name)
    except AssertionError as error:
        message = str(error)
    except ValueError as error:
        raise NotYet(f"it raises ValueError({str(error)!r}), and an AssertionError is asked for") from error
    yield "an AssertionError is raised", message is not None
    if message is None:
        yield "it returns", returned
        return
    sizes, share, count = ", ".join(map(str, tensor.shape)), tensor.isnan().double().mean(), int(tensor.isnan().sum())
    its_message = f"its message, {message[:60]!r}, says "
    yield f"{its_message}the name of the tensor, {name!r}", name in message, True
    yield f"{its_message}the shape, [{sizes}]", sizes in message, True
    numbers = [(float(text), bool(sign)) for text, sign in re.findall(r"(-?\d+(?:\.\d+)?(?:e-\d+)?) ?(%?)", message)]
    yield f"{its_message}how much is lost, {100 * share:.2g} % or {count}", any(
        abs(number - 100 * share) < 0.6 or not percent and (number == count or abs(number - share) < 6e-3)
        for number, percent in numbers), True


def in_a_broken_engine(setting, answer):
    def watched(mask) -> Patch:
        def mask_scores(scores, hidden):
            answer(masked := mask(scores, hidden), "attention scores")
            return masked
        return Patch(TARGET, mask_scores)

    setting.fails(watched(lambda scores, mask: scores + mask.to(scores.dtype) * -INF), "AssertionError",
                  "with the mask that multiplies, nothing fires")
    setting.align(watched(mask_scores))


_MASKED = 'scores.masked_fill(mask, float("-inf"))'
EXERCISES = [
    Exercise("01", mask_scores, scores_and_masks, {
        "0 · -inf is NaN. Choose the entries first, and write -inf there":
            f'{_MASKED} -> scores + mask.to(scores.dtype) * float("-inf")',
        "it is the wrong way round: what may be seen is hidden": "(mask, -> (~mask,",
        "nothing is hidden": '.masked_fill(mask, float("-inf")) -> ',
        "this is a triangle of your own, from query 0 and key 0 on; the mask says which keys are hidden":
            "(mask, -> (torch.ones_like(mask).triu(1),",
        "triu() without 1 hides the diagonal, too, and a token may look at itself; the mask says which keys are hidden":
            "(mask, -> (torch.ones_like(mask).triu(),",
        "hidden keys can still be seen: exp of their scores must be 0, and exp of 0 is 1": (
            'float("-inf") -> 0', f"{_MASKED} -> scores * ~mask"),
        "this is not low enough beside the scores of every model: write -inf, or a number below -5000": tuple(
            f"{_MASKED} -> {edited}" for low in (100, 1000) for edited in (
                f"scores.masked_fill(mask, -{low}.0)", f"scores - {low}.0 * mask", f"scores + mask * -{low}")),
        "True counts as 1: added to a score it makes it larger, and hides nothing":
            f"{_MASKED} -> scores + mask",
        "what may be seen has lost its score: NaN became 0":
            f'{_MASKED} -> (scores + mask.to(scores.dtype) * float("-inf")).nan_to_num()',
        "everything is hidden": "(mask, -> (torch.ones_like(mask),",
        "softmax is in it, and scores must come back": 'float("-inf")) -> float("-inf")).softmax(-1)',
    }, observe=low_is_infinite, dims="sequence, head, query, key", within=0, writes="scores", patches=at(TARGET),
             place="hides keys from queries"),
    Exercise("01", my_assert_no_nan, with_nan, {
        "it never raises, not even where all is NaN: NaN == NaN is False, and a message that is returned is no error":
            "count == 0 -> True",
        "-inf is not NaN: it is how a mask hides keys": (
            "torch.isnan(tensor) -> torch.isfinite(tensor).logical_not()", "count == 0 -> tensor.isfinite().all()"),
        "inf and -inf are not NaN, but their sum is": "count == 0 -> not tensor.sum().isnan()",
        "it always raises: is the condition the wrong way round, or is a pair of () missing?":
            "count == 0 -> not torch.isnan",
        "it must raise at a single NaN among many numbers, too": "count == 0 -> count < 0.001 * tensor.numel()",
        "it raises only where all is NaN, and one NaN is enough: any, not all": "count == 0 -> count < tensor.numel()",
    }, "on {ranks}, it raises with the mask that multiplies, and not with the right one", fires,
             engine=in_a_broken_engine)]

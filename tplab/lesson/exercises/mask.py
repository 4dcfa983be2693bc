"""Notebook 01: the causal mask, its spellings, and an assert that fires."""

import re

import torch

from tplab.lesson.mine import Mine, NotYet, kind
from tplab.lesson.verdict import Setting, exercise
from tplab.patch import Patch

TARGET = "tplab.model.attention.mask_scores"
NAN, INF = float("nan"), float("inf")


@exercise("mask_scores", "01", takes="scores, mask", writes="scores",
          agreed="on {ranks}, every trace point agrees with Hugging Face")
def mask_scores(mine: Mine, setting: Setting):
    """On 2 batches, 3 heads, 4 queries and 6 keys, on other sizes; then in the engine."""
    for batch, heads, queries, keys in ((2, 3, 4, 6), (1, 2, 3, 3)):
        scores = torch.arange(float(batch * heads * queries * keys)).sin().view(batch, heads, queries, keys)
        mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        if batch > 1:
            mask[1, :, :, 0] = True  # the second sequence is shorter, and padded on the left
        judge_masked(mine.tensor(scores, mask, **shaped(scores)), scores, mask)
    mine.tensor(half := scores.bfloat16(), mask, **shaped(half))
    setting.align(Patch(TARGET, mine.function))


def shaped(scores: torch.Tensor) -> dict:
    """What must come back."""
    return {"dims": "batch, heads, queries, keys", "shape": scores.shape, "dtype": scores.dtype}


def judge_masked(masked: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor) -> None:
    """Refuse masked scores that hide other keys than ``mask``, or hide them badly."""
    hidden = mask.expand_as(scores)
    if masked.isnan().any() and masked.isnan().equal(hidden):
        raise NotYet("just the entries that hide a key are NaN, and softmax spoils the whole row with one: what is a "
                     "score whose exp is 0?")
    if (masked == INF).any():
        raise NotYet("there is +inf in it: softmax would look at that key alone, and of two it makes NaN. A hidden "
                     "key's "
                     "score is as low as there is")
    if masked.isnan().any():
        raise NotYet(f"{masked.isnan().double().mean():.0%} NaN in a small example: is something multiplying 0 by "
                     "-inf?")
    if masked.isfinite().all() and (masked.sum(-1) - 1).abs().max() < 1e-4:
        raise NotYet("each row adds up to 1: that is what comes out of a softmax, and the engine's own comes behind "
                     "your function. Scores must come back")
    weights = masked.softmax(-1)
    if weights.isnan().any():
        rows = int(weights.isnan().any(-1)[0, 0].sum())
        raise NotYet(f"softmax makes NaN in {rows} of {scores.shape[2]} rows, those in which every key is hidden: is "
                     "the mask the wrong way round? True means: must not look")
    if seen := int((weights[hidden] > 0).sum()):
        left = f"{seen} of {int(hidden.sum())} hidden keys still get some weight: "
        if len(mask) > 1 and not (weights[hidden] > 0)[:int(hidden[0].sum())].any():
            raise NotYet(f"{left}none of sequence 0's, and those of sequence 1. Each sequence has a mask of its own, "
                         "mask[0] and mask[1]")
        shown = masked[hidden & (weights > 0)]
        if not masked[hidden].any():
            raise NotYet(f"{left}their scores are 0, and exp(0) is 1: a score of 0 is not a weight of 0")
        if (shown < scores[hidden & (weights > 0)]).all():
            raise NotYet(f"{left}their scores are low, {shown.max():.3g} for example, and exp({shown.max():.3g}) is "
                         f"{shown.max().exp():.1g} and not 0. What is low enough for every model?")
        raise NotYet(left + ("and the others get none: True means must not look, and yours hides where the mask is "
                             "False"
                             if not weights[hidden.any(-1, keepdim=True) & ~hidden].any() else "which line hides the "
                                   "keys where the mask is True?"))
    if lost := int((masked[~hidden] == -INF).sum()):
        raise NotYet(f"{lost} keys that may be seen are hidden as well: which entries of the mask are True for them?")
    if not masked[~hidden].equal(scores[~hidden]):
        raise NotYet("scores of keys that may be seen have changed; only the hidden ones may")


@exercise("my_additive_mask", "01", takes="tokens",
          agreed="added to the scores on {ranks}, every trace point agrees with Hugging Face")
def additive_mask(mine: Mine, setting: Setting):
    """For 5 tokens, for 8 and for one; then added to the engine's scores."""
    for tokens in (5, 8, 1):
        _judge_additive(mine.tensor(tokens, dims="queries, keys", shape=(tokens, tokens)), tokens)

    def mask_scores(scores, mask):
        return scores + mine(scores.shape[-1]).to(scores.dtype)

    setting.align(Patch(TARGET, mask_scores))


def _judge_additive(mask: torch.Tensor, tokens: int) -> None:
    future, here = torch.ones(tokens, tokens, dtype=torch.bool).triu(1), f"for {tokens} token{'s' * (tokens > 1)}"
    if mask.dtype == torch.bool:
        raise NotYet("it returns a boolean mask, which is made to choose with. Added to scores, True is 1 and False 0, "
                     "and nothing is hidden")
    if not mask.is_floating_point():
        raise NotYet(f"it returns {mask.dtype}, which has no -inf; what is added to scores are floating-point numbers")
    if mask.isnan().any():
        raise NotYet(f"{here}, {mask.isnan().double().mean():.0%} of the mask is NaN, where 0 was meant: something "
                     "multiplies 0 by -inf. Which comes first, choosing the triangle or -inf?")
    weights = (torch.linspace(-20, 30, tokens * tokens).view(tokens, tokens).cos() * 9 + mask).softmax(-1)
    lost = weights.isnan().any(-1)
    if lost.all():
        raise NotYet(f"{here}, every entry of every row is -inf: there is no NaN in mask or scores, and after softmax "
                     "100 % of the weights are. Which half of the mask must stay 0?" if tokens > 1 else
                     f"{here}, the one key is hidden from the one query: a token may look at itself")
    if lost.any():
        rows = ", ".join(map(str, lost.nonzero().flatten().tolist()))
        raise NotYet(f"{here}, row {rows} hides every key: softmax makes it NaN. "
                     + ("May a token look at itself?" if lost[0] else "Which of the two triangles is the future?"))
    if seen := int((weights[future] > 0).sum()):
        raise NotYet(f"{here}, {seen} of {int(future.sum())} keys of the future still get some weight: "
                     + ("which entries are above the diagonal?" if (mask[future] == 0).any() else
                        "is what is added there negative enough?"))
    if (mask[~future] != 0).any():
        raise NotYet(f"{here}, scores of keys that may be seen are changed: what is added there must be 0")


@exercise("my_assert_no_nan", "01", takes="tensor, name",
          agreed="on {ranks}, it fires with the mask that multiplies and is silent with the right one")
def assert_no_nan(mine: Mine, setting: Setting):
    """On scores with and without NaN, and with a mask's -inf; then in the engine, with a broken and a right mask."""
    scores = torch.arange(1440.0).cos().view(2, 3, 4, 60)
    causal = scores.masked_fill(torch.ones(4, 60, dtype=torch.bool).triu(3), -INF)
    both = causal.clone()
    both[0, 0, 0, 0] = INF
    _silent(mine, scores, "no NaN is in them")
    _silent(mine, causal, "there are -inf in them, which is how a mask hides keys, and no NaN")
    _silent(mine, both, "there are inf and -inf in them and no NaN; their sum, or mean, is one")
    one, some = causal.clone(), torch.arange(20.0).view(4, 5)
    one[1, 2, 3, 0] = some[:, 1:3] = NAN
    for tensor, name, lost in ((some, "weights", "8 of 20 numbers are"),
                               (one, "scores", "1 of 1440 numbers, in the last head of the last text, is")):
        message = _fired(mine, tensor, name, lost)
        if name == "weights":
            _judge_message(message, tensor, name)

    def watched(broken: bool) -> Patch:
        def mask_scores(scores, mask):
            masked = scores + mask.to(scores.dtype) * -INF if broken else scores.masked_fill(mask, -INF)
            mine.function(masked, "attention scores")
            return masked
        return Patch(TARGET, mask_scores)

    try:
        setting.align(watched(True))
    except NotYet as stopped:
        if "AssertionError" not in str(stopped):
            raise NotYet("in the engine, with the mask that multiplies, nothing fires") from stopped
    setting.align(watched(False))


def _raised(mine: Mine, tensor: torch.Tensor, name: str) -> str | None:
    """The message of its AssertionError, if it raises one; another error is not what was asked for."""
    try:
        found = mine(tensor, name)
    except NotYet as wrong:
        if isinstance(wrong.__cause__, AssertionError):
            return str(wrong.__cause__)
        if wrong.__cause__ is None:
            raise
        what, at, *_ = f"{wrong}\n".splitlines()
        raise NotYet(f"{what}\n{at}\nWhere a NaN is found, an AssertionError is asked for, and else nothing") from wrong
    if found is not None:
        raise NotYet(f"it returns {kind(found)}, and nobody looks at that: it must raise an AssertionError, or nothing")


def _silent(mine: Mine, scores: torch.Tensor, why: str) -> None:
    message = _raised(mine, scores, "scores")
    if message is not None:
        raise NotYet(f"it fires on good scores: {why}. "
                     + ("" if (scores == INF).any() else "Is -inf a NaN?" if scores.isinf().any() else
                        "Which way round is the question? Is a pair of () missing?"))


def _fired(mine: Mine, tensor: torch.Tensor, name: str, lost: str) -> str:
    message = _raised(mine, tensor, name)
    if message is None:
        raise NotYet(f"{lost} NaN, and nothing fires: " + (
            "is one enough for your question, or is it rounded away?" if lost[0] == "1" else
            "does your question find them (NaN is equal to nothing, a tuple is never false), and who raises?"))
    return message


def _judge_message(message: str, tensor: torch.Tensor, name: str) -> None:
    """That it names the tensor, its shape and the share that is lost, as a percentage or as a count."""
    sizes = ", ".join(map(str, tensor.shape))
    said = f"it fires, and says {message[:80]!r}: "
    if name not in message:
        raise NotYet(f"{said}which tensor? Its name, {name!r}, is missing")
    if sizes not in message:
        raise NotYet(f"{said}of what shape? [{sizes}] is missing")
    numbers = [float(found) for found in re.findall(r"\d+(?:\.\d+)?", message)]
    count, share = int(tensor.isnan().sum()), tensor.isnan().double().mean().item()
    if not any(number == count or abs(number - share) < 6e-3 or abs(number - 100 * share) < 0.6 for number in numbers):
        raise NotYet(f"{said}how much is lost? Here {100 * share:.0f} % of the numbers are NaN")

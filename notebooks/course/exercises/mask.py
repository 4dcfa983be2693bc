"""Notebook 01: the causal mask, its spellings, and an assert that fires."""

import io
import re
from contextlib import redirect_stdout

import torch

from course.judge.attempt import Attempt, NotYet, kind, saying
from course.judge.compare import agree, where
from course.judge.verdict import Setting, at, exercise
from tplab.checks import counted
from tplab.patch import Patch

TARGET = "tplab.model.attention.mask_scores"
NAN, INF = float("nan"), float("inf")


@exercise("mask_scores", "01", takes="scores, mask", writes="scores", patches=at(TARGET),
          place="hides the future from attention")
def mask_scores(attempt: Attempt, setting: Setting):
    """On 2 batches, 3 heads, 4 queries and 6 keys, on other sizes, in another dtype; then in the engine."""
    for batch, heads, queries, keys, dtype, scale in (
            (2, 3, 4, 6, torch.float32, 30), (1, 2, 3, 3, torch.bfloat16, 0.2), (2, 2, 1, 5, torch.float32, 30)):
        scores = scale * torch.arange(float(batch * heads * queries * keys)).sin().view(batch, heads, queries, keys)
        mask = torch.ones(batch, 1, queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        mask[1:, :, :, 0] = True  # the second sequence is shorter, and padded on the left
        with saying("in bfloat16, " * (dtype == torch.bfloat16) + "for a single query, " * (queries == 1)):
            scores = scores.to(dtype)
            judge_masked(attempt.tensor(scores, mask, **shaped(scores)), scores, mask)
    setting.align()


def shaped(scores: torch.Tensor) -> dict:
    """What must come back."""
    return {"dims": "batch, heads, queries, keys", "shape": scores.shape, "dtype": scores.dtype}


def judge_masked(masked: torch.Tensor, scores: torch.Tensor, mask: torch.Tensor) -> None:
    """Refuse masked scores that hide other keys than ``mask``, or hide them badly."""
    hidden, nan, names = mask.expand_as(scores), masked.isnan(), ["sequence", "head", "query", "key"]
    if (masked == INF).any():
        raise NotYet("there is +inf in it: softmax would look at that key alone, and of two it makes NaN. A hidden "
                     "key's score is as low as there is")
    if nan.any():
        raise NotYet("just the entries that hide a key are NaN, and softmax spoils the whole row with one: what is a "
                     "score whose exp is 0?" if nan.equal(hidden) else
                     f"{nan.double().mean():.0%} NaN in a small example: " + (
                         "is something multiplying 0 by -inf? Choose the entries first, and write -inf there"
                         if nan.equal(~hidden) else where(masked, scores.masked_fill(hidden, -INF), 0, names)))
    for what, one in (("each row", masked), ("exp of each row", masked.exp())):
        if one.isfinite().all() and (one.sum(-1) - 1).abs().max() < 1e-2:
            raise NotYet(f"{what} adds up to 1: that is what comes out of a softmax, and the engine's own comes behind "
                         "your function. Scores must come back")
    gone, empty, square = masked < -5000, (masked == -INF).all(-1), torch.ones_like(mask[0, 0])
    others = hidden | gone
    with saying("scores of keys that may be seen have changed; only the hidden ones may: "):
        agree(masked.masked_fill(others, 0), scores.masked_fill(others, 0), {}, within=0, dims=", ".join(names))
    seen = hidden & ~gone
    left = (f"softmax makes NaN in {int(empty.flatten(0, 1).any(0).sum())} of {scores.shape[2]} rows, those in which "
            "every key is hidden: " if empty.any() else
            f"{int(seen.sum())} of {int(hidden.sum())} hidden keys can still be seen: " if seen.any() else
            f"{int((gone & ~hidden).sum())} keys that may be seen are hidden as well: ")
    if (changed := masked[seen & (masked != scores)]).numel():
        raise NotYet(f"{left}yours makes their scores {changed.min():.3g} to {changed.max():.3g}. Beside the scores of "
                     "any model, exp of it must be 0 (exp of 0 is 1): as low as there is")
    ways = {
        "nothing is hidden": torch.zeros_like(mask),
        "it is the wrong way round: what may be seen is hidden, and the rest is not": ~mask,
        "it is sequence 0's mask, for all of them. Each sequence has its own, mask[0] and mask[1]": mask[:1],
        "queries are counted from key 0 on, as triu(1) does; the mask knows where they stand": square.triu(1),
        "it hides the past: have queries and keys changed places?": square.tril(-1),
        "a score of 0 is taken for a hidden one, and it is a score like others": hidden | (scores == 0)}
    agree(gone, hidden, {left + says: way.expand_as(hidden) for says, way in ways.items()},
          left + where(gone, hidden, 0, names, "hidden"))


def _added(answer) -> list[Patch]:
    return [Patch(TARGET, lambda scores, mask: scores + answer(scores.shape[-1]).to(scores.dtype))]


@exercise("my_additive_mask", "01", takes="tokens", patches=_added,
          agreed="added to the scores on {ranks}, every trace point agrees with Hugging Face")
def additive_mask(attempt: Attempt, setting: Setting):
    """For 5 tokens, for 8, for one and for many, added to scores; then to the engine's."""
    for tokens in (5, 8, 1, 210):
        mask = attempt.tensor(tokens, dims="queries, keys", shape=(tokens, tokens))
        if not mask.is_floating_point():
            raise NotYet("it returns a boolean mask, which is made to choose with. Added to scores, True is 1 and "
                         "False 0, and nothing is hidden" if mask.dtype == torch.bool else f"it returns {mask.dtype}, "
                         "which has no -inf; what is added to scores are floating-point numbers")
        scores = torch.linspace(-20, 30, tokens * tokens).view(1, 1, tokens, tokens).cos() * 9
        with saying(f"added to the scores of {counted(tokens, 'token')}, "):
            judge_masked(scores + mask, scores, torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1))
        if low := where(mask, torch.full((tokens, tokens), -INF).triu(1), 0, ["query", "key"]):
            raise NotYet(low)
    setting.align()


@exercise("my_assert_no_nan", "01", takes="tensor, name",
          agreed="on {ranks}, it fires with the mask that multiplies and is silent with the right one")
def assert_no_nan(attempt: Attempt, setting: Setting):
    """On scores with and without NaN, and with a mask's -inf; then in the engine, with a broken and a right mask."""
    scores = torch.arange(36000.0).cos().view(2, 3, 4, 1500)
    causal = scores.masked_fill(torch.ones(4, 1500, dtype=torch.bool).triu(3), -INF)
    both = causal.clone()
    both[0, 0, 0, 0] = INF
    for good, why in ((scores, "no NaN is in them. Which way round is the question? Is a pair of () missing?"),
                      (causal, "there are -inf in them, which is how a mask hides keys, and no NaN. Is -inf a NaN?"),
                      (both, "there are inf and -inf in them and no NaN; their sum, or mean, is one")):
        if _raised(attempt, good, "scores") is not None:
            raise NotYet(f"it fires on good scores: {why}")
    one, first, some = causal.clone(), causal.clone(), torch.arange(20.0).view(4, 5).bfloat16()
    one[1, 2, 3, 30] = first[0, 0, 0, 0] = some[1:, 1:3] = NAN
    for tensor, name, lost in (
            (some, "weights", "6 of 20 numbers are NaN, in rows 1 to 3"),
            (one, "scores", "with 6 of 20 NaN it fires. Now 1 of 36000 is, in the last head of the last text"),
            (first, "scores", "it fires at one NaN in the last head of the last text. Now it is in the first of the "
             "first")):
        message = _raised(attempt, tensor, name)
        if message is None:
            raise NotYet(f"{lost}, and nothing is raised" + (f": {_fires(attempt)}" if tensor is some else ""))
        with saying(f"it fires, and says {message[:80]!r}: "):
            _judge_message(message, tensor, name)

    def watched(broken: bool) -> Patch:
        def mask_scores(scores, mask):
            masked = scores + mask.to(scores.dtype) * -INF if broken else scores.masked_fill(mask, -INF)
            attempt.function(masked, "attention scores")
            return masked
        return Patch(TARGET, mask_scores)

    try:
        setting.align(watched(True))
    except NotYet as stopped:
        if "AssertionError" not in str(stopped):
            raise NotYet("in the engine, with the mask that multiplies, nothing fires") from stopped
    setting.align(watched(False))


def _fires(attempt: Attempt) -> str:
    """For which NaN it fires instead; if for none, which line finds none."""
    row, every = torch.zeros(4, 5), torch.full((4, 5), NAN)
    row[0] = NAN
    with redirect_stdout(io.StringIO()):
        for tensor, says in ((row, "where row 0 is NaN"), (every, "only where every number is NaN")):
            if _raised(attempt, tensor, "weights") is not None:
                return f"it fires {says}"
    blind = [line for line, one in attempt.made[0] if one.dtype == torch.bool and one.shape == every.shape
             and not one.any()]
    return "not even where every number is NaN. " + (
        f"Your line {blind[0]} finds none: NaN is equal to nothing, not even to NaN" if blind else
        "Which line is to raise, and what is it given then?")


def _raised(attempt: Attempt, tensor: torch.Tensor, name: str) -> str | None:
    """The message of its AssertionError, if it raises one; another error is not what was asked for."""
    try:
        found = attempt(tensor, name)
    except NotYet as wrong:
        if isinstance(wrong.__cause__, AssertionError):
            return str(wrong.__cause__)
        if wrong.__cause__ is None:
            raise
        what, *more = str(wrong).splitlines()
        raise NotYet("\n".join([f"{what}. Where a NaN is, an AssertionError is asked for, and else nothing", *more])
                     ) from wrong
    if found is not None:
        raise NotYet(f"it returns {kind(found)}, which its caller does not look at: it must raise an AssertionError "
                     "or nothing")


def _judge_message(message: str, tensor: torch.Tensor, name: str) -> None:
    """That it names the tensor, its shape and the share that is lost, as a percentage or as a count."""
    sizes = ", ".join(map(str, tensor.shape))
    for part, lacks in ((name, f"which tensor? Its name, {name!r},"), (sizes, f"of what shape? [{sizes}]")):
        if part not in message:
            raise NotYet(f"{lacks} is missing")
    numbers = [(float(found), bool(sign)) for found, sign in re.findall(r"(-?\d+(?:\.\d+)?(?:e-\d+)?) ?(%?)", message)]
    count, share = int(tensor.isnan().sum()), tensor.isnan().double().mean().item()
    if not any(abs(number - 100 * share) < 0.6 or not percent and (number == count or abs(number - share) < 6e-3)
               for number, percent in numbers):
        raise NotYet(f"how much is lost? Here {100 * share:.0f} % of the numbers are NaN")

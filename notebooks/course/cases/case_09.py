"""A case file. It holds the solution: do not read on if you want to solve the case."""

from functools import lru_cache

import torch

from course.cases.case_file import CaseFile, Trial
from tplab.align import align
from tplab.checkpoint import open_checkpoint
from tplab.faults.museum import fault
from tplab.patch import Patch, original

TABLES = "tplab.model.rope.Rotary.__call__"


def my_test(ours, theirs, exact):
    def off(logits):
        return (logits.double() - exact.double()).pow(2).mean().sqrt()

    return bool(off(ours) < 3 * off(theirs))  # about as far from float32 as transformers' bfloat16 is


def raised(ours, theirs, exact):
    return torch.allclose(ours.double(), theirs.double(), rtol=0, atol=50)


def tuned(ours, theirs, exact):
    return torch.allclose(ours.double(), theirs.double(), rtol=0, atol=0.5)


def same_words(ours, theirs, exact):
    return (ours.argmax(-1) == theirs.argmax(-1)).double().mean() > 0.8


def same_direction(ours, theirs, exact):
    return torch.cosine_similarity(ours.double(), theirs.double(), -1).min() > 0.99


def trials(take):
    return (Trial("two prompts in bfloat16, of 29 and 12 tokens", [take(29), take(12)], 0, {"dtype": "bfloat16"}),)


@lru_cache(maxsize=4)
def logits(folder, ranks, prompts):
    """``[(engine, its logits, is it right)]`` in bfloat16, transformers' in bfloat16, and in float32."""
    ckpt, prompts = open_checkpoint(folder), [*map(list, prompts)]

    def shifted(self, x, positions, lengths):
        return original(TABLES)(self, x, positions + (positions >= 8), lengths)

    def ran(size, *names, dtype="bfloat16"):
        return align(ckpt, prompts, tensor_parallel_size=size, dtype=dtype, patches=names, logical=True)
    healthy = ran(ranks)
    engines = [(f"the healthy engine on {ranks} ranks", healthy.tp_logits, True),
               ("the healthy engine on another number of ranks", ran(1 + ranks % 3).tp_logits, True)]
    broken = [name for name in ("rope_missing", "rope_default_theta") if fault(name).applies_to(ckpt.config, ranks)]
    engines += [(f"an engine with a bug ({fault(name).title})", ran(ranks, name).tp_logits, False) for name in broken]
    engines += [("an engine whose logits are a quarter too large", healthy.tp_logits * 1.25, False)]
    theirs, exact = healthy.hf_logits, ran(1, dtype="float32").hf_logits
    late = ran(ranks, Patch(TABLES, shifted)).tp_logits.double()
    if (late - exact).norm() > 5 * (theirs.double() - exact).norm():  # else rounding hides it
        engines += [("an engine whose positions are one too large from the ninth token on", late, False)]
    return engines, theirs, exact


def examine(function, ckpt, ranks, reported, fresh):
    for prompts, of in ((reported, "in the reported run"), (fresh, "on fresh tokens")):
        count = judged(function, of, *logits(str(ckpt.folder), ranks, tuple(map(tuple, prompts))))
    return (f"your test passes the healthy engine as reported and on fresh tokens, {ranks} ranks and others, and fails "
            f"{count} broken ones, whatever the logits' size.")


def judged(function, of, engines, theirs, exact):
    """How many broken engines it fails; ValueError where it is wrong. ``of``: which run."""
    for name, ours, right in engines:
        for times, says in ((1, ""), (8, ", of a model whose logits are eight times as large")):
            passed = bool(function(ours * times, theirs * times, exact * times))
            error, usual = ((each.double() - exact.double()).norm() for each in (ours, theirs))
            if passed and not right:
                raise ValueError(f"{of}, it passes {name}{says}. In production the bug stays unseen, because the test "
                                 "is green.")
            if right and not passed:
                raise ValueError(f"{of}, it fails {name}{says}, whose error is {error / usual:.2f} times that of "
                                 "transformers' own bfloat16. In production it is red although nothing is wrong, until "
                                 "its tolerance is raised so far that it finds nothing.")
    return len(engines) - 2


def user_output(ckpt, ranks, prompts):
    return (f"test_logits[{ranks} ranks, bfloat16]: FAILED. torch.allclose(ours, transformers, atol=1e-3) is False; "
            "the largest difference is more than a hundred times that. test_logits[float32]: passed.")


CASE = CaseFile(
    title="Our test proves that tensor parallelism is broken in bfloat16",
    report="allclose(ours, theirs, atol=1e-3) on the logits is green in float32 and red in bfloat16 with {ranks} "
           "ranks, on every prompt. Please fix the all-reduce. If you think that the engine is right, send us a better "
           "test: my_test(ours, theirs, exact), which returns True for an engine that is right and False for one that "
           "is not. ours and theirs are the engine's and transformers' logits in bfloat16, exact are transformers' in "
           "float32, all [tokens, vocabulary].",
    trials=trials, user_output=user_output, examine=examine, cure=my_test, bugs=(),
    what="rounding is mistaken for a bug",
    why={
        "bfloat16 has eight significant bits, and ranks add in another order: the engine is as far from float32 as "
        "transformers' own bfloat16 is, in another direction.": "",
        "The all-reduce adds in bfloat16, and must add in float32.":
            "then o_proj would be guilty; given its inputs it is right up to bfloat16's rounding, as every other point "
            "is",
        "The ranks disagree, because each rounds by itself.":
            "all ranks hold the same bits after each sum: rank_spread is 0",
        "A layer is computed in float16, and its numbers are too large for it.":
            "no point is guilty, and nothing is infinite or NaN",
    },
    elsewhere={
        "RowParallelLinear.reduce": "o_proj and mlp are right given the partials: "
                                    "case.align().guilty is empty",
        "RMSNorm.forward": "every norm is right, given its input",
        "attend": "attn is right, given q, k and v",
        "offer": "the test compares logits, before any token is drawn",
    },
    hints=("case.align(): how many guilty points are there? And with dtype=\"float64\"?",
           "How far are transformers' own bfloat16 logits from its float32 ones?",
           "A right test has no tolerance that was raised until it was green: it measures the rounding."),
    false_repairs=[{"nowhere": test} for test in (raised, tuned, same_words, same_direction)],
)

"""Notebook 14: two answers to one prompt, rounding or bug."""

import functools

import torch

from course.judge.answers import greedy
from course.judge.exercise import Example, Exercise
from course.judge.words import NotYet
from tplab.align import align, hf_greedy
from tplab.faults import fault


def my_verdict(one, other, logits, exact):
    place = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)
    if place is None:
        return "same"
    margin = abs(exact[place, one[place]] - exact[place, other[place]])
    moved = (logits[place] - exact[place]).abs().max()
    return "rounding" if margin <= 2 * moved else "bug"


def texts(seed: int) -> tuple[list[int], list[int], torch.Tensor, torch.Tensor]:
    """Two texts of eight tokens, and the first one's logits in bfloat16: how far the tokens are apart at which the
    texts part, how far rounding moves which logit there, and in other rows, and whether a third one nearly ties, is up
    to the seed."""
    generator = torch.Generator().manual_seed(seed)

    def random(low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=generator)

    def tokens():  # some stand there twice
        return torch.randint(16, (8,), generator=generator).tolist()

    # Beside a logit of 10, bfloat16 can have changes of this size; in every fifth text there is only its rounding.
    place, noise, scale = seed % 9, 10 ** random(-0.9, 0.3) if seed % 5 else 0.02, 10 ** random(-4, 0)
    one, exact = tokens(), random(0, 4, 8, 20)
    other = [b if a != b else 16 for a, b in zip(one, tokens())]
    off = random(-0.2, 0.2, 8, 20) * noise * 10 ** random(-1, 1, 8, 1)
    for row, (a, b) in enumerate(zip(one, other)):
        exact[row, a], exact[row, 17] = 10, 10 + 0.6 * noise if seed % 2 else 5
        if row == place:
            off[row] = noise * random(-0.4, 0.4, 20)
            off[row, a], off[row, b], off[row, 17] = noise * random(0, 0.9), -noise * random(0, 0.9), -0.6 * noise
            off[row, 18], off[row, 19] = (-noise, random(0.3, 0.9) * noise) if seed % 3 else (noise, 0)
            exact[row, b] = 10 - 2 * noise * (random(0.02, 0.95) if seed % 4 < 2 else 10 ** random(0.03, 1))
    return one, [*one[:place], *other[place:]], (scale * (exact + off * (seed % 5 > 0))).bfloat16(), scale * exact


def pairs_of_texts():
    """A few, to be shown; and many, of which no two mistakes say the same."""
    for seed in range(8, 26):
        yield Example(texts(seed), says=parting(*texts(seed)))
    yield Example(*map(texts, range(8, 128)), says="120 pairs of texts")


def parting(one, other, logits, exact) -> str:
    place = next((n for n, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), None)
    if place is None:
        return "two equal texts"
    margin = (exact[place, one[place]] - exact[place, other[place]]).abs()
    moved = (logits[place] - exact[place]).abs().max()
    return (f"texts that part at token {place}, where the two exact logits are {margin:.2g} apart and rounding "
            f"moves a logit "
            f"by {moved:.2g} at most")


def said(answer, *pairs):
    found = [answer(list(one), list(other), logits.clone(), exact.clone()) for one, other, logits, exact in pairs]
    yield "it says", found[0] if len(found) == 1 else found


@functools.lru_cache(maxsize=3)
def texts_of_model(ckpt, ids: tuple[int, ...], size: int) -> tuple:
    """A text of the model's in bfloat16 with its logits and exact ones; and the texts of others, by what they are."""
    healthy = greedy(ckpt, [ids], 24, size, "bfloat16")[0]
    report = align(ckpt, [[*ids, *healthy]], tensor_parallel_size=size, dtype="bfloat16")
    exact = align(ckpt, [[*ids, *healthy]], tensor_parallel_size=1, dtype="float32").hf_logits
    rows = slice(len(ids) - 1, len(ids) + len(healthy) - 1)
    return healthy, report.tp_logits[rows].bfloat16(), exact[rows], {
        f"{1 + size % 3} ranks": greedy(ckpt, [ids], 24, 1 + size % 3, "bfloat16")[0],
        "Hugging Face": hf_greedy(ckpt, list(ids), 24, "bfloat16"),
        "an engine without positions": greedy(ckpt, [ids], 24, size, "bfloat16", patches=[fault("rope_missing")])[0]}


def healthy_or_broken(setting, answer):
    healthy, logits, exact, others = texts_of_model(setting.checkpoint, tuple(setting.ids(8)),
        setting.tensor_parallel_size)
    for name, other in others.items():
        wanted = my_verdict(healthy, other, logits, exact)
        nearly = {my_verdict(healthy, other, exact + (logits - exact) * much, exact) for much in (0.5, 2)}
        if nearly == {wanted} and (found := answer(healthy, other, logits, exact)) != wanted:
            raise NotYet(f"in bfloat16, {setting.checkpoint.name}'s text beside that of {name}: it says {found!r}, and "
                         f"{wanted!r} is right")


_MARGIN = "abs(exact[place, one[place]] - exact[place, other[place]])"
_MOVED = "(logits[place] - exact[place]).abs().max()"
_PLACE = "next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), None)"
EXERCISES = [Exercise("14", my_verdict, pairs_of_texts, {
    "it says 'bug' of all texts that part, however far apart the logits are":
        '"rounding" if margin <= 2 * moved else "bug" -> "bug"',
    "it says 'rounding' of all texts that part, however far apart the logits are":
        '"rounding" if margin <= 2 * moved else "bug" -> "rounding"',
    "'rounding' and 'bug' are exchanged": "<= 2 * moved -> > 2 * moved",
    "both logits can have changed, one up and one down: rounding explains twice the largest change":
        "2 * moved -> moved",
    "rounding explains twice the largest change, and not more": ("2 * moved -> 4 * moved", "2 * moved -> 3 * moved"),
    "the margin is taken in `logits`, and in `exact` it is asked for":
        f"{_MARGIN} -> abs(logits[place, one[place]] - logits[place, other[place]])",
    "the margin of the two largest logits is taken: which tokens did the two runs choose?":
        f"{_MARGIN} -> exact[place].topk(2).values.diff().abs()",
    "the margin to the largest logit is taken: it is that of the two tokens":
        f"{_MARGIN} -> exact[place].max() - exact[place, other[place]]",
    "a logit that has risen is measured, and one that has fallen is not":
        f"{_MOVED} -> (logits[place] - exact[place]).max()",
    "rounding is measured in other rows, too: the one where the texts part counts":
        f"{_MOVED} -> (logits - exact).abs().max()",
    "the changes of the two tokens are measured: any logit of the row says how far rounding can move one": (
        f"{_MOVED} -> (logits[place] - exact[place])[[one[place], other[place]]].abs().max()",
        f"{_MOVED} -> (logits[place] - exact[place])[[one[place], other[place]]].abs().mean()",
        f"{_MOVED} -> (logits[place] - exact[place])[one[place]].abs()"),
    "the mean of the changes is measured: rounding can move a logit by the largest":
        f"{_MOVED} -> (logits[place] - exact[place]).abs().mean()",
    "`exact` is rounded to bfloat16 here: then its distance from `logits` is lost":
        f"{_MOVED} -> (logits[place] - exact[place].bfloat16()).abs().max()",
    "they part at the first token that differs: later ones follow other words":
        f"{_PLACE} -> next((i for i in reversed(range(len(one))) if one[i] != other[i]), None)",
    "it goes by how many tokens agree, and where they part does not matter":
        "margin <= 2 * moved -> place > 0.5 * len(one)",
    "it goes by the margin alone: how far does rounding move a logit in that row? Measure it": (
        "margin <= 2 * moved -> margin < 0.1", "margin <= 2 * moved -> margin < 1e-2", "margin <= 2 * moved -> "
            "margin < 1e-3"),
    "the row before is read: each row has the logits from which its own token was chosen":
        f"{_PLACE} -> (lambda n: n and max(n - 1, 0))({_PLACE}) ;; one[place] -> one[place + 1] ;; other[place] -> "
        f"other[place + 1]",
}, "near ties, and differences that no rounding explains; and on {ranks}, a healthy engine's texts are told from a "
   "broken "
   "one's", said, engine=healthy_or_broken)]

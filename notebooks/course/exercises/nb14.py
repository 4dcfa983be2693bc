"""Notebook 14: two answers to one prompt, rounding or bug; a sum that has the same bits on any number of ranks."""

import functools

import torch

from course.judge.answers import greedy
from course.judge.bits import read_again
from course.judge.exercise import Example, Exercise
from course.judge.words import NotYet
from course.judge.work import numbers, unchanged
from tplab.align import hf_greedy
from tplab.checkpoint.layout import read_part, tensor_parts
from tplab.faults import fault
from tplab.ranks import all_gather, all_reduce, rank  # noqa: F401  (an edit of a reference needs it)
from tplab.shard import split_evenly


def my_verdict(first, second, logits, exact):
    place = next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), None)
    if place is None:
        return "same"
    margin = abs(exact[place, first[place]] - exact[place, second[place]])
    moved = (logits[place] - exact[place]).abs().max()
    return "rounding" if margin <= 2 * moved else "bug"


def texts(seed: int) -> tuple[list[int], list[int], torch.Tensor, torch.Tensor]:
    """Two texts of eight tokens, and the first one's logits in bfloat16. The seed decides where the texts part, how far
    apart the two logits are there, how far rounding moves which logit, and whether a third token nearly ties."""
    generator = torch.Generator().manual_seed(seed)

    def random(low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=generator)

    place, noise, scale = seed % 9, 10 ** random(-0.9, 0.3), 10 ** random(-4, 0)
    first, drawn = (torch.randint(16, (8,), generator=generator).tolist() for _ in range(2))
    other = [b if a != b else 16 for a, b in zip(first, drawn)]
    exact, moved = random(0, 4, 8, 20), random(-0.2, 0.2, 8, 20) * noise * 10 ** random(-1, 1, 8, 1)
    for row, (a, b) in enumerate(zip(first, other)):
        exact[row, a], exact[row, 17] = 10, 10 + 0.6 * noise if seed % 2 else 5
        if row == place:
            moved[row] = noise * random(-0.4, 0.4, 20)
            moved[row, a], moved[row, b], moved[row, 17] = noise * random(0, 0.9), -noise * random(0, 0.9), -0.6 * noise
            moved[row, 18] = -noise if seed % 3 else noise
            exact[row, b] = 10 - 2 * noise * (random(0.02, 0.95) if seed % 4 < 2 else 10 ** random(0.03, 1))
    return first, [*first[:place], *other[place:]], (scale * (exact + moved)).bfloat16(), scale * exact


def pairs_of_texts():
    """Three that can be computed by hand, a few, many, and one of which the first run is the broken one."""
    by_hand = [Example(([2], [1], torch.tensor([logits]).bfloat16(), torch.tensor([exact])),
                       says=f"first [2], second [1], logits [{logits}], exact [{exact}]") for logits, exact in (
        ([0.125, 2, 2.1875, 0.5], [0, 2, 2.1875, 0.5]), ([0.125, 2.125, 2.375, 0], [0, 2, 2.5, 0]),
        ([0, 2, 2.015625, 0], [0, 2, 2.00875, 0]), ([0.125, 12, 2, 0.5], [0, 12, 2, 0.5]))]
    yield from by_hand[:3]
    for seed in range(8, 26):
        first, other, logits, exact = pair = texts(seed)
        place, says = seed % 9, "two equal texts"
        if first != other:
            margin = (exact[place, first[place]] - exact[place, other[place]]).abs()
            says = (f"texts that differ first at token {place}, where the two exact logits are {margin:.2g} apart and "
                    f"rounding moves a logit by {(logits[place] - exact[place]).abs().max():.2g} at most")
        yield Example(pair, says=says)
    yield Example(*map(texts, range(8, 128)), says="120 pairs of texts")
    yield by_hand[3]


def verdicts(answer, *pairs):
    answers = [answer(list(first), list(other), logits.clone(), exact.clone()) for first, other, logits, exact in pairs]
    yield "it says", answers[0] if len(answers) == 1 else answers


@functools.lru_cache(maxsize=3)
def texts_of_model(ckpt, ids: tuple[int, ...], size: int) -> tuple:
    """A text of the model's in bfloat16 with its logits and exact ones; and the texts of others, by what they are."""
    def written(ranks, **options):
        return greedy(ckpt, [ids], 24, ranks, "bfloat16", **options)[0]

    text = written(size)
    logits, exact = (read_again(ckpt, [ids], [text], *how) for how in ((size, "bfloat16"), (1, "float32")))
    return text, logits.bfloat16(), exact, {
        f"{1 + size % 3} ranks": written(1 + size % 3), "Hugging Face": hf_greedy(ckpt, list(ids), 24, "bfloat16"),
        "an engine without positions": written(size, patches=[fault("rope_missing")])}


def healthy_or_broken(setting, answer):
    ids, size = tuple(setting.ids(8)), setting.tensor_parallel_size
    text, logits, exact, others = texts_of_model(setting.checkpoint, ids, size)
    for name, other in others.items():
        wanted = my_verdict(text, other, logits, exact)
        nearly = {my_verdict(text, other, exact + (logits - exact) * much, exact) for much in (0.5, 2)}
        if nearly == {wanted} and (verdict := answer(text, other, logits, exact)) != wanted:
            raise NotYet(f"in bfloat16, {setting.checkpoint.name}'s text beside that of {name}: it says {verdict!r}, "
                         f"and {wanted!r} is right")


def my_ordered_sum(leaves, sizes):
    all_leaves = all_gather(leaves, dim=0, sizes=sizes)
    total = torch.zeros_like(all_leaves[0])
    for leaf in all_leaves:
        total = total + leaf
    return total


def leaves_of_ranks():
    for hidden, *deals in ((3, (5, 4), (4, 5), (8, 1)), (7, (3, 3, 3), (1, 2, 6), (5, 3, 1))):
        yield Example(numbers(9, 40, hidden), deals, ranks=len(deals[0]), says=(
            f"nine leaves [40, {hidden}] of 257, 10, 100, …, sizes {list(deals[0])}"))


def of_any_deal(answer, leaves, deals):
    """The sum, of which each digit is one leaf's; and the bits of another, however the leaves are dealt out: where
    terms of 10¹² cancel, each order has its own, in float64 too."""
    tens = (10.0 ** torch.arange(9, dtype=torch.float64).view(9, 1, 1)).repeat(1, *leaves.shape[1:])
    tens[0] = 257  # 1 once too often would be what rounding to float32 makes of the sum; 257 is no bfloat16
    mine = tens.split(deals[0])[rank()].clone()
    yield "it returns", answer(mine, list(deals[0]))
    unchanged("leaves", mine.equal(tens.split(deals[0])[rank()]))
    large = torch.cat([leaves[:3] * 1e12, leaves[3:6] * 1e-3, leaves[:3] * -1e12])
    totals = [answer(large.split(deal)[rank()].clone(), list(deal)) for deal in deals]
    bits = torch.stack([total if isinstance(total, torch.Tensor) else torch.zeros_like(large[0]) for total in totals])
    everyone, (first, *_) = all_gather(bits[None], dim=0), deals
    for r, of_rank in enumerate(everyone):
        for deal, total in zip(deals, of_rank):
            yield (f"where large leaves cancel, the sum with sizes {list(deal)} on rank {r} has other bits than with "
                   f"{list(first)} on rank 0", not total.equal(everyone[0, 0]), False)


def in_a_product(setting, answer):
    """``down_proj`` of the model's first layer in eight leaves, on one rank and on three or more."""
    parts = tensor_parts(setting.checkpoint.config, setting.checkpoint.tensors)
    with setting.checkpoint.reader() as reader:
        weight = read_part(parts["model.layers.0.mlp.down_proj.weight"], reader).float()
    x = numbers(5, weight.shape[1])
    leaves = torch.stack([a @ b.T for a, b in zip(x.tensor_split(8, 1), weight.tensor_split(8, 1))])
    alone, several = (setting.on_ranks(sum_on_rank, answer, leaves, size, size=size)[0]
                      for size in (1, max(3, setting.tensor_parallel_size)))  # adding 2 or 4 equal sums up is exact
    if not alone.equal(several):
        raise NotYet("on real ranks, down_proj in eight leaves has other bits on one rank than on several")


def sum_on_rank(answer, leaves, size: int):
    sizes = [len(some) for some in split_evenly(len(leaves), size)]
    return answer(leaves.split(sizes)[rank()].clone(), sizes)


_MARGIN = "abs(exact[place, first[place]] - exact[place, second[place]])"
_MOVED = "(logits[place] - exact[place]).abs().max()"
_PLACE = "next((i for i, (a, b) in enumerate(zip(first, second)) if a != b), None)"
_GATHERED = "all_gather(leaves, dim=0, sizes=sizes)"
EXERCISES = [
    Exercise("14", my_verdict, pairs_of_texts, {
        "on these examples it says 'bug' whenever texts differ: does it look at the logits?":
            '"rounding" if margin <= 2 * moved else "bug" -> "bug"',
        "on these examples it says 'rounding' whenever texts differ, however far apart the logits are":
            '"rounding" if margin <= 2 * moved else "bug" -> "rounding"',
        "both logits can have changed, one up and one down: rounding explains twice the largest change":
            "2 * moved -> moved",
        "rounding explains twice the largest change, one logit up and one down, and no more": "2 * moved -> 4 * moved",
        "the tolerance is a fixed number: measure how far rounding changes a logit of this row": tuple(
            f"2 * moved -> {fixed}" for fixed in (0.1, 0.25, 0.5)),
        "the margin of the two largest logits is taken: which tokens did the two runs choose?":
            f"{_MARGIN} -> exact[place].topk(2).values.diff().abs()",
        "the margin is a distance: where the second run's token is far above the other, rounding explains nothing":
            f"{_MARGIN} -> {_MARGIN.removeprefix('abs')}",
        "the margin is taken in logits, which are rounded: that of the exact ones says how near the tie is":
            tuple(f"{_MARGIN} -> {_MARGIN.replace('exact', 'logits')} ;; 2 * moved -> {times} * moved"
                  for times in (2, 1)),
        "a logit can have changed downwards, too: take the largest change without its sign":
            f"{_MOVED} -> (logits[place] - exact[place]).max()",
        "the mean change of a logit is taken, and the largest one says how far rounding can move one":
            f"{_MOVED} -> (logits[place] - exact[place]).abs().mean()",
        "rounding is measured in other rows, too: only the row where the texts differ first counts":
            f"{_MOVED} -> (logits - exact).abs().max()",
        "the change of a token that was chosen is measured: any logit of the row says how far rounding can move one":
            (f"{_MOVED} -> (logits[place] - exact[place])[[first[place], second[place]]].abs().max()",
             f"{_MOVED} -> (logits[place] - exact[place])[[first[place], second[place]]].abs().sum() / 2",
             f"{_MOVED} -> (logits[place] - exact[place])[first[place]].abs()",
             f"{_MOVED} -> (logits[place] - exact[place])[second[place]].abs()"),
        "only the first token that differs counts: later ones follow other words":
            (f"{_PLACE} -> next((i for i in reversed(range(len(first))) if first[i] != second[i]), None)",
             f"{_PLACE} -> None if first == second else 0"),
    }, "near ties, and differences that no rounding explains; and on {ranks}, a healthy engine's texts are told from a "
       "broken one's", verdicts, engine=healthy_or_broken),
    Exercise("14", my_ordered_sum, leaves_of_ranks, {
        "each rank adds up its own leaves first: how many these are decides the order": (
            f"{_GATHERED} -> all_reduce(leaves.sum(0))[None]",
            f"{_GATHERED} -> all_gather(leaves.sum(0)[None], dim=0)",
            f"{_GATHERED} -> leaves ;; return total -> return all_reduce(total)"),
        "it rounds on the way: add in the dtype of the leaves": tuple(
            f"{_GATHERED} -> {_GATHERED}.{dtype}() ;; return total -> return total.to(leaves.dtype)"
            for dtype in ("float", "bfloat16")),
        "the first leaf is added twice": "torch.zeros_like(all_leaves[0]) -> all_leaves[0]",
        "only the leaves of this rank are added": f"{_GATHERED} -> leaves",
        "the ranks add in different orders: all of them must add in the same one":
            f"{_GATHERED} -> {_GATHERED}.roll(-sum(sizes[:rank()]), 0)",
    }, "however the leaves are dealt out, every bit is the same; so it is for the model's own down_proj, on one rank "
       "and on several", of_any_deal, engine=in_a_product, dims="token, hidden", counted=False)]

"""Notebook 14: two answers to one prompt, rounding or bug; and a sum that no number of ranks changes."""

import functools
import math
from collections.abc import Callable

import torch

from course.judge.answers import greedy
from course.judge.attempt import Attempt, NotYet, count_ops, kind, on_ranks, saying, tensor, with_its_own
from course.judge.compare import agree
from course.judge.verdict import Setting, exercise
from course.judge.words import first_cause, in_words
from tplab.align import align, hf_greedy
from tplab.checkpoint import Checkpoint
from tplab.checks import counted
from tplab.faults import fault
from tplab.llm import LLM, SamplingParams
from tplab.patch import Patch, original
from tplab.shard.plan import split_evenly

WORDS = ("same", "rounding", "bug")


def verdict(one, other, logits: torch.Tensor, exact: torch.Tensor) -> str:
    """What the exercise asks for."""
    return _by(one, other, logits, exact)


def _by(one, other, logits: torch.Tensor, exact: torch.Tensor, rule: Callable | None = None,
        place: Callable = lambda places, one: places[0], shift: int = 0) -> str:
    """The verdict, or what comes of another ``rule`` for margin and change, or of looking at another ``place``, or at
    another row, ``shift`` behind it."""
    places = [at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]]
    if not places:
        return "same"
    row = min((at := place(places, one)) + shift, len(exact) - 1)
    margin, moved = (rule or _margin)(one[at], other[at], exact[row].double(), logits[row].double() - exact[row],
                                      logits - exact)
    return "rounding" if margin <= 2 * moved else "bug"


def _margin(a: int, b: int, row, off, every) -> tuple:
    """How far the two tokens' exact logits are apart, and how far rounding moves a logit of that row."""
    return (row[a] - row[b]).abs(), off.abs().max()


# What a wrong answer looks at instead, and by it the margin and the change.
_RULES = {
    "the margin is taken in `logits`, and in `exact` it is asked for": lambda a, b, row, off, every: (
        (row[a] + off[a] - row[b] - off[b]).abs(), off.abs().max()),
    "the margin of the two largest logits is taken: which tokens did the two runs choose?":
        lambda a, b, row, off, every: (row.topk(2).values.diff().abs(), off.abs().max()),
    "the margin to the largest logit is taken: it is that of the two tokens": lambda a, b, row, off, every: (
        row.max() - row[b], off.abs().max()),
    "a logit that has risen is measured, and one that has fallen is not": lambda a, b, row, off, every: (
        (row[a] - row[b]).abs(), off.max()),
    "rounding is measured in other rows, too: the one where the texts part counts": lambda a, b, row, off, every: (
        (row[a] - row[b]).abs(), every.abs().max()),
    "the changes of the two tokens are measured: any logit of the row says how far rounding can move one":
        lambda a, b, row, off, every: ((row[a] - row[b]).abs(), (off[a].abs() + off[b].abs()) / 2),
    "the larger change of the two tokens is measured: any logit of the row says how far rounding can move one":
        lambda a, b, row, off, every: ((row[a] - row[b]).abs(), off[[a, b]].abs().max()),
    "the mean of the changes is measured: rounding can move a logit by the largest": lambda a, b, row, off, every: (
        (row[a] - row[b]).abs(), off.abs().mean()),
    "the changes of all logits are added up: rounding can move a logit by the largest": lambda a, b, row, off, every: (
        (row[a] - row[b]).abs(), off.abs().sum() / 2),
    "`exact` is rounded to bfloat16 here: then its distance from `logits` is lost": lambda a, b, row, off, every: (
        (row[a] - row[b]).abs(), (row + off - row.bfloat16()).abs().max()),
    "`exact` is rounded to bfloat16 first: margin and change are those of the rounded logits":
        lambda a, b, row, off, every: ((row.bfloat16()[a] - row.bfloat16()[b]).abs(),
                                       (row + off - row.bfloat16()).abs().max()),
    "a logit of `exact` and one of `logits` make the margin: both are of `exact`": lambda a, b, row, off, every: (
        (row[a] - row[b] - off[b]).abs(), off.abs().max())}
# And where it looks instead.
_PLACES = {
    "they part at the first token that differs: later ones follow other words": {"place": lambda at, one: at[-1]},
    "the place is looked up by its token, and that token stood there before": {
        "place": lambda at, one: one.index(one[at[0]])},
    "the row before is read: each row has the logits from which its own token was chosen": {"shift": -1},
    "the row after is read: each row has the logits from which its own token was chosen": {"shift": 1}}


def _texts(seed: int) -> tuple[list[int], list[int], torch.Tensor, torch.Tensor]:
    """Two texts of eight tokens, and the first one's logits in bfloat16: how far the tokens are apart at which the
    texts part, how far rounding moves which logit there, and in other rows, and whether a third one nearly ties, is up
    to the seed."""
    generator = torch.Generator().manual_seed(seed)

    def random(low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=generator)

    def tokens():  # some stand there twice
        return torch.randint(16, (8,), generator=generator).tolist()

    # Beside a logit of 10, bfloat16 can have changes of this size; in every fifth text there is only its rounding.
    at, noise, scale = seed % 9, 10 ** random(-0.9, 0.3) if seed % 5 else 0.02, 10 ** random(-4, 0)
    one, exact = tokens(), random(0, 4, 8, 20)
    other = [b if a != b else 16 for a, b in zip(one, tokens())]
    off = random(-0.2, 0.2, 8, 20) * noise * 10 ** random(-1, 1, 8, 1)
    for row, (a, b) in enumerate(zip(one, other)):
        exact[row, a], exact[row, 17] = 10, 10 + 0.6 * noise if seed % 2 else 5
        if row == at:
            off[row] = noise * random(-0.4, 0.4, 20)
            off[row, a], off[row, b], off[row, 17] = noise * random(0, 0.9), -noise * random(0, 0.9), -0.6 * noise
            off[row, 18], off[row, 19] = (-noise, random(0.3, 0.9) * noise) if seed % 3 else (noise, 0)
            exact[row, b] = 10 - 2 * noise * (random(0.02, 0.95) if seed % 4 < 2 else 10 ** random(0.03, 1))
    return one, [*one[:at], *other[at:]], (scale * (exact + off * (seed % 5 > 0))).bfloat16(), scale * exact


@exercise("my_verdict", "14", takes="one, other, logits, exact", right=verdict,
          agreed="near ties, and differences that no rounding explains; and on {ranks}, a healthy engine's texts are "
                 "told from a broken one's")
def my_verdict(attempt: Attempt, setting: Setting):
    """Made texts; then the model in bfloat16 on two numbers of ranks, and with a bug."""
    cases = [_texts(seed) for seed in range(8, 128)]
    said, right = [_said(attempt, texts, _parting(*texts)) for texts in cases], [verdict(*texts) for texts in cases]
    wrong = [number for number, pair in enumerate(zip(said, right)) if pair[0] != pair[1]]
    if wrong:
        raise NotYet(f"{_parting(*cases[wrong[0]])}: it says {said[wrong[0]]!r}, and {right[wrong[0]]!r} is right\n"
                     f"{_why(said, cases)}".rstrip())
    ids, size = setting.ids(8), setting.tensor_parallel_size
    healthy, logits, exact, others = _of_model(setting.checkpoint, tuple(ids), size)
    for name, other in others.items():
        if (right := verdict(healthy, other, logits, exact)) == _by(
                healthy, other, logits, exact, lambda *row: (2 * _margin(*row)[0], _margin(*row)[1])) == _by(
                healthy, other, logits, exact, lambda *row: (_margin(*row)[0] / 2, _margin(*row)[1])):
            what = f"in bfloat16, {setting.checkpoint.name}'s text beside that of {name}"
            if (found := _said(attempt, (healthy, other, logits, exact), what)) != right:
                raise NotYet(f"{what}: it says {found!r}, and {right!r} is right")


@functools.lru_cache(maxsize=3)
def _of_model(ckpt: Checkpoint, ids: tuple[int, ...], size: int) -> tuple:
    """A text of the model's in bfloat16 with its logits and exact ones; and the texts of others, by what they are."""
    healthy = greedy(ckpt, [ids], 24, size, "bfloat16")[0]
    report = align(ckpt, [[*ids, *healthy]], tensor_parallel_size=size, dtype="bfloat16")
    exact = align(ckpt, [[*ids, *healthy]], tensor_parallel_size=1, dtype="float32").hf_logits
    rows = slice(len(ids) - 1, len(ids) + len(healthy) - 1)
    return healthy, report.tp_logits[rows].bfloat16(), exact[rows], {
        f"{1 + size % 3} ranks": greedy(ckpt, [ids], 24, 1 + size % 3, "bfloat16")[0],
        "Hugging Face": hf_greedy(ckpt, list(ids), 24, "bfloat16"),
        "an engine without positions": greedy(ckpt, [ids], 24, size, "bfloat16", patches=[fault("rope_missing")])[0]}


def _apart(one, other, logits: torch.Tensor, exact: torch.Tensor) -> tuple[int, float, float] | None:
    """Where the texts part, and there the margin and the largest change."""
    at = next((at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), None)
    return None if at is None else (at, *map(float, _margin(one[at], other[at], exact[at], logits[at] - exact[at], 0)))


def _parting(*texts) -> str:
    if (apart := _apart(*texts)) is None:
        return "two equal texts"
    return (f"texts that part at token {apart[0]}, where the two exact logits are {apart[1]:.2g} apart and rounding "
            f"moves a logit by {apart[2]:.2g} at most")


def _said(attempt: Attempt, texts: tuple, what: str) -> str:
    with saying(f"{what}: "):
        said = attempt(*texts)
        if said not in WORDS or not isinstance(said, str):
            raise NotYet(f"it returns {kind(said)}; one of {', '.join(map(repr, WORDS))} must come back")
    return said


def _why(said: list[str], cases: list[tuple]) -> str:
    """By what a wrong answer goes, if it says of all cases what comes of that."""
    rules = {says: {"rule": rule} for says, rule in _RULES.items()} | _PLACES
    apart = [(*_apart(*texts), word) for word, texts in zip(said, cases) if _apart(*texts)]
    if len({word for *_, word in apart}) == 1:
        return f"it says {apart[0][-1]!r} of all texts that part, however far apart the logits are"
    if said == [{"rounding": "bug", "bug": "rounding"}.get(word := verdict(*texts), word) for texts in cases]:
        return "'rounding' and 'bug' are exchanged"
    for some in (rules, {f"{one}\n{other}": {"rule": rule, **place} for one, rule in _RULES.items()
                         for other, place in _PLACES.items()}):
        if fits := [says for says, by in some.items() if said == [_by(*texts, **by) for texts in cases]]:
            return fits[0] * (len(fits) == 1)
    for says, of in (
            ("it goes by the token at which they part: how many agree before does not matter", lambda at, *_: at),
            ("it goes by the margin alone: how far does rounding move a logit in that row? Measure it",
             lambda at, margin, moved: margin),
            ("by yours, rounding explains up to {} times the largest change. Both logits can have changed, one up and "
             "one down", lambda at, margin, moved: margin / moved)):
        low, high = ([of(*one) for *one, word in apart if (word == "rounding") == is_low] for is_low in (True, False))
        if max(low) < min(high) or max(high) < min(low):
            return says.format(f"{max(low):.2g}")
    return ""


def _tree_patches(answer: Callable) -> list[Patch]:
    """The batch-invariant engine, whose row-parallel sums a learner's function adds up from all ranks' leaves."""
    home = "tplab.invariant.model."

    def with_shares(layer, leaves, parts):
        original(home + "tree_parallel")(layer, leaves, parts)
        layer.shares = parts

    def every_leaf(first, last, own):
        return [(n, n + 1) for n in own]

    def reduce(self, leaves):
        total = answer(leaves, self.shares)
        return (total if self.bias is None else total + self.bias.float()).to(self.product.dtype)

    return [Patch(home + "tree_parallel", with_shares), Patch(home + "nodes_within", every_leaf),
            Patch(home + "_reduce", reduce)]


@exercise("my_tree_sum", "14", takes="own, shares", patches=_tree_patches,
          agreed="nine leaves give the same bits on one to four ranks; with this sum, the model's log probabilities "
                 "are the same bits on one rank and on several")
def my_tree_sum(attempt: Attempt, setting: Setting):
    """Nine leaves and thirteen small ones on one to four ranks, nine of which two cancel, and three, so that a rank has
    none; then the model's own."""
    for count, large, other in ((9, 0.0, 5), (13, 0.0, 5), (9, 1e20, 5), (3, 0.0, 1)):
        leaves = torch.rand(count, 3, 4, generator=torch.Generator().manual_seed(count)) - 0.4
        leaves *= 1e-6 if count > 9 else 1
        leaves = leaves * 10.0 ** (torch.arange(count) % 2)[:, None, None]
        leaves[0] += large  # in float64, too, others are lost beside these two
        leaves[other] -= large
        sums = []
        for ranks in (1, 2, 3, 4):
            shares = split_evenly(count, ranks)
            with saying(f"{count} leaves on {counted(ranks, 'rank')}: "):
                ran = _summed(attempt, leaves, shares)
            sums.append(ran[0][0] if large else _judge_sum(ran, leaves, shares))
        if large and not all(torch.equal(value, sums[0]) for value in sums):
            raise NotYet("nine leaves, two of which are 1e20 and -1e20: the sum differs on 1, 2, 3 and 4 ranks\n"
                         "Wider numbers round less, and the order still depends on the ranks")
        if not all(torch.equal(value, sums[0]) for value in sums):
            one_each = all(math.prod(op.shape) == leaves[0].numel() for _, log in ran for op in log)
            alike = [ranks for ranks, value in enumerate(sums, 1) if torch.equal(value, sums[-1])]
            raise NotYet(f"{count} leaves: the sum is right, and its last bits are not the same on 1, 2, 3 and 4 ranks"
                         "\n" + ("Each rank adds its own leaves first, and its own leaves depend on how many ranks "
                                 "there are" if one_each else "On 2, 3 and 4 ranks they are, and one rank has others"
                                 if alike == [2, 3, 4] else "Which additions does a rank make, and would it make the "
                                 "same ones if it had other leaves?"))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5)

    def answers(ranks):
        try:
            with LLM(setting.checkpoint, ranks, batch_invariant=True, logical=True, patches=setting.patches) as llm:
                return llm.generate([setting.ids(6)], params, use_tqdm=False)[0].outputs[0].logprobs
        except Exception as error:  # of the learner's code on the ranks
            raise NotYet(in_words(first_cause(error))) from error

    with saying("in the engine: "):
        if answers(max(2, setting.tensor_parallel_size)) != answers(1):
            raise NotYet("the log probabilities differ in their bits from one rank's, though nine leaves were right")


def _summed(attempt: Attempt, leaves: torch.Tensor, shares: list[range]) -> list[tuple]:
    """What each rank makes of its own leaves, and its collectives."""
    return on_ranks(len(shares), with_its_own, attempt, [leaves[share.start:share.stop].clone() for share in shares],
                    [shares] * len(shares), waits="Does every rank come to the collective?", asks={
                        "dim 1": "The leaves are dim 0, the tokens dim 1 and the hidden numbers dim 2",
                        "calls all_gather": "sizes=[…] has a number for each rank: how many leaves it has"})


def _judge_sum(ran, leaves: torch.Tensor, shares: list[range]) -> torch.Tensor:
    size, whole = len(shares), leaves.double().sum(0)
    unit = whole.abs().max()
    what = f"{len(leaves)} leaves on {counted(size, 'rank')}: "
    with saying(what):
        values = [tensor(value, "tokens, hidden", leaves.shape[1:], torch.float32, it=f"on rank {number} it returns")
                  for number, (value, _) in enumerate(ran)]
        parts = [leaves[share.start:share.stop].double().sum(0) for share in shares]

        def near(value, other):
            return torch.allclose(value.double(), other, rtol=0, atol=1e-4 * unit.item())

        if not all(near(value, whole) for value in values):
            ways = {"each rank returns its own part: where are the parts added up?": parts,
                    "this is the mean of the leaves": [whole / len(leaves)] * size,
                    f"this is {size} times the sum": [whole * size] * size,
                    "this is the mean of the ranks' sums": [whole / size] * size}
            if says := next((says for says, way in ways.items() if all(map(near, values, way))), ""):
                raise NotYet(says)
            wrong = next(r for r, value in enumerate(values) if not near(value, whole))
            agree(values[wrong], whole, {}, f"on rank {wrong} that is not the sum of all leaves",
                  1e-4 * min(1, unit.item()), dims="token", parts={f"leaf {n}": leaf for n, leaf in enumerate(leaves)})
        if not all(torch.equal(value, values[0]) for value in values):
            raise NotYet("the ranks' results differ in their last bits: each adds in an order of its own")
        if size > 1:
            ops = {record.op for record in ran[0][1]}
            count_ops(ran, {"all_reduce" if ops == {"all_reduce"} else "all_gather": 1})
    return values[0]


"""Notebook 14: two answers to one prompt, rounding or bug; and a sum that no number of ranks changes."""

import math
from collections.abc import Callable

import torch

from tplab.align import align, hf_greedy
from tplab.checks import counted
from tplab.faults import fault
from tplab.lesson.answers import greedy
from tplab.lesson.attempt import Attempt, NotYet, count_ops, kind, on_ranks, saying, tensor, with_its_own
from tplab.lesson.compare import agree
from tplab.lesson.verdict import Setting, exercise
from tplab.llm import LLM, SamplingParams
from tplab.patch import Patch, original
from tplab.shard.plan import split_evenly

WORDS = ("same", "rounding", "bug")


def verdict(one, other, logits: torch.Tensor, exact: torch.Tensor) -> str:
    """What the exercise asks for."""
    ratio = _ratio(one, other, logits, exact)
    return "same" if ratio is None else "rounding" if ratio <= 1 else "bug"


def _ratio(one, other, logits: torch.Tensor, exact: torch.Tensor) -> float | None:
    """How much further apart the two tokens are at which the texts part than rounding can move them; None: nowhere."""
    place = next((at for at, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), None)
    if place is None:
        return None
    row = exact[place].double()
    margin = (row[one[place]] - row[other[place]]).abs()
    return (margin / (2 * (logits[place].double() - row).abs().max())).item()


def _case(places: int, *, flips: int | None, margin: float, noise: float = 0.05, seed: int = 0, scale: float = 1.0,
          third: bool = False, near: int | None = None, spoilt: int | None = None):
    """Two texts of ``places`` tokens and the first one's logits. They part at ``flips``, where the exact logits of the
    two tokens are ``margin`` apart (``third``: neither is the close second there). ``near``: a near tie that both
    decide alike; ``spoilt``: a row that is off by more than rounding."""
    generator = torch.Generator().manual_seed(seed)
    exact = torch.rand(places, 20, generator=generator) * 4
    one, other = (torch.randint(20, (places,), generator=generator).tolist() for _ in range(2))
    moved = (torch.rand(exact.shape, generator=generator) * 2 - 1) * noise
    for at in range(places):
        if other[at] == one[at]:
            other[at] = (one[at] + 7) % 20
        gap, token = (margin, other[at]) if at == flips else (0.02, (one[at] + 3) % 20) if at == near else (6, 0)
        exact[at, one[at]] = 10
        if gap < 6 or at == flips:
            exact[at, token] = 10 - gap
        if at == flips and third:
            exact[at, (one[at] + 5) % 20] = 10 - 0.02
        moved[at, one[at]] = moved[at].abs().max()  # the run chose it
    if spoilt is not None:
        moved[spoilt] = exact[spoilt] * 0.4
    moved[:, :2] *= 0.2  # rounding is not the same everywhere
    same = places if flips is None else flips
    return one, one[:same] + other[same:], (exact + moved) * scale, exact * scale


_NEAR = ("in `exact` their logits are 0.03 apart, and rounding moves a logit by 0.05; after this token the texts are "
         "different, so later tokens do not count")
# What the texts are; what `_case` makes them of; what a wrong answer has not seen.
VERDICTS = (
    ("two equal texts", dict(flips=None, margin=0, near=3), {}),
    ("texts that part at token 3, where two logits nearly tie", dict(flips=3, margin=0.03), {
        "bug": _NEAR, "same": "they part: where?"}),
    ("texts that part where one exact logit is 0.09 above the other, and rounding moves each by 0.048", dict(
        flips=3, margin=0.09, seed=13), {
        "bug": "both logits are rounded: one can fall and the other rise by as much", "same": "they part: where?"}),
    ("texts that part at token 2, where the first run was sure", dict(flips=2, margin=5.0, seed=1), {
        "rounding": "rounding moves a logit by 0.05 here, and the two tokens' logits are 5 apart",
        "same": "they part: where?"}),
    ("texts that part at the last token, where the first run was sure", dict(flips=7, margin=5.0, seed=2), {
        "rounding": "how many tokens agree does not matter: the first that differs cannot be explained by rounding",
        "same": "the last token differs"}),
    ("texts that part at the first token, in a near tie", dict(flips=0, margin=0.03, seed=3), {
        "bug": _NEAR, "same": "they part at once"}),
    ("texts that part where two tokens nearly tie, and the other run chose a third", dict(
        flips=4, margin=5.0, seed=4, third=True), {
        "rounding": "two logits nearly tie there, but the other run chose neither of them: whose margin counts?"}),
    ("texts that part where the first run was sure, behind a near tie that both decide alike", dict(
        flips=5, margin=4.0, seed=5, near=2), {
        "rounding": "the near tie stands before the place where they part, and both chose alike there"}),
    ("a near tie of logits that are eight times as large, and so is their rounding", dict(
        flips=3, margin=0.03, seed=6, scale=8.0), {
        "bug": "which number in your answer does not grow with the logits?"}),
    ("a run in float32, whose logits are off by 0.00002", dict(flips=3, margin=0.02, noise=2e-5, seed=7), {
        "rounding": "0.02 is little in bfloat16 and a thousand times what rounding does here: measure it, logits are "
                    "given and exact ones too"}),
    ("a run whose logits are off by far more at a later token than where the texts part", dict(
        flips=3, margin=2.0, seed=8, spoilt=6), {
        "rounding": "rounding is measured in the row where the texts part: another row says nothing of it"}),
)


@exercise("my_verdict", "14", takes="one, other, logits, exact", right=verdict,
          agreed="near ties, and differences that no rounding explains; and on {ranks}, a healthy engine's texts are "
                 "told from a broken one's")
def my_verdict(attempt: Attempt, setting: Setting):
    """Made texts; then the model in bfloat16 on two numbers of ranks, and with a bug."""
    for says, made, why in VERDICTS:
        texts = _case(8, **made)
        _judge_verdict(attempt(*texts), verdict(*texts), f"{says}: ", why)
    ids, size = setting.ids(8), setting.tensor_parallel_size
    healthy = greedy(setting.checkpoint, [ids], 24, size, "bfloat16")[0]
    report = align(setting.checkpoint, [ids + healthy], tensor_parallel_size=size, dtype="bfloat16")
    exact = align(setting.checkpoint, [ids + healthy], tensor_parallel_size=1, dtype="float32").hf_logits
    rows = slice(len(ids) - 1, len(ids) + len(healthy) - 1)
    logits, exact = report.tp_logits[rows].float(), exact[rows]
    others = {f"{1 + size % 3} ranks": greedy(setting.checkpoint, [ids], 24, 1 + size % 3, "bfloat16")[0],
              "Hugging Face": hf_greedy(setting.checkpoint, ids, 24, "bfloat16"),
              "an engine without positions": greedy(setting.checkpoint, [ids], 24, size, "bfloat16",
                                                    patches=[fault("rope_missing")])[0]}
    for name, other in others.items():
        ratio = _ratio(healthy, other, logits, exact)
        if ratio is None or not 0.5 < ratio < 2:  # else a maximum and a quantile may say another thing
            _judge_verdict(attempt(healthy, other, logits, exact), verdict(healthy, other, logits, exact),
                           f"in bfloat16, {setting.checkpoint.name}'s text beside that of {name}: ", {})


def _judge_verdict(said, right: str, what: str, why: dict[str, str]) -> None:
    if said not in WORDS or not isinstance(said, str):
        raise NotYet(f"{what}it returns {kind(said)}; one of {', '.join(map(repr, WORDS))} must come back")
    if said != right:
        raise NotYet(f"{what}it says {said!r}, and {right!r} is right\n{why.get(said, '')}".rstrip())


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
    """Nine and seven leaves on one to four ranks, and nine of which two cancel; then the model's own."""
    for count, large in ((9, 0.0), (7, 0.0), (9, 1e20)):
        leaves = torch.rand(count, 3, 4, generator=torch.Generator().manual_seed(count)) - 0.4
        leaves = leaves * 10.0 ** (torch.arange(count) % 4)[:, None, None]
        leaves[0], leaves[5] = leaves[0] + large, leaves[5] - large  # in float64, too, others are lost beside these
        sums = []
        for ranks in (1, 2, 3, 4):
            shares = split_evenly(count, ranks)
            ran = on_ranks(ranks, with_its_own, attempt, [leaves[s.start:s.stop].clone() for s in shares],
                           [shares] * ranks, waits="Does every rank come to the collective?",
                           asks={"different collectives": "Parts of unlike length are gathered with sizes=[…], one "
                                                          "for each rank"})
            sums.append(ran[0][0] if large else _judge_sum(ran, leaves, shares))
        if large and not all(torch.equal(value, sums[0]) for value in sums):
            raise NotYet("nine leaves, two of which are 1e20 and -1e20: the sum differs on 1, 2, 3 and 4 ranks\n"
                         "Wider numbers round less, and the order still depends on the ranks")
        if not all(torch.equal(value, sums[0]) for value in sums):
            one_each = all(math.prod(op.shape) == leaves[0].numel() for _, log in ran for op in log)
            raise NotYet(f"{count} leaves: the sum is right, and its last bits are not the same on 1, 2, 3 and 4 ranks"
                         "\n" + ("Each rank adds its own leaves first, and its own leaves depend on how many ranks "
                                 "there are" if one_each else "Which additions does a rank make, and would it make the "
                                 "same ones if it had other leaves?"))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=5)

    def answers(ranks):
        with LLM(setting.checkpoint, ranks, batch_invariant=True, logical=True, patches=setting.patches) as llm:
            return llm.generate([setting.ids(6)], params, use_tqdm=False)[0].outputs[0].logprobs

    with saying("in the engine: "):
        if answers(max(2, setting.tensor_parallel_size)) != answers(1):
            raise NotYet("the log probabilities differ in their bits from one rank's, though nine leaves were right")


def _judge_sum(ran, leaves: torch.Tensor, shares: list[range]) -> torch.Tensor:
    size, whole = len(shares), leaves.double().sum(0)
    what = f"{len(leaves)} leaves on {counted(size, 'rank')}: "
    with saying(what):
        values = [tensor(value, "tokens, hidden", leaves.shape[1:], torch.float32) for value, _ in ran]
        parts = [leaves[share.start:share.stop].double().sum(0) for share in shares]

        def near(value, other):
            return torch.allclose(value.double(), other, rtol=0, atol=1e-4 * whole.abs().max().item())

        if not all(near(value, whole) for value in values):
            ways = {"each rank returns its own part: where are the parts added up?": parts,
                    "this is the mean of the leaves": [whole / len(leaves)] * size,
                    f"this is {size} times the sum": [whole * size] * size,
                    "this is the mean of the ranks' sums": [whole / size] * size}
            if says := next((says for says, way in ways.items() if all(map(near, values, way))), ""):
                raise NotYet(says)
            wrong = next(r for r, value in enumerate(values) if not near(value, whole))
            agree(values[wrong], whole, {}, f"on rank {wrong} that is not the sum of all leaves", dims="token",
                  parts={f"leaf {n}": leaf for n, leaf in enumerate(leaves)})
        if not all(torch.equal(value, values[0]) for value in values):
            raise NotYet("the ranks' results differ in their last bits: each adds in an order of its own")
        if size > 1:
            ops = {record.op for record in ran[0][1]}
            count_ops(ran, {min(ops): 1} if len(ops) == 1 else {"all_gather": 1})
    return values[0]


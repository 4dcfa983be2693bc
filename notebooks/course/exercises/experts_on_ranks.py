"""Notebook 12: a mixture of experts on the ranks with one sum, and a norm of which a rank sees a part only."""

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from course.exercises.experts import try_beside_hugging_face
from course.exercises.linears import Multiplications
from course.judge.attempt import Attempt, NotYet, for_each, on_ranks, saying, tensor, with_its_own
from course.judge.compare import agree, first_without, known
from course.judge.cuts import span
from course.judge.experts_toys import toy_full_width
from course.judge.verdict import Setting, exercise
from tplab.checks import counted
from tplab.model.trace import point
from tplab.patch import Patch, original
from tplab.ranks import rank
from tplab.shard import split_evenly

# Tokens, hidden features, columns of an expert, experts, of each token, ranks; whole experts are dealt out or each is
# cut; and how the tokens choose. First what halves.
LAYERS = ((6, 12, 8, 8, 2, 2, True, "any"), (5, 14, 7, 8, 2, 3, True, "expert 4 never"),
          (4, 13, 11, 8, 3, 2, False, "any"), (3, 12, 5, 8, 2, 3, True, "experts 0 to 2"),
          (1, 12, 9, 7, 2, 3, True, "any"), (4, 12, 6, 2, 1, 3, True, "any"))
# Tokens, head_dim, of each rank the heads: evenly, not evenly, and heads that more than one rank holds.
NORMS = ((4, 6, ((0, 4), (4, 8))), (5, 4, ((0, 3), (3, 5))), (3, 6, ((0, 2), (2, 3), (3, 4))),
         (3, 8, ((0, 1), (0, 1), (1, 2), (1, 2))), (4, 4, ((0, 1), (0, 2), (1, 2), (1, 2))), (3, 6, ((0, 1), (0, 1))))
_WAITS = ("A rank that no token has chosen has a summand, too: zeros. Does every rank call all_reduce, once, after "
          "its loop?")


def _block_of(answer: Callable) -> list[Patch]:
    """The engine's experts, with a learner's function behind the router."""
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.gate(x)
        point(f"layers.{self.layer}.router_logits", logits)
        weights, ids = self.route(logits)
        held, mlps = [int(expert) for expert in self.experts], list(self.experts.values())
        out = answer(x, weights.to(x.dtype), ids, range(held[0], held[-1] + 1), torch.stack(
            [mlp.gate_up_proj.weight for mlp in mlps]), torch.stack([mlp.down_proj.weight for mlp in mlps]))
        point(f"layers.{self.layer}.mlp", out)
        return out

    return [Patch("tplab.model.experts.SparseMoeBlock.forward", forward)]


@exercise("my_moe", "12", takes="x, weights, ids, experts, gate_up, down", patches=_block_of,
          alone="one rank holds all experts, so two and three logical ranks have judged it",
          agreed="each token has its experts' sum, with one all_reduce and no row too many; on {ranks}, the model "
                 "agrees with Hugging Face, dealt out either way")
def my_moe(attempt: Attempt, setting: Setting):
    """On 2 and 3 logical ranks, dealt out both ways, with experts and ranks that no token chooses; in the engine."""
    def check(case):
        tokens, _, columns, experts, top_k, size, whole, choice = case
        x, weights, ids, gate_up, down = _layer(*case)
        held = split_evenly(experts, size) if whole else [range(experts)] * size
        cut = [range(columns)] * size if whole else split_evenly(columns, size)
        *others, last = (len(part) for part in (held if whole else cut))
        how = f"{', '.join(map(str, others))} and {last} " + ("experts" if whole else
                                                             f"columns of each of {experts} experts")
        where = {"any": "", "expert 4 never": ", no token for expert 4",
                 "experts 0 to 2": ", all of whose experts are on rank 0"}[choice]
        what = f"{counted(tokens, 'token')} with top_k {top_k}{where}, ranks that hold {how}: "
        with saying(what):
            ran = on_ranks(size, _counted, attempt, x, weights, ids, held, cut, gate_up, down, waits=_WAITS)
        _judge_moe(ran, x, weights, ids, held, cut, gate_up, down, what, attempt.made)

    for_each(LAYERS, check, lambda case: f"{case[5]} ranks")
    moe = setting.checkpoint.config.experts
    if moe and (moe.bias or moe.swiglu or moe.shared_intermediate_size):
        return "in the small examples only: this model's experts have parts that yours have not"
    x, weights, ids, gate_up, down = (part.bfloat16() if part.is_floating_point() else part for part in _layer(
        6, 8, 8, 4, 2, 2, True, "any"))
    with saying("in bfloat16 "):
        ran = on_ranks(2, _counted, attempt, x, weights, ids, split_evenly(4, 2), [range(8)] * 2, gate_up, down,
                       waits=_WAITS)
        tensor(ran[0][0][0], "tokens, hidden", x.shape, x.dtype)
    try_beside_hugging_face(setting, modes=(False, True)[:setting.tensor_parallel_size])


def _layer(tokens, hidden, columns, experts, top_k, size, whole, choice) -> tuple[torch.Tensor, ...]:
    """Input, what the router says, and the experts, of which each token has others."""
    generator = torch.Generator().manual_seed(tokens + columns)
    x, logits, gate_up, down = (torch.randn(shape, generator=generator) for shape in (
        (tokens, hidden), (tokens, experts), (experts, 2 * columns, hidden), (experts, hidden, columns)))
    if choice == "expert 4 never":
        logits[:, 4] = float("-inf")
    if choice == "experts 0 to 2":
        logits[:, 3:] = float("-inf")
    weights, ids = logits.softmax(-1).topk(top_k)  # not renormalised: they add up to less than 1
    return x, weights, ids, gate_up, down


def _counted(attempt: Attempt, x, weights, ids, held, cut, gate_up, down) -> tuple[object, int]:
    """On a rank: what it returns for its part of the experts, and how many numbers it has multiplied for that."""
    experts, columns = held[rank()], cut[rank()]
    gate, up = (part[experts.start:experts.stop, columns.start:columns.stop] for part in gate_up.chunk(2, dim=1))
    own = down[experts.start:experts.stop, :, columns.start:columns.stop]
    with Multiplications() as work:
        return attempt(x, weights, ids, experts, torch.cat([gate, up], 1), own.contiguous()), work.count


def _judge_moe(ran: list, x, weights, ids, held, cut, gate_up, down, what: str, made: dict) -> None:
    size, summands, values = len(ran), _summands(x, weights, ids, held, cut, gate_up, down), []
    true = summands.sum(0)
    for number, ((value, _), _) in enumerate(ran):
        with saying(f"{what}on rank {number} "):
            values.append(tensor(value, "tokens, hidden", true.shape, true.dtype))
    found, right = torch.stack(values), true.expand(size, *true.shape)
    with saying(what):
        if found.isnan().any():
            raise NotYet("there is NaN in it, though nothing that goes in has one: what is the mean, or the sum, of no "
                         "rows at all?")
        ops = [record.op for record in ran[0][1]]
        wrong = first_without(made, summands)
        agree(found, right, _ways(summands, x, weights, ids, held, cut, gate_up, down, ops), dims="rank, token",
              parts={f"expert {n}": _expert(x, *gate_up[n].chunk(2), down[n])[-1] for n in range(len(down))} | {
                  "the token itself": x}, made=made[wrong],
              steps=_steps(x, weights, ids, held[wrong], cut[wrong], gate_up, down) | {
                  f"rank {wrong}'s summand": summands[wrong]})
        if ops != ["all_reduce"]:
            log = ", ".join(f"{ops.count(op)} × {op}" for op in dict.fromkeys(ops)) or "no collective"
            raise NotYet(f"the result is right, and the op log holds {log}. One sum is enough, after the loop: a rank "
                         "first adds up what its own experts give")
        rows = [sum(int((ids == expert).sum()) for expert in part) for part in held]
        for number, ((_, multiplied), _) in enumerate(ran):
            share = rows[number] * 3 * x.shape[1] * len(cut[number])
            if multiplied > share:
                raise NotYet(f"the result is right, and rank {number} multiplies {multiplied:,} times where its share "
                             f"is {share:,}: only the rows that have chosen an expert go through it")


def _expert(x, gate, up, down) -> tuple[torch.Tensor, ...]:
    inner = x @ gate.T, x @ up.T, F.silu(x @ gate.T) * (x @ up.T)
    return *inner, inner[-1] @ down.T


def _steps(x, weights, ids, experts, columns, gate_up, down) -> dict:
    """What a rank makes for its first expert that is chosen."""
    chosen = next((expert for expert in experts if (ids == expert).any()), None)
    if chosen is None:
        return {}
    rows, place = torch.where(ids == chosen)
    gate, up = (part[columns.start:columns.stop] for part in gate_up[chosen].chunk(2))
    gate, up, act, out = _expert(x[rows], gate, up, down[chosen][:, columns.start:columns.stop])
    return {f"expert {chosen}'s rows": x[rows], "its gate": gate, "its up": up, "silu(gate) · up": act,
            "what it gives": out, "that times its weight": out * weights[rows, place, None]}


def _summands(x, weights, ids, held, cut, gate_up, down, act=F.silu, turned: bool = False, of: Callable = lambda w: w,
              before: bool = False, first: Sequence[int] | None = None, striped: bool = False) -> torch.Tensor:
    """Of each rank its summand, ``[ranks, tokens, hidden]``; or, by the last six, what one mistake makes of it.

    ``of`` changes a rank's weights ``[tokens, experts]``; ``first``: of each rank the expert for which it takes its own
    first one.
    """
    # Wide enough for a rank that looks for experts behind the last one.
    whole, found = torch.zeros(len(x), len(gate_up) * len(held)).scatter(1, ids, weights.float()), []
    for number, (experts, columns) in enumerate(zip(held, cut)):
        shares = of(whole[:, experts.start:experts.stop] if first is None else
                    whole[:, first[number]:first[number] + len(experts)])
        gate, up = (part[experts.start:experts.stop, columns.start:columns.stop] for part in gate_up.chunk(2, dim=1))
        gate, up = (torch.cat([gate, up], 1)[:, at::2] for at in (0, 1)) if striped else (gate, up)
        x_each = x.expand(len(experts), *x.shape)
        x_each = x_each * shares.T[..., None] if before else x_each
        inner = [x_each @ part.mT for part in ((up, gate) if turned else (gate, up))]
        out = (act(inner[0]) * inner[1]) @ down[experts.start:experts.stop, :, columns.start:columns.stop].mT
        found.append((out * ((shares != 0).float() if before else shares).T[..., None]).sum(0))
    return torch.stack(found)


def _ways(summands, x, weights, ids, held, cut, gate_up, down, ops: Sequence[str]) -> dict:
    """``{mistake: what comes out on all ranks}``."""
    size = len(summands)

    def of(**changed):
        return _summands(x, weights, ids, held, cut, gate_up, down, **changed).sum(0).expand_as(summands)

    def last(shares):
        """What is written over instead of added up: the last of a token's experts stays."""
        later = (shares != 0).flip(1).cumsum(1).flip(1)
        return shares * (later == 1)

    def renormalised(shares):
        return shares / shares.sum(-1, keepdim=True).clamp(min=1e-30)

    def again():
        """Every rank's sum so far is summed up over the ranks with each of its experts."""
        total = torch.zeros_like(summands)
        for own in range(max(map(len, held))):
            alone = _summands(x, weights, ids, held, cut, gate_up, down, of=lambda shares, own=own: shares * (
                torch.arange(shares.shape[1]) == own))
            total = (total + alone).sum(0).expand_as(summands)
        return total

    def other(given):
        return _summands(x, given, ids, held, cut, gate_up, down).sum(0).expand_as(summands)

    return {
        "there are only zeros: which rows go through which expert?": torch.zeros_like(summands),
        "each rank returns its own summand. " + (
            "The log shows an all_reduce: is its result used?" if "all_reduce" in ops else "Where are they added up?"
            if held[0] != held[1] else "It holds all experts, but only some columns of each: where are they added up?"):
            summands,
        f"the op log holds {ops.count('all_reduce')} × all_reduce, one for each expert: a sum over the ranks is summed "
        "again": again(),
        "ids are those of the model, and yours are taken for a rank's own: which expert is the first one here?":
            of(first=[0] * size),
        "rank() * len(experts) is taken for a rank's first expert, and not every rank holds as many: its range says "
        "where it begins": of(first=[number * len(part) for number, part in enumerate(held)]),
        "no weight is in it: each expert's output is multiplied by its weight":
            of(of=lambda shares: (shares != 0).float()),
        "all experts of a token have the weight of its first one": other(weights[:, :1].expand_as(weights)),
        "a token's weights are taken in another order than its ids": other(weights.flip(1)),
        "a token's weights are divided by their sum: they are as the router wants them": other(renormalised(weights)),
        "the weights stand before the expert: an expert of half the input does not give half the output":
            of(before=True),
        "gate and up are exchanged: which half of gate_up goes through silu?": of(turned=True),
        "gate's rows stand above those of up, and every second row is taken for gate's": of(striped=True),
        "there is no activation": of(act=lambda gate: gate),
        "another activation than silu": tuple(of(act=act) for act in (torch.relu, F.gelu, torch.sigmoid, torch.tanh)),
        "where a token has two experts on a rank, the second overwrites the first: add them up": of(of=last),
        "the weights are divided by their sum on each rank: a rank that holds one of a token's experts holds a part of "
        "its weights": of(of=renormalised)}


def _norm_of(answer: Callable) -> list[Patch]:
    """The engine's norm over all heads, by a learner's function: once for q, once for k."""
    target = "tplab.model.attention.FullWidthNorm."

    def __init__(self, plan):
        original(target + "__init__")(self, plan)
        self.plan = plan

    def __call__(self, q_norm, k_norm, q, k):
        return tuple(answer(x, norm.weight, norm.eps, [getattr(shard, kind) for shard in self.plan.ranks])
                     for norm, x, kind in ((q_norm, q, "q_heads"), (k_norm, k, "kv_heads")))

    return [Patch(target + "__init__", __init__), Patch(target + "__call__", __call__)]


@exercise("my_full_width_norm", "02", takes="x, weight, eps, heads", patches=_norm_of,
          alone="one rank has all heads, so two to four logical ranks have judged it",
          agreed="every head is divided by the root of one mean, over all heads, with one collective; on {ranks}, an "
                 "OLMo-2 agrees with Hugging Face")
def my_full_width_norm(attempt: Attempt, setting: Setting):
    """Even and uneven heads, heads that several ranks hold, a large eps, large float16; then a small OLMo-2."""
    def check(case, dtype=torch.float32):
        tokens, dim, bounds = case
        heads = [range(*bound) for bound in bounds]
        count, eps = heads[-1].stop, 0.4 if tokens == 5 else 1e-6
        generator = torch.Generator().manual_seed(count + dim)
        x = torch.randn(tokens, count, dim, generator=generator) * (1 + torch.arange(count))[:, None]
        # In float16, a square of more than 65504 is infinite: someone who squares in x's own dtype has only zeros.
        x = (x * (1000 if dtype == torch.float16 else 1)).to(dtype)
        weight = (1 + 0.4 * torch.randn(count * dim, generator=generator)).to(dtype)
        own = [x[:, part.start:part.stop].contiguous() for part in heads]
        *others, last = (span(part, "").strip() for part in heads)
        held = f"{len(heads)} ranks with heads {', '.join(others)} and {last}: " + "in float16, " * (
            dtype == torch.float16)
        with saying(held):
            ran = on_ranks(len(heads), with_its_own, attempt, own, *(
                [each] * len(heads) for each in (weight, eps, heads)), waits="Does every rank come to the collective?")
        _judge_norm(ran, x, weight, eps, heads, held, attempt.made)

    for_each(NORMS, check, lambda case: "layouts with copies of a head" if len({*case[2]}) < len(case[2]) else
             "layouts without copies of a head")
    check(NORMS[1], torch.float16)
    try_beside_hugging_face(setting, toy_full_width(), modes=[False])


def _judge_norm(ran: list, x, weight, eps: float, heads: list[range], what: str, made: dict) -> None:
    wide, each = x.float(), weight.float().view(x.shape[1], -1)

    def cut(whole, dim: int = 1) -> list[torch.Tensor]:
        return [whole.narrow(dim, part.start, len(part)) for part in heads]

    def normed(mean, weights=each, eps=eps):
        """On all ranks, by one mean of all ``[tokens, 1, 1]`` or by one of each rank, or of each of its heads."""
        mean = mean if isinstance(mean, list) else [mean] * len(heads)
        weights = weights if isinstance(weights, list) else cut(weights, 0)
        return torch.cat([(part * torch.rsqrt(m + eps) * w).flatten() for part, m, w in zip(cut(wide), mean, weights)])

    squares = wide.pow(2)
    mean = squares.mean((1, 2), keepdim=True)
    means, sums = ([how(part) for part in cut(squares)] for how in (
        lambda part: part.mean((1, 2), keepdim=True), lambda part: part.sum((1, 2), keepdim=True)))
    total, held = sum(sums), sum(map(len, heads)) * x.shape[2]
    single = torch.tensor([sum(head in part for part in heads) == 1 for head in range(x.shape[1])])
    values = []
    for number, (value, _) in enumerate(ran):
        with saying(f"{what}on rank {number} "):
            shape = [len(x), len(heads[number]), x.shape[2]]
            values.append(tensor(value, "tokens, heads here, head_dim", shape, x.dtype))
    with saying(what):
        found = torch.cat([value.flatten() for value in values]).float()
        ways = {
            "there are only zeros: the squares do not fit into the dtype of x; compute in float32":
                torch.zeros(found.shape),
            "each rank takes the mean of its own heads: this norm has one mean, over all heads of the model":
                normed(means),
            "each head is normalised by itself, as Qwen3 has it: this norm has one mean, over all heads":
                normed([part.mean(-1, keepdim=True) for part in cut(squares)]),
            "each rank divides the sum of its own squares by the number of all: where are the sums added up?":
                normed([part / weight.numel() for part in sums]),
            "the ranks' means are averaged, and a rank with more heads counts more": normed(sum(means) / len(heads)),
            "the ranks' means are added up: a sum of means is no mean": normed(sum(means)),
            "a head that two ranks hold counts twice; a KV head is one head, wherever its copies are":
                (normed(total / weight.numel()), normed(total / held)),
            "a head that several ranks hold counts on none of them: it must count once":
                normed((squares * single[:, None]).mean((1, 2), keepdim=True)),
            "this is the sum of the squares, not their mean": (normed(mean * weight.numel()), normed(sums)),
            "eps is not added to the mean": normed(mean, eps=0.0),
            "eps is added on each rank, so the sum has it once for every rank: add it once, to the mean":
                tuple(normed(mean, eps=eps * len(heads) / by) for by in (1, weight.numel())),
            "eps stands behind the root": torch.cat([(part / (mean.sqrt() + eps) * w).flatten()
                                                     for part, w in zip(cut(wide), cut(each, 0))]),
            "the weight is missing": normed(mean, torch.ones_like(each)),
            "every rank takes the first weights there are; where do its heads begin?":
                normed(mean, [each[:len(part)] for part in heads]),
            "a rank's weights are taken from rank() * len(own heads) on, and not every rank holds as many heads: its "
            "range in heads says where it begins": normed(mean, [each[[
                (number * len(part) + i) % len(each) for i in range(len(part))]] for number, part in enumerate(heads)]),
            "1 is added to the weight, as in Gemma": normed(mean, each + 1),
            "the mean is subtracted first: that is a LayerNorm": normed(wide.var((1, 2), keepdim=True, correction=0)),
            "the root is missing: this divides by the mean of the squares": torch.cat([
                (part / (mean + eps) * w).flatten() for part, w in zip(cut(wide), cut(each, 0))]),
            "these are the numbers that went in": torch.cat([part.flatten() for part in cut(wide)]),
            "one mean is taken over all tokens; each has its own": normed(squares.mean().expand_as(mean)),
            "the mean runs over the tokens": normed([part.mean(0, keepdim=True) for part in cut(squares)])}
        within, right = 1e-2 if x.dtype == torch.float16 else 1e-4, normed(mean)
        if says := known(found, right, {"": right, **ways}, within):
            raise NotYet(says)
    for number, (value, own) in enumerate(zip(values, right.split([value.numel() for value in values]))):
        with saying(f"{what}on rank {number}, "):
            wanted = cut(squares)[number]
            first = [not any(head in other for other in heads[:number]) for head in heads[number]]
            agree(value.float(), own.view_as(value), {}, dims="token, head", within=within, made=made[number], steps={
                      f"rank {number}'s sum of squares": (wanted[:, first].sum((1, 2)), wanted.sum((1, 2))),
                      "the sum of all squares": squares.sum((1, 2)), "their mean": mean,
                      "one by the root of mean and eps": torch.rsqrt(mean + eps),
                      "the heads times that": cut(wide)[number] * torch.rsqrt(mean + eps),
                      "the weights of its heads": cut(each, 0)[number]})
    if len(ops := ran[0][1]) != 1:
        raise NotYet(f"{what}the numbers are right, with {len(ops)} collectives; one is enough: what must a rank know "
                     "of the others' heads?")

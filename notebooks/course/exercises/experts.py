"""Notebook 12: which experts a token goes to, and which of them a rank holds."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from course.exercises.heads import listed_each
from course.judge.attempt import Attempt, NotYet, for_each, kind, saying, several, tensor
from course.judge.compare import agree, right_lines
from course.judge.cuts import span
from course.judge.experts_toys import toy_experts
from course.judge.verdict import Setting, at, exercise
from course.judge.words import in_words
from tplab.align import align
from tplab.checkpoint import Checkpoint
from tplab.checks import counted, whole_number
from tplab.model.experts import softmax_then_top_k
from tplab.patch import Patch, original

# Tokens, experts, experts of a token, whether their weights are renormalised, and what is added to every logit.
ROUTES = ((5, 8, 2, True, 0), (5, 8, 2, False, 0), (4, 7, 3, False, 100), (6, 9, 4, True, -100), (1, 6, 1, False, 0))
# Experts, columns of each, ranks; dealt out both ways. What divides first, and last more ranks than parts.
SHARES = ((8, 6, 2), (8, 10, 3), (10, 13, 4), (5, 7, 4), (8, 9, 8), (4, 3, 1), (2, 8, 3), (8, 2, 3))
_IDS = [3, 1, 4, 15, 9, 26, 5, 35, 8, 9, 7]  # for a small random model


def try_beside_hugging_face(setting: Setting, toy: Checkpoint | None = None, modes=(False, True)) -> None:
    """An answer in the engine, under tensor and under expert parallelism: :class:`NotYet` where it leaves the floor.

    With the setting's model, or with ``toy``; a model without experts gives way to a small random one that has some.
    """
    # In float64 Hugging Face counts routers and norms in float32, and an answer may add up in another order.
    dtype = "float32" if setting.dtype == "float64" else setting.dtype
    given = toy is None and setting.checkpoint.config.experts is not None
    ckpt = setting.checkpoint if given else toy or toy_experts()
    for mode in modes:
        where = f"in {ckpt.name if given else 'a small random model'}, {'expert' if mode else 'tensor'} parallel: "
        try:
            report = align(ckpt, setting.ids() if given else _IDS, dtype=dtype, patches=setting.patches,
                           tensor_parallel_size=setting.tensor_parallel_size, enable_expert_parallel=mode)
        except Exception as error:  # of the learner's code on the ranks
            raise NotYet(f"{where}{in_words(error)}") from error
        setting.report = report
        if not report.ok:
            first = report.first_divergence
            raise NotYet(f"{where}the first point outside the floor is {first.name}, off by {first.relative:.1g}")


@exercise("my_router", "12", takes="logits, top_k, renormalize",
          patches=at("tplab.model.experts.softmax_then_top_k"),
          agreed="each token goes to the right experts with the right weights; on {ranks}, the model agrees with "
                 "Hugging Face")
def my_router(attempt: Attempt, setting: Setting):
    """With and without renormalising, several counts of experts, large logits, one token; in bfloat16; the engine."""
    def check(case, dtype=torch.float32):
        tokens, experts, top_k, renormalize, more = case
        generator = torch.Generator().manual_seed(experts)
        logits = (2 * torch.randn(tokens, experts, generator=generator) + more).to(dtype)
        # Of two equal logits, either one is right: such rows are left out.
        logits = logits[[len(set(row)) == experts for row in logits.tolist()]]
        head = f"{counted(len(logits), 'token')}, {experts} experts, top_k={top_k}, renormalize={renormalize}: "
        with saying(head + "in bfloat16, " * (dtype == torch.bfloat16) + f"logits around {more}, " * bool(more)):
            _judge_route(attempt(logits, top_k, renormalize), logits, top_k, renormalize, attempt.made[0])

    for_each(ROUTES, check, lambda case: f"renormalize={case[3]}")
    for renormalize in (True, False):
        check((200, 8, 2, renormalize, 0), torch.bfloat16)
    try_beside_hugging_face(setting, modes=[False])


def _judge_route(answer, logits: torch.Tensor, top_k: int, renormalize: bool, made) -> None:
    shape = [len(logits), top_k]
    weights, ids = (tensor(one, "tokens, top_k", shape) for one in several(answer, "(weights, ids)"))
    if ids.is_floating_point() and not weights.is_floating_point():
        raise NotYet("the pair is (weights, ids), and this one is turned round")
    for name, one, fits in (("ids", ids, not ids.is_floating_point() and ids.dtype != torch.bool), (
            "weights", weights, weights.dtype == torch.float32)):
        if not fits:
            must = "whole numbers" if name == "ids" else torch.float32
            raise NotYet(f"the {name} are {one.dtype}; {must} must come back")
    if weights.isnan().any() or weights.isinf().any():
        raise NotYet("there is NaN, or inf, in the weights: exp of a logit beyond 88 is more than float32 holds. A "
                     "softmax subtracts the largest logit first")
    right_weights, right_ids = softmax_then_top_k(logits, top_k, renormalize)
    _judge_choice(ids.long(), right_ids, logits, top_k, made)
    wide = logits.float()
    found, right = (torch.zeros_like(wide).scatter(1, i.long(), w.float())
                    for i, w in ((ids, weights), (right_ids, right_weights)))
    if logits.dtype == torch.bfloat16:
        if ((found - right).abs() > right * 1e-5).any():
            raise NotYet("the weights have lost digits: in which dtype is the softmax computed?")
        return
    agree(found, right, _wrong_weights(found, right, wide, renormalize),
          f"the experts are right, and their weights are not: token 0 has {_numbers(found[0])} where "
          f"{_numbers(right[0])} are right", dims="token, expert", made=made, steps={
              "the probabilities of all experts": torch.softmax(wide, -1),
              "those of the chosen": torch.softmax(wide, -1).topk(top_k).values})


def _judge_choice(ids: torch.Tensor, right: torch.Tensor, logits: torch.Tensor, top_k: int, made) -> None:
    """:class:`NotYet` unless every token goes to its experts, in whatever order."""
    count = logits.shape[1]
    if strange := [i for i in ids.flatten().tolist() if not 0 <= i < count]:
        raise NotYet(f"there is expert {strange[0]} among the ids, and they are 0 to {count - 1}")
    if ids.sort(1).values.equal(right.sort(1).values):
        return
    ways = {"those are the least likely ones: which end of the row does topk take?": (-logits).topk(top_k).indices,
            "all tokens go to the same experts; each token has a choice of its own":
                logits.float().softmax(-1).mean(0).topk(top_k).indices.expand_as(ids),
            "the numbers of experts begin at 0, not at 1": right + 1}
    why = next((says for says, one in ways.items() if one.sort(1).values.equal(ids.sort(1).values)), "")
    token = int((ids.sort(1).values != right.sort(1).values).any(1).nonzero()[0])
    twice = len(set(ids[token].tolist())) < top_k
    lines = right_lines({"the probabilities of all experts": logits.float().softmax(-1), "the result": ()}, made, 1e-4)
    raise NotYet(f"token {token} goes to experts {_listed(ids[token])}; its {top_k} largest logits are those of "
                 f"{_listed(right[token])}\n" + (why or ("one of them is there twice" if twice else lines)))


def _wrong_weights(found: torch.Tensor, right: torch.Tensor, logits: torch.Tensor, renormalize: bool) -> dict:
    """``{mistake: weights [tokens, experts], 0 where a token does not go}``."""
    there, every = right > 0, torch.softmax(logits, -1)
    kept = every * there
    divided = kept / kept.sum(-1, keepdim=True)
    ways = {"the weights of a token do not add up to 1, and renormalize asks for it" if renormalize else
            "the weights of a token add up to 1 where renormalize is False: these are probabilities among the chosen "
            "experts, and among all experts are asked for": kept if renormalize else divided,
            "these are logits; a weight is a probability, which softmax makes": logits * there,
            "these are logits, divided by their sum": logits * there / (logits * there).sum(-1, keepdim=True),
            "the weights are a sigmoid's; a softmax's are asked for":
                (torch.sigmoid(logits) * there,
                 torch.sigmoid(logits) * there / (torch.sigmoid(logits) * there).sum(-1, keepdim=True)),
            "the softmax runs over the tokens: which numbers must add up to 1?":
                (torch.softmax(logits, 0) * there,
                 torch.softmax(logits, 0) * there / (torch.softmax(logits, 0) * there).sum(-1, keepdim=True)),
            "all experts of a token weigh the same": there / there.sum(-1, keepdim=True),
            "every weight is 1": there.float(),
            "the weights are divided by the largest of them, where their sum is asked for":
                kept / kept.amax(-1, keepdim=True),
            "the weights of all tokens together add up to 1, where those of each token should": kept / kept.sum(),
            "the softmax is there twice": (torch.softmax(every, -1) * there, torch.softmax(kept.masked_fill(
                ~there, float("-inf")), -1), torch.softmax(divided.masked_fill(~there, float("-inf")), -1)),
            "these are logarithms of the weights": torch.log_softmax(logits, -1) * there,
            "the weights are divided by their number": kept / there.sum(-1, keepdim=True)}
    if found.sort(1).values.allclose(right.sort(1).values, atol=1e-5):
        ways["the right weights, in another order than the ids"] = found
    return ways


def _numbers(row: torch.Tensor) -> str:
    return ", ".join(f"{value:.3f}" for value in row.tolist() if value)


def _listed(ids: torch.Tensor) -> str:
    *first, last = sorted(ids.tolist())
    return f"{', '.join(map(str, first))} and {last}" if first else f"{last}"


def _dealt_so(deal: Callable) -> list[Patch]:
    """The engine's plan with the experts as a learner's function deals them out."""
    target = "tplab.shard.plan.ShardPlan.from_config"

    def from_config(cls, config, tensor_parallel_size, *, enable_expert_parallel=False):
        plan = original(target)(cls, config, tensor_parallel_size, enable_expert_parallel=enable_expert_parallel)
        if not config.experts:
            return plan
        dealt = deal(plan.num_experts, plan.expert_intermediate_size, tensor_parallel_size, enable_expert_parallel)
        ranks = [replace(shard, experts=range(held[0], held[-1] + 1), expert_mlp=range(columns[0], columns[-1] + 1))
                 for shard, (held, columns) in zip(plan.ranks, dealt)]
        return replace(plan, ranks=tuple(ranks))

    return [Patch(target, from_config)]


@exercise("my_expert_share", "12", takes="num_experts, intermediate_size, tensor_parallel_size, enable_expert_parallel",
          patches=_dealt_so,
          alone="one rank has no choice, so layouts on up to eight ranks have judged it",
          agreed="every column of every expert has its owner, and dealt out like this, both ways, a model agrees with "
                 "Hugging Face on {ranks}")
def my_expert_share(attempt: Attempt, setting: Setting):
    """Layouts that divide and that do not, both ways of dealing out; then a model, dealt out so."""
    for experts, columns, size in SHARES:
        for whole in (False, True):
            _judge_share(attempt, experts, columns, size, whole)
    moe = setting.checkpoint.config.experts
    if moe:
        for whole in (False, True):
            _judge_share(attempt, moe.num_experts, moe.intermediate_size, setting.tensor_parallel_size, whole)
    try_beside_hugging_face(setting)


def _judge_share(attempt: Attempt, experts: int, columns: int, size: int, whole: bool) -> None:
    with saying(f"{experts} experts of {columns} columns, {counted(size, 'rank')}, "
                f"enable_expert_parallel={whole}: "):
        answer = attempt(experts, columns, size, whole)
        if not isinstance(answer, list | tuple) or len(answer) != size:
            raise NotYet(f"it returns {kind(answer)}; a list of {size} must come back, with (experts, columns) for "
                         "each rank")
        if isinstance(answer, tuple) and all(isinstance(part, range) for part in answer):
            raise NotYet("one pair of ranges comes back; a list with such a pair for each rank must")
        shares = [_share(entry, rank) for rank, entry in enumerate(answer)]
        _judge_shares(shares, experts, columns, whole)


def _share(entry, rank: int) -> tuple[list[int], list[int]]:
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        raise NotYet(f"rank {rank} gets {kind(entry)}; a pair must come back for it, (experts, columns)")
    for part in entry:
        if not isinstance(part, list | tuple | range) or len(part) > 1000 or any(whole_number(i) is None for i in part):
            raise NotYet(f"rank {rank} gets {kind(part)} in its pair; which experts and which columns, not how many: "
                         "two ranges or lists of whole numbers")
    return listed_each(entry, rank)


def _judge_shares(shares: list[tuple[list[int], list[int]]], experts: int, columns: int, whole: bool) -> None:
    """``shares``: of each rank the experts, and the columns of each of them that it holds."""
    if not _owned(shares, experts, columns) and _owned([(c, e) for e, c in shares], experts, columns):
        raise NotYet("the pair is (experts, columns), and this one is turned round")
    for rank, share in enumerate(shares):
        for name, held, there in zip(("expert", "column"), share, (experts, columns)):
            if not held and len(shares) <= there:
                raise NotYet(f"rank {rank} holds no {name}: {_counts(shares)}. Can they be dealt out more evenly?")
            if any(not 0 <= i < there for i in held):
                raise NotYet(f"rank {rank} holds {span(held, name + 's' * (len(held) > 1))}, and they are 0 to "
                             f"{there - 1}")
            if held and held != list(range(held[0], held[0] + len(held))):
                raise NotYet(f"rank {rank} holds {span(held, name + 's')}: a rank reads one slice of the file, so its "
                             f"{name}s follow each other")
    dealt = [len({tuple(share[which]) for share in shares if all(share)}) > 1 for which in (0, 1)]  # experts, columns
    if dealt == [not whole, whole]:
        raise NotYet("each expert is cut, where whole experts are to be dealt out" if whole else
                     "whole experts are dealt out, where a part of each expert is asked for")
    if all(dealt):
        raise NotYet("both are dealt out, experts and columns, so most of the matrices are on no rank: a rank that "
                     f"holds {'an expert holds all its columns' if whole else 'a column holds it of every expert'}")
    judge_parts([share[not whole] for share in shares], experts if whole else columns, "expert" if whole else "column")
    if any(len(share[whole]) < (columns if whole else experts) for share in shares if share[not whole]):
        raise NotYet("a rank that holds an expert whole holds all its columns" if whole else
                     "a rank that holds a column holds it of every expert")


def judge_parts(parts: Sequence[Sequence[int]], there: int, name: str) -> None:
    """:class:`NotYet` unless of the numbers 0 to ``there``, dealt out, each is on one rank, in order, evenly."""
    for rank, part in enumerate(parts):
        if strange := [i for i in (*part[:1], *part[-1:]) if not 0 <= i < there]:
            raise NotYet(f"rank {rank} holds {name} {strange[0]}, and they are 0 to {there - 1}")
    if len(parts) > 1 and all(list(part) == list(range(len(part))) for part in parts):
        raise NotYet(f"every rank begins with {name} 0: they are counted in the whole model, and where does the second "
                     "rank's part begin?")
    owners = {i: [rank for rank, part in enumerate(parts) if i in part] for i in range(there)}
    if lost := [i for i, by in owners.items() if not by]:
        left_over = sum(map(len, parts)) == len(parts) * (there // len(parts))
        raise NotYet(f"{span(lost, name + 's' * (len(lost) > 1))} on no rank: " + (
            "which rank takes what is left over?" if left_over else
            "where does each rank's part begin, and where does it end?"))
    if twice := [i for i, by in owners.items() if len(by) > 1]:
        one, other, *_ = owners[twice[0]]
        raise NotYet(f"{name} {twice[0]} is on ranks {one} and {other}: what both compute is in the sum twice")
    if (firsts := [part[0] for part in parts if part]) != sorted(firsts):
        raise NotYet(f"the ranks' {name}s are not in the order of the ranks")
    counts = [len(part) for part in parts]
    if max(counts) - min(counts) > 1:
        raise NotYet(f"{'/'.join(map(str, counts))} {name}s on the ranks; all ranks wait for the largest part. Can "
                     "they be dealt out more evenly?")


def _owned(shares, experts: int, columns: int) -> bool:
    """Whether every column of every expert is on just one rank."""
    cells = [(e, c) for es, cs in shares for e in es for c in cs]
    return sorted(cells) == [(e, c) for e in range(experts) for c in range(columns)]


def _counts(shares) -> str:
    return (f"{'/'.join(str(len(e)) for e, _ in shares)} experts of {'/'.join(str(len(c)) for _, c in shares)} columns "
            "on the ranks")

"""Mistakes of sums: of which tensors, and how many times each, something is the sum."""

from dataclasses import replace

import torch
from torch.nn import functional as F

from tplab.align.diagnose.altered import At, explains, in_calls, ratio, several_ranks, unaltered
from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.table import Family, Mistake, procedure
from tplab.shard import split_evenly

# what else may have been taken into a sum
_OTHERS = {"residual": ("input_norm",), "output": ("post_norm", "before", "o_proj")}
_SAYS = {"before": "the layer's input", "input_norm": "the normalized input", "o_proj": "attention's output",
         "residual": "the residual stream", "post_norm": "the normalized residual stream", "mlp": "the MLP's output"}


def _multiples(case: Case, rank: int, tensors: list[torch.Tensor]) -> list[float] | None:
    """How many times each of these tensors a rank's holds as a sum, at best; None where one is not finite."""
    columns = torch.stack([case.looked_at(x).double().flatten() for x in tensors], 1)
    held = case.looked_at(case.shard(case.point, rank)).double().flatten()
    if not torch.isfinite(columns).all() or not torch.isfinite(held).all():
        return None
    return torch.linalg.lstsq(columns, held[:, None]).solution.flatten().tolist()


@procedure("residual", "output", names="residual_missing sublayer_missing residual_wrong_place parallel_sublayers "
                                       "residual_on_every_rank all_reduce_twice embedding_scale")
def another_sum(case: Case) -> Diagnosis | None:
    """Is it another sum of the tensors at hand, each taken a whole number of times? Into the first layer, the stream
    may come multiplied with any number."""
    stream, branch = case.made_from(case.op)
    at, tp = unaltered(case, case.wrong_ranks[0]), case.plan.tensor_parallel_size
    found = []
    for other in (None, *_OTHERS[case.op]) if case.op == case.point else ():
        names = [name for name in (stream, branch, other) if name]
        if (solved := _multiples(case, at.rank, list(map(at, names)))) is None:
            return None
        times = {name: float(round(n)) for name, n in zip(names, solved)}
        first = (case.op, case.layer, other, times[branch]) == ("residual", "layers.0", None, 1)
        scaled = first and (times[stream] not in (0, 1, tp) or abs(solved[0] - times[stream]) > 1e-3)
        if scaled:
            times[stream] = ratio(*map(case.looked_at, (at.held() - at(branch), at(stream))))
        if (times[stream], times[branch]) == (1, 1) and not other or (other and not times[other]) or not any(
                times.values()):
            continue
        if explains(case, lambda at, times=times: sum(n * at(name) for name, n in times.items() if n)):
            alike = ("embedding_scale",) * (first and not scaled)  # one may be scaled by 0 or by this, too
            found.append((sum(map(abs, times.values())), len(found), other, times, scaled, alike))
    if not found:
        return None
    _, _, other, times, scaled, alike = min(found)  # what is made of the fewest
    said = " + ".join(f"{n:.5g} × {_SAYS[name]}" if n != 1 else _SAYS[name] for name, n in times.items() if n)
    fault = ("embedding_scale" if scaled else
             "residual_missing" if not times[stream] and not other else
             "sublayer_missing" if not times[branch] else
             "residual_wrong_place" if other and not times[stream] else
             "parallel_sublayers" if other == "o_proj" and set(times.values()) == {1} else
             "residual_on_every_rank" if times[stream] == tp > 1 and times[branch] == 1 and not other else
             "all_reduce_twice" if times[branch] == tp > 1 and times[stream] == 1 and not other else None)
    more = (": the embeddings were multiplied with a number (Gemma does that, with the root of its hidden size, here "
            f"{case.config.hidden_size ** 0.5:.5g}); this model does not") * scaled
    return case.diagnosis(fault, f"{case.first.name} is {said}; right is {_SAYS[stream]} + {_SAYS[branch]}{more}.",
                          *alike, **({"times": times[stream]} if scaled else times))


@procedure("o_partial", "mlp_partial", names="all_reduce_missing all_reduce_dropped")
def reduced_in_some_calls(case: Case) -> Diagnosis | None:
    """Is it the sum of all ranks already, in some rows, and each rank's own summand in the others?"""
    if case.scope is None or case.op != case.point or not several_ranks(case):
        return None
    if explains(case, lambda at: sum(unaltered(case, rank).expected() for rank in case.frame.ranks)):
        words = next((other.words for other in case.scopes() if torch.equal(other.rows, ~case.scope)),
                     "in the other rows only")
        found = case.diagnosis("all_reduce_missing", f"{case.op} is the sum of all ranks' summands in some rows, and "
                               f"each rank's own summand in the others: the all-reduce is missing {words}.",
                               "all_reduce_dropped")
        return replace(found, scope=words)


@procedure("o_proj", "mlp", names="all_reduce_missing all_reduce_dropped read_before_wait")
def not_reduced(case: Case) -> Diagnosis | None:
    """Does each rank go on with its own summand, and does its op log know of a reduce?"""
    partial, tp = case.made_from(case.op)[0], case.recording.world_size
    if all(map(torch.equal, case.shards(partial), case.shards(case.op))) if case.op == case.point and case.has(
            partial) else tp > 1 and explains(case, lambda at: at(partial)):
        done = min((sum(record.op == "all_reduce" for record in log) for log in case.report.op_logs), default=0)
        wanted = 1 + 2 * case.config.num_layers
        if not case.report.op_logs:
            names = "all_reduce_missing", "all_reduce_dropped", "read_before_wait"
            says = "nothing was reduced, or the result was thrown away, or read too early"
        elif done < wanted:
            names, says = ("all_reduce_missing",), f"of {wanted} all-reduces in a forward pass the op log shows {done}"
        elif any(record.started for log in case.report.op_logs for record in log):
            names = ("read_before_wait",)
            says = "the op log shows every all-reduce; some were started and read before their wait"
        else:
            names = ("all_reduce_dropped",)
            says = "the op log shows every all-reduce: the sums were made and thrown away"
        return case.diagnosis(names[0], f"After the reduce each rank still has its own summand; the {tp} summands add "
                              f"up to the right result, and {says}.", *names[1:], spread=case.first.spread,
                              wanted=wanted, done=done)


def _multiplied(name: str, says: str, numbers: str, times) -> Mistake:
    """The right sum, ``times(ranks)`` times."""
    def on_ranks(case: Case) -> dict[tuple[int, float], str]:
        tp, wrong = case.recording.world_size, case.wrong_ranks
        where = "every rank" if len(wrong) == tp else (
            f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, wrong))} only")
        return {(tp, times(tp)): where} if tp > 1 else {}
    return Mistake(name, "{op} is " + says + ".", lambda at, value: value[1] * at.expected(), on_ranks, numbers=numbers)


@procedure("o_proj", "mlp", names="all_reduce_subset")
def another_sum_of_the_parts(case: Case) -> Diagnosis | None:
    """How many times does each rank's summand stand in each rank's result?"""
    ranks, tp, found = case.frame.ranks, case.recording.world_size, []
    if tp == 1 or case.op != case.point:
        return None
    parts = [unaltered(case, rank)(case.made_from(case.op)[0]) for rank in ranks]
    for rank in ranks:
        if (solved := _multiples(case, rank, parts)) is None:
            return None
        found.append([round(n * tp) / tp for n in solved])
        if not case.fits(case.shard(case.point, rank), sum(n * part for n, part in zip(found[-1], parts))):
            return None
    every = torch.tensor(found)
    if bool((every == 1).all() or (every == 0).all(1).any()) or torch.equal(every, torch.eye(tp)):
        return None
    rank = int((every != 1).any(1).nonzero()[0])
    if bool(((every == 0) | (every == 1)).all()):
        added = every[rank].nonzero().flatten().tolist()
        return case.diagnosis("all_reduce_subset", f"On rank {rank}, {case.first.name} is the sum of the summands of "
                              f"the ranks {added} only; all {tp} belong to it.", rank=rank)
    said = " + ".join(f"{n:g} × rank {r}'s" for r, n in enumerate(found[rank]) if n)
    return case.diagnosis(None, f"On rank {rank}, {case.first.name} is another sum of the ranks' summands than it "
                          f"should be: {said}.", rank=rank)


def _reused(at: At, dim: int) -> torch.Tensor:
    """The first half of the numbers (or of a call's rows) with the second half's in its place."""
    def reused(x):
        half = -(-x.shape[dim] // 2)
        first, second = x.split([half, x.shape[dim] - half], dim)
        return torch.cat([second, first.narrow(dim, second.shape[dim], half - second.shape[dim]), second], dim)
    return in_calls(at.case, at.expected(), reused)


def _scattered(at: At, by: int) -> torch.Tensor:
    """A call's rows, dealt out over the ranks after a wrong cut (0), or joined in other places."""
    case, ranks = at.case, at.frame.ranks

    def cut(x):
        return x.split([len(part) for part in split_evenly(len(x), len(ranks))])

    def added(x):
        own = [cut(x[:, rank])[rank] for rank in ranks]
        whole = sum(F.pad(part, (0, 0, 0, len(own[0]) - len(part))) for part in own)
        return torch.cat([whole[:len(part)] for part in own])[:, None].expand_as(x)
    if by:
        return in_calls(case, at.expected(), lambda x: torch.cat([*cut(x)[by:], *cut(x)[:by]]))
    summands = torch.stack([unaltered(case, rank)(case.made_from(at.op)[0]) for rank in ranks], 1)
    return in_calls(case, summands, added)[:, 0]


RESIDUALS = (
    Family(("residual", "output"), Mistake(
        "residual_unscaled", "What the sublayer put out was added as it is; this model multiplies it with "
        "{c.residual_multiplier:g} first.", {"times": 1.0}, when=lambda case: case.config.residual_multiplier != 1)),
    another_sum)
REDUCTIONS = (
    reduced_in_some_calls,
    not_reduced,
    Family(("o_proj", "mlp"), _multiplied(
        "all_reduce_average", "1/{tp} of the right one on {text}: the summands were averaged, not added", "ranks",
        lambda tp: 1 / tp), _multiplied(
        "all_reduce_twice", "{tp} times the right one on {text}: it was reduced twice, or every rank's summand was the "
        "whole already", "times", lambda tp: tp)),
    another_sum_of_the_parts,
    Family(("o_proj", "mlp"), Mistake(
        "buffer_reused", "In {op}, the first half {text} is the sum of the second half: both went through one buffer, "
        "which took the second part while the first one's sum was under way.", _reused,
        {1: "of the numbers", 0: "of the rows"}), Mistake(
        "wrong_rows_scattered", "{op} was scattered over the ranks and joined again, and each rank's rows are {text}.",
        _scattered, {0: "sums of different tokens: each rank cut out its own rows before they were added up",
                     1: "those of the next rank", -1: "those of the rank before it"}, when=several_ranks)))

"""Hypotheses about partial sums and all-reduces."""

from dataclasses import replace

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import LINEAR, best, explains, has_bias, linear, right, vector


@hypothesis("o_partial", "mlp_partial")
def bias_on_every_rank(case: Case) -> Diagnosis | None:
    """Is the sum too large by a constant, and is that constant the bias, tp - 1 times?"""
    module, times = LINEAR[case.op][0], case.recording.world_size - 1
    if times and has_bias(case, case.op) and explains(case, lambda at, op: linear(
            at, op, bias=0 * vector(case, op)) + vector(case, op)):
        return case.diagnosis("row_bias_everywhere", "The sum of the ranks' parts is too large by the same vector for "
                              f"every token: {times:.2f} times the bias of {module}. It belongs to the sum, so one "
                              "rank adds it.", times=times)


@hypothesis("o_partial", "mlp_partial")
def reduced_in_some_calls(case: Case) -> Diagnosis | None:
    """Is it the sum of all ranks already, in some rows, and each rank's own summand in the others?"""
    if case.scope is None or case.op != case.point:
        return None
    parts = [right(case, rank).expected(case.op) for rank in range(case.recording.world_size)]
    if len(parts) > 1 and explains(case, lambda at, op: sum(parts[1:], parts[0])):
        words = next((other.words for other in case.scopes() if torch.equal(other.rows, ~case.scope)),
                     "in the other rows only")
        found = case.diagnosis("all_reduce_missing", f"{case.op} is the sum of all ranks' summands in some rows, and "
                               f"each rank's own summand in the others: the all-reduce is missing {words}.",
                               "all_reduce_dropped")
        return replace(found, scope=words)


@hypothesis("o_proj", "mlp")
def not_reduced(case: Case) -> Diagnosis | None:
    """Does each rank go on with its own summand, and does its op log know of a reduce?"""
    partial, tp = {"o_proj": "o_partial", "mlp": "mlp_partial"}[case.op], case.recording.world_size
    if all(map(torch.equal, case.shards(partial), case.shards(case.op))) if case.op == case.point and case.has(
            partial) else tp > 1 and explains(case, lambda at, op: at(partial)):
        done = [sum(record.op == "all_reduce" for record in log) for log in case.report.op_logs]
        wanted = 1 + 2 * case.config.num_layers
        dropped = bool(done) and min(done) >= wanted
        says = ("the op log shows every all-reduce: the sums were made and thrown away" if dropped else
                f"of {wanted} all-reduces in a forward pass the op log shows {min(done)}" if done else
                "nothing was reduced, or the result was thrown away")
        names = ("all_reduce_dropped",) if dropped else ("all_reduce_missing",) + ("all_reduce_dropped",) * (not done)
        return case.diagnosis(names[0], f"After the reduce each rank still has its own summand; the {tp} summands add "
                              f"up to the right result, and {says}.", *names[1:], spread=case.first.spread,
                              wanted=wanted, done=min(done, default=0))


@hypothesis("o_proj", "mlp")
def another_sum_of_the_parts(case: Case) -> Diagnosis | None:
    """How many times does each rank's summand stand in each rank's result?"""
    tp = case.recording.world_size
    if case.op != case.point:  # the sum itself was not recorded
        return _averaged_or_twice(case, tp)
    parts = [right(case, rank)(f"{case.op.removesuffix('_proj')}_partial") for rank in range(tp)]
    columns, found = torch.stack([part.double().flatten() for part in parts], 1), []
    for held in case.shards(case.point):
        if tp == 1 or not torch.isfinite(held).all() or not torch.isfinite(columns).all():
            return None
        times = torch.linalg.lstsq(columns, held.double().flatten()[:, None]).solution.flatten()
        found.append((times * tp).round() / tp)
    if any(not case.fits(held, sum(n * part for n, part in zip(times.tolist(), parts)))
           for held, times in zip(case.shards(case.point), found)):
        return None
    every = torch.stack(found)
    if bool((every == 1).all() or (every == 0).all(1).any()) or torch.equal(every, torch.eye(tp, dtype=every.dtype)):
        return None
    name = case.first.name
    if bool((every == 1 / tp).all()):
        return _times(case, 1 / tp)
    if bool((every == tp).all()):
        return _times(case, tp)
    if bool(((every == 0) | (every == 1)).all()):
        rank = int((every != 1).any(1).nonzero()[0])
        added = every[rank].nonzero().flatten().tolist()
        return case.diagnosis("all_reduce_subset", f"On rank {rank}, {name} is the sum of the summands of the ranks "
                              f"{added} only; all {tp} belong to it.", rank=rank)
    rank = int((every != 1).any(1).nonzero()[0])
    said = " + ".join(f"{n:g} × rank {r}'s" for r, n in enumerate(every[rank].tolist()) if n)
    return case.diagnosis(None, f"On rank {rank}, {name} is another sum of the ranks' summands than it should be: "
                          f"{said or 'none of them'}.", rank=rank)


def _averaged_or_twice(case: Case, tp: int) -> Diagnosis | None:
    times = best(case, {n: lambda at, op, n=n: n * right(case, at.rank)(op) for n in (1 / tp, tp)}) if tp > 1 else None
    return times and _times(case, times)


def _times(case: Case, times: float) -> Diagnosis:
    """The right sum, so many times."""
    tp = case.recording.world_size
    if times < 1:
        return case.diagnosis("all_reduce_average", f"{case.op} is 1/{tp} of the right one on every rank: the summands "
                              "were averaged, not added.", ranks=tp)
    return case.diagnosis("all_reduce_twice", f"{case.op} is {tp} times the right one on every rank: it was reduced "
                          "twice, or every rank's summand was the whole already.", times=tp)

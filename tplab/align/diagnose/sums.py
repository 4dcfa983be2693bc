"""Hypotheses about partial sums and all-reduces."""

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis


@hypothesis("o_partial", "mlp_partial")
def bias_on_every_rank(case: Case) -> Diagnosis | None:
    """Is the sum too large by a constant, and is that constant the bias, tp - 1 times?"""
    module, tp = {"o_partial": "self_attn.o_proj", "mlp_partial": "mlp.down_proj"}[case.point], len(case.plan.ranks)
    if tp == 1 or f"model.{case.layer}.{module}.bias" not in case.checkpoint.tensors:
        return None
    ours, right, bias = case.ours(case.point), case.reference(case.point), case.weight(f"{module}.bias")
    times = ((ours - right) @ bias / (bias @ bias)).mean().item()
    if case.fits(right + (tp - 1) * bias, ours):
        return case.diagnosis("row_bias_everywhere", "The sum of the ranks' parts is too large by the same vector for "
                              f"every token: {times:.2f} times the bias of {module}. It belongs to the sum, so one "
                              "rank adds it.", times=times)


@hypothesis("o_proj", "mlp")
def not_reduced(case: Case) -> Diagnosis | None:
    """Does each rank go on with its own summand, and does its op log know of a reduce?"""
    parts, sums = case.shards({"o_proj": "o_partial", "mlp": "mlp_partial"}[case.point]), case.shards(case.point)
    tp = len(parts)
    if all(torch.equal(part, total) for part, total in zip(parts, sums, strict=True)):
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
    if all(case.fits(total * tp, case.reference(case.point)) for total in sums):
        return case.diagnosis(None, f"The result is 1/{tp} of the right one on every rank: the summands were averaged, "
                              "not added.", ranks=tp)

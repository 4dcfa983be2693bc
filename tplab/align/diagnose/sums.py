"""Hypotheses about partial sums and all-reduces."""

import torch

from tplab.align.diagnose.case import Case, Diagnosis

_MODULES = {"o_partial": "self_attn.o_proj", "mlp_partial": "mlp.down_proj"}
_PARTIALS = {"o_proj": "o_partial", "mlp": "mlp_partial"}


def bias_on_every_rank(case: Case) -> Diagnosis | None:
    """Is the sum too large by a constant, and is that constant the bias, tp - 1 times?"""
    excess = case.ours(case.at) - case.right(case.at)
    module, tp = _MODULES[case.at], case.plan.tensor_parallel_size
    if tp == 1 or f"model.{case.layer}.{module}.bias" not in case.checkpoint.tensors:
        return None
    bias = case.tensor(f"{module}.bias")
    times = (excess @ bias / (bias @ bias)).mean().item()
    if case.fits(case.right(case.at) + (tp - 1) * bias, case.ours(case.at)):
        return case.found("row_bias_everywhere",
                          f"The sum of the ranks' parts is too large by the same vector for every "
                          f"token: {times:.2f} times the bias of {module}. It belongs to the sum, so one rank adds it.",
                          times=times)
    return None


def not_reduced(case: Case) -> Diagnosis | None:
    """Does each rank go on with its own summand, and does its op log know of a reduce?"""
    parts, sums = case.shards(_PARTIALS[case.at]), case.shards(case.at)
    tp = len(parts)
    if all(torch.equal(part, total) for part, total in zip(parts, sums, strict=True)):
        done = [sum(record.op == "all_reduce" for record in log) for log in case.report.op_logs]
        wanted = 1 + 2 * case.config.num_layers
        dropped = bool(done) and min(done) >= wanted
        says = ("the op log shows every all-reduce: the sums were made and thrown away" if dropped else
                f"of {wanted} all-reduces in a forward pass the op log shows {min(done)}" if done else
                "nothing was reduced, or the result was thrown away")
        names = ("all_reduce_dropped",) if dropped else ("all_reduce_missing",) + ("all_reduce_dropped",) * (not done)
        return case.found(names[0],
                          f"After the reduce each rank still has its own summand; the {tp} summands add up to "
                          f"the right result, and {says}.", *names[1:], spread=case.first.spread, wanted=wanted,
                          done=min(done, default=0))
    if all(case.fits(total * tp, case.right(case.at)) for total in sums):
        return case.found(None, f"The result is 1/{tp} of the right one on every rank: the summands were averaged, not "
                          "added.", ranks=tp)
    return None


HYPOTHESES = {
    "o_partial": (bias_on_every_rank,), "mlp_partial": (bias_on_every_rank,),
    "o_proj": (not_reduced,), "mlp": (not_reduced,),
}

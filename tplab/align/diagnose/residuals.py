"""Hypotheses about the residual stream: of which tensors, and how many times each, is it the sum?"""

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import explains, right

# point → what it is the sum of; what else may have been taken
_SUMS = {"residual": (("before", "o_proj"), ("input_norm",)),
         "output": (("residual", "mlp"), ("post_norm", "before", "o_proj"))}
_SAYS = {"before": "the layer's input", "input_norm": "the normalized input", "o_proj": "attention's output",
         "residual": "the residual stream", "post_norm": "the normalized residual stream", "mlp": "the MLP's output"}


@hypothesis(*_SUMS)
def another_sum(case: Case) -> Diagnosis | None:
    """Is it another sum of the tensors at hand, each taken a whole number of times?"""
    (stream, branch), others = _SUMS[case.op]
    rank, tp = case.wrong_ranks[0], case.plan.tensor_parallel_size
    ours = case.shard(case.point, rank).double().flatten()
    if case.op != case.point or not torch.isfinite(ours).all():
        return None
    for other in (None, *others):
        names = [name for name in (stream, branch, other) if name]
        columns = torch.stack([right(case, rank)(name).double().flatten() for name in names], 1)
        if not torch.isfinite(columns).all():
            return None
        times = dict(zip(names, torch.linalg.lstsq(columns, ours[:, None]).solution.flatten().round().tolist()))
        if (times[stream], times[branch]) == (1, 1) and not other or (other and not times[other]) or not any(
                times.values()):
            continue
        if (case.op, case.layer) == ("residual", "layers.0") and times[stream] not in (0, 1, tp) and times[branch] == 1:
            return None  # rather a number that is not whole: see below
        if not explains(case, lambda at, op, times=times: sum(n * at(name) for name, n in times.items() if n)):
            continue
        said = " + ".join(f"{n:g} × {_SAYS[name]}" if n != 1 else _SAYS[name] for name, n in times.items() if n)
        fault = ("residual_missing" if not times[stream] and not other else
                 "sublayer_missing" if not times[branch] else
                 "residual_wrong_place" if other and not times[stream] else
                 "parallel_sublayers" if other == "o_proj" and set(times.values()) == {1} else
                 "residual_on_every_rank" if times[stream] == tp > 1 and times[branch] == 1 else
                 "all_reduce_twice" if times[branch] == tp > 1 and times[stream] == 1 and not other else None)
        return case.diagnosis(fault, f"{case.first.name} is {said}; right is {_SAYS[stream]} + {_SAYS[branch]}.",
                              **times)


@hypothesis("residual")
def scaled_behind_the_embedding(case: Case) -> Diagnosis | None:
    """Were the embeddings multiplied with a number before they entered the first layer?"""
    ours, stream = (x.double() for x in (case.shard("residual", 0), right(case, 0)("before")))
    if case.op != case.point or case.layer != "layers.0" or not torch.isfinite(ours).all():
        return None
    times = (((ours - right(case, 0)("o_proj")) * stream).sum() / (stream * stream).sum()).item()
    if explains(case, lambda at, op: times * at("before") + at("o_proj")):
        return case.diagnosis("embedding_scale", f"{case.first.name} is {times:.5g} × {_SAYS['before']} + "
                              f"{_SAYS['o_proj']}: the embeddings were multiplied with a number (Gemma does that, with "
                              f"the root of its hidden size, here {case.config.hidden_size ** 0.5:.5g}); this model "
                              "does not.", times=times)

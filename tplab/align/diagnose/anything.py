"""Hypotheses about any point at all: rows of other tokens, too few digits; and what can be said of an unknown one."""

import torch

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import best, coarser, distance, explains, right, rounded
from tplab.align.points import LAYER_POINTS

_POINTS = ("embed", *LAYER_POINTS, "norm", "logits")


@hypothesis(*_POINTS)
def rows_of_other_tokens(case: Case) -> Diagnosis | None:
    """Is each row what belongs to the token before or behind?"""
    if case.op != case.point or len(case.positions) < 3:
        return None

    def shifted(at, op, shift, lengths):
        return torch.cat([part.roll(shift, 0) for part in right(case, at.rank)(op).split(lengths)])
    found = best(case, {(shift, len(lengths)): lambda at, op, shift=shift, lengths=lengths: shifted(
        at, op, shift, lengths) for shift in (1, -1) for lengths in ([len(case.positions)], case.lengths)})
    if found:
        return case.diagnosis("ids_shifted" if case.point == "embed" else "rows_shifted", f"Each row of "
                              f"{case.first.name} is right for the token {'before' if found[0] > 0 else 'behind'} it.",
                              shift=found[0])


@hypothesis(*_POINTS)
def too_few_digits(case: Case) -> Diagnosis | None:
    """Does it have the digits of a smaller dtype only, or does what it is made of?"""
    for dtype in coarser(case):
        name = str(dtype).removeprefix("torch.")
        if case.op != case.point:  # it was not recorded
            if explains(case, lambda at, op, dtype=dtype: rounded(at.expected(op), dtype)):
                return case.diagnosis("low_precision", f"{case.first.name} fits {case.op} in {name}: it was computed, "
                                      "or passed on, with so few digits.")
            continue
        some = [(case.shard(case.point, rank), right(case, rank)(case.point)) for rank in case.wrong_ranks]
        if some and all(torch.equal(rounded(held, dtype), held) and held.any()
                        and distance(held, should) < 4 * torch.finfo(dtype).eps for held, should in some):
            return case.diagnosis("low_precision", f"{case.first.name} is right as far as {name} goes, and every "
                                  f"number of it is one of {name}'s: it was computed, or passed on, in {name}.")


def traits(case: Case) -> list[str]:
    """What can be said of a difference that nothing explains: whose it is, where it begins, a multiple of what."""
    ranks, said, tp = case.wrong_ranks, [], case.recording.world_size
    if ranks and len(ranks) < tp:
        said.append(f"only on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {tp}")
    pairs = [(case.shard(case.point, rank).double(), right(case, rank)(case.point).double()) for rank in ranks]
    if not pairs or any(held.shape != should.shape or not torch.isfinite(held).all() for held, should in pairs):
        return said
    ours, theirs = (torch.cat([x.flatten() for x in side]) for side in zip(*pairs))
    times = ((ours * theirs).sum() / (theirs * theirs).sum().clamp(min=1e-30)).item()
    if not ours.any():
        said.append("it is all zeros")
    elif all(distance(held, times * should) <= case.tolerance for held, should in pairs):
        said.append(f"it is {times:.6g} times what it should be")
    else:
        likeness = (ours @ theirs / (ours.norm() * theirs.norm()).clamp(min=1e-30)).item()
        said.append(f"its correlation with what it should be is {likeness:z.2f}")
    off = torch.stack([((held - should).abs() > case.tolerance * should.abs().max()).flatten(1).any(1)
                       for held, should in pairs]).any(0)
    if len(off) == len(case.places) and not off.all() and off.any():
        first = int(off.nonzero()[0])
        said.append(f"{int(off.sum())} of {len(off)} rows are off, the first at position {case.places[first][1]} of "
                    f"sequence {case.places[first][0]}")
    for held, should in pairs[:1]:
        if held.dim() == 3 and held.shape[1] > 1:
            heads = ((held - should).abs() > case.tolerance * should.abs().max()).amax((0, 2)).nonzero().flatten()
            if 0 < len(heads) < held.shape[1]:
                own = right(case, ranks[0]).indices(case.point)
                said.append(f"on rank {ranks[0]} only the heads {', '.join(str(own[h]) for h in heads.tolist())}")
    return said

"""What can be said of a difference that nothing explains."""

import torch

from tplab.align.diagnose.case import Case
from tplab.align.diagnose.wrong import distance, right


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

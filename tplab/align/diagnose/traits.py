"""What can be said of a difference that nothing explains."""

import torch

from tplab.align.diagnose.altered import distance, likeness, ratio
from tplab.align.diagnose.case import Case


def traits(case: Case) -> list[str]:
    """What can be said of a difference that nothing explains: whose it is, where it begins, a multiple of what."""
    ranks, said, tp = case.wrong_ranks, [], case.recording.world_size
    if ranks and len(ranks) < tp:
        said.append(f"only on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {tp}")
    pairs = [(case.shard(case.point, rank).double(), case.expected(rank).double()) for rank in ranks]
    if not pairs or any(held.shape != should.shape or not torch.isfinite(held).all() for held, should in pairs):
        return said
    ours, theirs = (torch.cat([x.flatten() for x in side]) for side in zip(*pairs))
    times = ratio(ours, theirs)
    if not ours.any():
        said.append("it is all zeros")
    elif all(distance(held, times * should) <= case.tolerance for held, should in pairs):
        said.append(f"it is {times:.6g} times what it should be")
    else:
        said.append(f"its correlation with what it should be is {likeness(ours, theirs):z.2f}")
    wrong = [(held - should).abs() > case.tolerance * should.abs().max() for held, should in pairs]
    rows = torch.stack([off.flatten(1).any(1) for off in wrong]).any(0)
    if len(rows) == len(case.places) and not rows.all() and rows.any():
        sequence, position = case.places[int(rows.nonzero()[0])]
        said.append(f"{int(rows.sum())} of {len(rows)} rows are off, the first at position {position} of sequence "
                    f"{sequence}")
    heads = wrong[0].any(2).any(0) if wrong[0].dim() == 3 else torch.ones(1)
    if heads.any() and not heads.all():
        own = case.indices(case.point, ranks[0])
        said.append(f"on rank {ranks[0]} only the heads {', '.join(str(own[h]) for h in heads.nonzero().flatten())}")
    return said

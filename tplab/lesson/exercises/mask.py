"""Notebook 01: the causal mask."""

import torch

from tplab.lesson.mine import Mine, NotYet
from tplab.lesson.verdict import Setting, exercise
from tplab.patch import Patch

TARGET = "tplab.model.attention.mask_scores"


@exercise("mask_scores", "01", takes="scores, mask", writes="scores",
          agreed="on {ranks}, every trace point agrees with Hugging Face")
def mask_scores(mine: Mine, setting: Setting):
    """On 2 batches, 3 heads, 4 queries and 6 keys; then in the engine."""
    scores = torch.arange(144.0).sin().view(2, 3, 4, 6)
    mask = torch.ones(2, 1, 4, 6, dtype=torch.bool).triu(3)
    masked = mine.tensor(scores, mask, dims="batch, heads, queries, keys", shape=scores.shape, dtype=scores.dtype)
    hidden = mask.expand_as(scores)
    if masked.isnan().any():
        raise NotYet(f"{masked.isnan().double().mean():.0%} NaN in a small example: is something multiplying 0 by "
                     "-inf?")
    weights = masked.softmax(-1)
    if weights.isnan().any():
        rows = int(weights.isnan().any(-1)[0, 0].sum())
        raise NotYet(f"softmax makes NaN in {rows} of 4 rows, those in which every key is hidden: is the mask the "
                     "wrong way round? True means: must not look")
    if seen := int((weights[hidden] > 0).sum()):
        raise NotYet(f"{seen} of {int(hidden.sum())} hidden keys still get some weight: which line hides the keys "
                     "where the mask is True?")
    if not masked[~hidden].equal(scores[~hidden]):
        raise NotYet("scores of keys that may be seen have changed; only the hidden ones may")
    setting.align(Patch(TARGET, mine.function))

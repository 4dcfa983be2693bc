"""Faults of the causal mask."""

import torch

from tplab.faults.fault import Fault
from tplab.patch import Patch


def nan_mask(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores + mask.to(scores.dtype) * float("-inf")      # where nothing is masked: 0 * -inf


def no_mask(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores                                              # every token sees the whole prompt


_TARGET = "tplab.model.attention.mask_scores"

FAULTS = (
    Fault("nan_mask", "the mask is multiplied by -inf",
          symptom="Every logit is NaN; sampling falls on one and the same token for ever.",
          first_point="layers.0.attn", notebook="01_mask_nan", patches=(Patch(_TARGET, nan_mask),)),
    Fault("no_mask", "the mask is forgotten",
          symptom="The prompt's logits are confident and wrong, because each token has seen the next one.",
          first_point="layers.0.attn", notebook="01_mask_nan", patches=(Patch(_TARGET, no_mask),)),
)

"""Faults of the causal mask."""

import torch

from tplab.faults.fault import bug


def nan_mask(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores + mask.to(scores.dtype) * float("-inf")      # where nothing is masked: 0 * -inf


def no_mask(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores                                              # every token sees the whole prompt


_TARGET = "tplab.model.attention.mask_scores"

FAULTS = (
    bug(_TARGET, nan_mask, "the mask is multiplied by -inf",
        "Every logit is NaN, and the engine writes one token for ever.",
        ("A TensorFlow Reformer added (1 - mask) * -inf to its scores and got NaN wherever the mask was 1.",
         "https://github.com/cerebroai/reformers/issues/3"),
        ("ARENA's test of the causal mask reports the share of NaN and asks whether 0 was multiplied by -inf.",
         "https://github.com/callummcdougall/ARENA_3.0"),
        first_point="layers.0.attn", notebook="01_mask_nan"),
    bug(_TARGET, no_mask, "the mask is forgotten",
        "The prompt's logits are confident and wrong, because each token has seen the next one.",
        ("torchtune made its causal mask where the caches were set up: without a cache, every token attended to "
         "everything, and the text was garbage.", "https://github.com/meta-pytorch/torchtune/issues/959"),
        first_point="layers.0.attn", notebook="01_mask_nan"),
)

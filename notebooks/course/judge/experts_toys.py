"""Notebook 12: a small random model with experts."""

import functools

from course.judge.toy_checkpoint import random_model
from tplab.checkpoint import Checkpoint

_SIZES = {"hidden_size": 48, "intermediate_size": 25, "num_hidden_layers": 2, "max_position_embeddings": 64,
          "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}


@functools.cache
def toy_experts() -> Checkpoint:
    """A Qwen3 mixture of experts of odd sizes with 7 experts, 2 for a token."""
    return random_model("qwen3_moe", 6, 2, head_dim=6, num_experts=7, num_experts_per_tok=2, moe_intermediate_size=13,
                        norm_topk_prob=True, **_SIZES)

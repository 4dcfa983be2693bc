"""Notebook 12: small random models, one with experts and one with a norm over all heads."""

import functools

import torch

from tplab.checkpoint import Checkpoint
from tplab.lesson.toy_checkpoint import random_model


@functools.cache
def toy_experts() -> Checkpoint:
    """A Qwen3 mixture of experts of odd sizes with 7 experts, 2 for a token."""
    return _random("qwen3_moe", head_dim=6, num_experts=7, num_experts_per_tok=2, moe_intermediate_size=13,
                   norm_topk_prob=True)


@functools.cache
def toy_full_width() -> Checkpoint:
    """An OLMo-2: q and k are normalised over all heads."""
    return _random("olmo2")


def _random(model_type: str, **more) -> Checkpoint:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.for_model(
        model_type, num_attention_heads=6, num_key_value_heads=2, vocab_size=43, hidden_size=48, intermediate_size=25,
        num_hidden_layers=2, max_position_embeddings=64, eos_token_id=None, bos_token_id=None, pad_token_id=None,
        **more)
    return random_model(6, lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32),
                        lambda parameter: 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5)

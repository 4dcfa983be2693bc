"""Small random models that transformers itself makes and saves: every trait alone, and as real models combine them.

Odd sizes, uneven heads, biases and norms that are not what a forgotten one would be. Names and layout of the weights
are transformers' own, so nothing here depends on what tplab thinks they are.
"""

import math
from pathlib import Path

import torch

ODD = dict(hidden_size=48, num_attention_heads=6, num_key_value_heads=3, head_dim=10, intermediate_size=43,
           vocab_size=71, num_hidden_layers=3, max_position_embeddings=128, eos_token_id=None, bos_token_id=None,
           pad_token_id=None)
NO_HEAD_DIM = {key: value for key, value in ODD.items() if key != "head_dim"}
EXPERTS = dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=13)
SLIDING, FULL = "sliding_attention", "full_attention"


def theta(value=10000.0, **more):
    return {"rope_type": "default", "rope_theta": value, **more}


YARN = theta(factor=4.0, original_max_position_embeddings=32) | {"rope_type": "yarn"}
BY_TYPE = {SLIDING: theta(1000.0), FULL: theta(50000.0, factor=4.0) | {"rope_type": "linear"}}
TRAITS = {
    # One trait each.
    "window on all layers": dict(model_type="mistral", **ODD, sliding_window=7),
    "window by layer": dict(model_type="qwen2", **ODD, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "window by layer_types": dict(model_type="qwen3", **ODD, use_sliding_window=True, sliding_window=5,
                                  layer_types=[SLIDING, FULL, SLIDING], attention_bias=True),
    "weight + 1, embedding scaled": dict(model_type="gemma", **ODD, hidden_act="gelu_pytorch_tanh"),
    "capped scores and logits": dict(model_type="gemma2", **ODD, query_pre_attn_scalar=10, sliding_window=128,
                                     attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "scalar of the scores": dict(model_type="gemma2", **ODD, query_pre_attn_scalar=23, sliding_window=128,
                                 attn_logit_softcapping=None, final_logit_softcapping=None),
    "norm over the full width": dict(model_type="olmo2", **NO_HEAD_DIM, attention_bias=True),
    "part of a head, fused": dict(model_type="phi3", **NO_HEAD_DIM, rope_parameters=theta(partial_rotary_factor=0.7)),
    "pairs": dict(model_type="glm", **ODD | dict(eos_token_id=2), rope_parameters=theta(partial_rotary_factor=0.6)),
    "layers without rotation": dict(model_type="smollm3", **ODD, no_rope_layers=[1, 0, 1], attention_bias=True,
                                    mlp_bias=True),
    "multipliers": dict(model_type="granite", **NO_HEAD_DIM, embedding_multiplier=3.7, residual_multiplier=0.22,
                        attention_multiplier=0.31, logits_scaling=1.9, attention_bias=True, mlp_bias=True),
    "experts": dict(model_type="qwen3_moe", **ODD, **EXPERTS, norm_topk_prob=False),
    "experts, renormalised": dict(model_type="qwen3_moe", **ODD, **EXPERTS, norm_topk_prob=True, attention_bias=True),
    "experts, dense layers": dict(model_type="qwen3_moe", **ODD, **EXPERTS, mlp_only_layers=[0], norm_topk_prob=True),
    "shared expert": dict(model_type="qwen2_moe", **ODD, **EXPERTS, shared_expert_intermediate_size=17),
    # Whole models.
    "Mixtral": dict(model_type="mixtral", **ODD, num_local_experts=5, num_experts_per_tok=2, sliding_window=9),
    "OLMoE": dict(model_type="olmoe", **NO_HEAD_DIM, num_experts=7, num_experts_per_tok=3),
    "gpt-oss": dict(model_type="gpt_oss", **ODD, num_local_experts=5, num_experts_per_tok=2, sliding_window=6,
                    swiglu_limit=1.5, rope_parameters=YARN),
    "Gemma-2": dict(model_type="gemma2", **ODD, query_pre_attn_scalar=17, sliding_window=6, attention_bias=True,
                    attn_logit_softcapping=4.0, final_logit_softcapping=5.0),
    "Gemma-3": dict(model_type="gemma3_text", **ODD, query_pre_attn_scalar=17, sliding_window=6, attention_bias=True,
                    layer_types=[SLIDING, SLIDING, FULL], rope_parameters=BY_TYPE),
    "OLMo-3": dict(model_type="olmo3", **NO_HEAD_DIM, sliding_window=6, layer_types=[SLIDING, FULL, SLIDING],
                   rope_parameters={SLIDING: theta(), FULL: YARN}),
    "GLM-4": dict(model_type="glm4", **ODD | dict(eos_token_id=2), attention_bias=True,
                  rope_parameters=theta(partial_rotary_factor=0.6)),
    "Qwen2-MoE with a window": dict(model_type="qwen2_moe", **ODD, **EXPERTS, shared_expert_intermediate_size=17,
                                    use_sliding_window=True, sliding_window=5, decoder_sparse_step=2),
}


def make_model(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **config) -> Path:
    """A random model of this configuration, as transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf = AutoConfig.for_model(**config)
    model = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    plus_one = config["model_type"].startswith("gemma")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                noise = (not plus_one) + 0.3 * noise
            elif name.endswith(("bias", "sinks")):
                noise = 0.5 * noise
            elif "embed" not in name or hf.tie_word_embeddings:  # of order one behind a product
                inputs = parameter.shape[1] if "experts" in name and "gpt" in hf.model_type else parameter.shape[-1]
                noise = noise * 1.5 / math.sqrt(inputs)
            parameter.copy_(noise)
    model.to(dtype).save_pretrained(folder)
    return folder

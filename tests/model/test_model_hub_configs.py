"""Configurations as they are published, with small sizes: each runs as in Hugging Face, or says what is missing."""

import json

import pytest
import torch
from helpers.trait_models import make_model, theta
from helpers.trait_sweep import hf_logits, our_logits, some_prompts

from tplab.align.floors import bound
from tplab.checkpoint import CheckpointError, open_checkpoint
from tplab.fast import why_not
from tplab.ranks import logical_ranks
from tplab.shard import ShardPlan

SLIDING, FULL = "sliding_attention", "full_attention"
SMALL = dict(hidden_size=48, intermediate_size=50, num_hidden_layers=4, vocab_size=97, max_position_embeddings=128,
             bos_token_id=1, eos_token_id=2, pad_token_id=None)
LLAMA3 = theta(500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LONGROPE = theta(original_max_position_embeddings=64, short_factor=[1.0, 1.1, 1.2, 1.3],
                 long_factor=[2.0, 3.0, 4.0, 5.0]) | {"rope_type": "longrope"}
YARN = theta(150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
             original_max_position_embeddings=32) | {"rope_type": "yarn"}


def heads(q, kv, dim=None):
    return dict(num_attention_heads=q, num_key_value_heads=kv) | ({} if dim is None else {"head_dim": dim})


RUN = {
    "Llama-2-7B": dict(model_type="llama", **heads(6, 6), rope_parameters=theta()),
    "Llama-3.1-8B": dict(model_type="llama", **heads(8, 2, 8), rope_parameters=LLAMA3 | {"rope_type": "llama3"}),
    "Llama-3.2-1B": dict(model_type="llama", **heads(8, 2, 8), tie_word_embeddings=True, rope_parameters=theta(5e5)),
    "SmolLM2-135M": dict(model_type="llama", hidden_size=36, **heads(9, 3), tie_word_embeddings=True),
    "DeepSeek-R1-Distill-Qwen-7B": dict(model_type="qwen2", **heads(14, 2, 8), use_sliding_window=False,
                                        sliding_window=4096, max_window_layers=28),
    "Qwen2.5-7B": dict(model_type="qwen2", **heads(14, 2, 8), use_sliding_window=False, sliding_window=131072,
                       max_window_layers=28, rope_parameters=theta(1e6)),
    "Qwen2-7B, with its window": dict(model_type="qwen2", **heads(14, 2, 8), use_sliding_window=True, sliding_window=8,
                                      max_window_layers=2),
    "Qwen3-8B": dict(model_type="qwen3", **heads(8, 2, 10), attention_bias=False, max_window_layers=36),
    "Qwen3-30B-A3B": dict(model_type="qwen3_moe", **heads(8, 1, 10), num_experts=8, num_experts_per_tok=3,
                          moe_intermediate_size=12, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[]),
    "Qwen1.5-MoE-A2.7B": dict(model_type="qwen2_moe", **heads(4, 4), num_experts=6, num_experts_per_tok=2,
                              moe_intermediate_size=12, shared_expert_intermediate_size=40, norm_topk_prob=False),
    "Qwen2-57B-A14B": dict(model_type="qwen2_moe", **heads(6, 2), num_experts=8, num_experts_per_tok=4,
                           moe_intermediate_size=12, shared_expert_intermediate_size=40, use_sliding_window=False),
    "Mistral-7B-v0.1": dict(model_type="mistral", **heads(8, 2, 8), sliding_window=8),
    "Mistral-7B-v0.3": dict(model_type="mistral", **heads(8, 2, 8), sliding_window=None, rope_parameters=theta(1e6)),
    "Mixtral-8x7B": dict(model_type="mixtral", **heads(8, 2), num_local_experts=8, num_experts_per_tok=2,
                         sliding_window=None),
    "Gemma-2B": dict(model_type="gemma", **heads(8, 1, 10), hidden_act="gelu_pytorch_tanh"),
    "Gemma-2-9B": dict(model_type="gemma2", **heads(4, 2, 10), query_pre_attn_scalar=256, sliding_window=8,
                       attn_logit_softcapping=50.0, final_logit_softcapping=30.0, cache_implementation="hybrid"),
    "Gemma-3-1B": dict(model_type="gemma3_text", **heads(4, 1, 10), query_pre_attn_scalar=256, sliding_window=8,
                       sliding_window_pattern=2, rope_theta=1e6, rope_local_base_freq=1e4),
    "Phi-3-mini-4k": dict(model_type="phi3", **heads(6, 6), sliding_window=8),
    "Phi-3.5-mini": dict(model_type="phi3", **heads(6, 6), sliding_window=128, original_max_position_embeddings=64,
                         rope_parameters=LONGROPE),
    "Phi-4": dict(model_type="phi3", **heads(8, 2), sliding_window=None, rope_parameters=theta(250000.0)),
    "Phi-4-mini": dict(model_type="phi3", hidden_size=96, **heads(6, 2), tie_word_embeddings=True,
                       original_max_position_embeddings=64, sliding_window=128,
                       rope_parameters=LONGROPE | {"partial_rotary_factor": 0.75, "short_factor": [1.1] * 6,
                                                   "long_factor": [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]}),
    "OLMo-2-7B": dict(model_type="olmo2", **heads(6, 6)),
    "OLMo-3-7B": dict(model_type="olmo3", **heads(6, 6), sliding_window=8,
                      layer_types=[SLIDING, SLIDING, SLIDING, FULL]),
    "OLMoE-1B-7B": dict(model_type="olmoe", **heads(6, 6), num_experts=8, num_experts_per_tok=4, clip_qkv=None),
    "SmolLM3-3B": dict(model_type="smollm3", **heads(8, 2), no_rope_layers=[1, 1, 1, 0], tie_word_embeddings=True),
    "GLM-4-9B-0414": dict(model_type="glm4", **heads(8, 2, 10), partial_rotary_factor=0.5, attention_bias=False),
    "glm-4-9b-chat-hf": dict(model_type="glm", **heads(8, 2, 10), partial_rotary_factor=0.5, attention_bias=True),
    "Granite-3.3-8B": dict(model_type="granite", **heads(8, 2), attention_multiplier=0.0078125, logits_scaling=16.0,
                           residual_multiplier=0.22, embedding_multiplier=12.0, tie_word_embeddings=True),
    "gpt-oss-20b, in bfloat16": dict(model_type="gpt_oss", **heads(8, 2, 8), num_local_experts=8, num_experts_per_tok=4,
                                     sliding_window=8, rope_parameters=YARN),
}
REFUSED = {
    **{kind: ({"model_type": kind}, f"model_type '{kind}' is not supported; tplab runs qwen2, qwen3, llama")
       for kind in ("deepseek_v3", "kimi_k2", "glm4_moe", "qwen3_next", "gemma3", "llama4", "cohere", "falcon_h1",
                    "phimoe")},
    "gpt-oss-20b, as published": (dict(model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"}),
                                  "the weights are quantised (mxfp4)"),
    "Llama-3.1-8B in FP8": (dict(model_type="llama", quantization_config={"quant_method": "fbgemm_fp8"}),
                            "the weights are quantised (fbgemm_fp8)"),
    "OLMoE with clipped heads": (dict(model_type="olmoe", clip_qkv=8.0), "clip_qkv is 8.0"),
}


@pytest.mark.parametrize("name", RUN)
def test_a_published_configuration_runs_as_in_hugging_face(tmp_path, name):
    ckpt, tp = open_checkpoint(make_model(tmp_path / "m", **SMALL | RUN[name])), 2
    prompts = some_prompts(97)
    assert ckpt.config.max_position_embeddings == (64 if "mini" in name and "4k" not in name else 128)
    assert (why_not(ckpt.config, torch.float32) is None) == (not ckpt.config.traits)
    for dealt_out in [False, True][:1 + (ckpt.config.experts is not None)]:
        plan = ShardPlan.from_config(ckpt.config, tp, enable_expert_parallel=dealt_out)
        for dtype in (torch.float32, torch.float64):
            right = torch.cat(hf_logits(ckpt, dtype, prompts))
            ours = logical_ranks(tp, our_logits, ckpt, plan, dtype, prompts)[0]
            assert (ours - right).abs().max() <= bound("logits", right.abs().max().item(), dtype)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_configuration_is_refused_by_name(tmp_path, name):
    config, words = REFUSED[name]
    folder = make_model(tmp_path / "m", model_type="llama", **SMALL, **heads(6, 2))
    (folder / "config.json").write_text(json.dumps(SMALL | heads(6, 2) | config))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert words in str(caught.value), str(caught.value)

"""What a model has, by its ``model_type``: one table of traits, each read from Hugging Face's configuration.

A trait is a function of a transformers config object; it gives fields of :class:`tplab.checkpoint.ModelConfig`. What a
configuration says and no trait of its type reads is refused (see :func:`read_traits`).
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import CheckpointError

# What a causal model's forward pass does not depend on, or what Hugging Face turns into another field by itself.
_NO_EFFECT = {"initializer_range", "use_cache", "attention_dropout", "resid_pdrop", "embd_pdrop", "pad_token_id",
              "bos_token_id", "pretraining_tp", "router_aux_loss_coef", "output_router_logits", "router_jitter_noise",
              "max_window_layers", "use_sliding_window", "no_rope_layer_interval", "original_max_position_embeddings",
              "rope_parameters"}
Trait = Callable[[Any], dict]
LAYER_TYPES = FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts, with vLLM's names.

    Attributes:
        num_experts, top_k: of a layer; how many of them a token goes to.
        intermediate_size: of each expert.
        layers: for each layer, whether its MLP is a mixture of experts.
        stored: how a checkpoint names them: a key of :data:`tplab.checkpoint.layout.EXPERTS`.
        renormalize: the weights of a token's experts are divided by their sum.
        softmax_first: softmax over all experts, then the best of them; otherwise over the chosen ones only.
        wide_weights: the weights stay float32, whatever the dtype.
        bias: router and experts have biases.
        shared_intermediate_size: of the expert that every token goes to, behind a gate of its own; 0 if there is none.
        swiglu: ``(alpha, limit)`` of gpt-oss' clamped activation; None: the model's own.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    layers: tuple[bool, ...]
    stored: str
    renormalize: bool = False
    softmax_first: bool = True
    wide_weights: bool = False
    bias: bool = False
    shared_intermediate_size: int = 0
    swiglu: tuple[float, float] | None = None


def always(**fields) -> Trait:
    """A trait that every configuration of its type has."""
    return lambda hf: fields


def same(field: str, name: str | None = None) -> Trait:
    """A field of the configuration taken over; ``name``: what Hugging Face calls it, if not ``field``."""
    return lambda hf: {field: getattr(hf, name or field)}


# Attention.

qk_norm = always(qk_norm=True)
full_width_qk_norm = always(qk_norm=True, full_width_qk_norm=True)
sinks = always(sinks=True)
attention_multiplier = same("scaling", "attention_multiplier")
attn_logit_softcapping = same("attn_logit_softcapping")


def qkv_bias(hf) -> dict:
    return {"qkv_bias": bool(getattr(hf, "qkv_bias", True))}


def attention_bias(hf) -> dict:
    return {"qkv_bias": bool(hf.attention_bias), "o_bias": bool(hf.attention_bias)}


def qkv_attention_bias(hf) -> dict:
    return {"qkv_bias": bool(hf.attention_bias)}


def sliding_window(hf) -> dict:
    return {"windows": (hf.sliding_window,) * hf.num_hidden_layers}


def sliding_window_by_layer(hf) -> dict:
    """``layer_types``; Qwen2's ``max_window_layers`` is among them by then."""
    window = hf.sliding_window
    return {"windows": tuple(window if kind == SLIDING else None for kind in hf.layer_types)}


def query_pre_attn_scalar(hf) -> dict:
    return {"scaling": hf.query_pre_attn_scalar ** -0.5}


# Rotation.

rotation_in_pairs = always(rotates_pairs=True)


def partial_rotation(hf) -> dict:
    return {"partial_rotary_factor": hf.rope_parameters.get("partial_rotary_factor", 1.0)}


def longrope_within_its_original_length(hf) -> dict:
    """When a text grows longer than that, Hugging Face's Phi-3 changes all frequencies and computes all keys again. So
    here it must not grow longer."""
    rope = hf.rope_parameters
    original = rope.get("original_max_position_embeddings") or hf.original_max_position_embeddings
    return {"max_position_embeddings": original} if rope["rope_type"] == "longrope" else {}


def no_rope_layers(hf) -> dict:
    return {"rotates": tuple(map(bool, hf.no_rope_layers[:hf.num_hidden_layers]))}


def rope_by_layer_type(hf) -> dict:
    return {"rope_layer_types": tuple(hf.layer_types)}


# Norms: place in a layer (GLM-4's names, which the model takes for its own) and the checkpoint's name.

norms_after = always(norms=(("post_self_attn_layernorm", "post_attention_layernorm"),
                            ("post_mlp_layernorm", "post_feedforward_layernorm")))
norms_around = always(norms=(
    ("input_layernorm", "input_layernorm"), ("post_self_attn_layernorm", "post_attention_layernorm"),
    ("post_attention_layernorm", "pre_feedforward_layernorm"), ("post_mlp_layernorm", "post_feedforward_layernorm")))
norms_around_glm4 = always(norms=tuple((name, name) for name in (
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")))
weight_plus_one = always(norm="GemmaRMSNorm")
norm_in_float32 = always(norm="WideRMSNorm")


# The ends of the model, and what its streams are multiplied with.

final_logit_softcapping = same("final_logit_softcapping")


def embedding_times_root(hf) -> dict:
    return {"embedding_multiplier": hf.hidden_size ** 0.5, "rounds_multiplier": True}


def multipliers(hf) -> dict:
    return {"embedding_multiplier": hf.embedding_multiplier, "residual_multiplier": hf.residual_multiplier,
            "logits_scaling": hf.logits_scaling}


# MLPs.

mlp_bias = same("mlp_bias")
hidden_activation = same("hidden_act", "hidden_activation")
fused_qkv = always(fused_qkv=True)
fused_gate_up = always(fused_gate_up=True)


def qwen_experts(hf) -> dict:
    layers = tuple(layer not in hf.mlp_only_layers and (layer + 1) % hf.decoder_sparse_step == 0
                   for layer in range(hf.num_hidden_layers))
    return {"experts": ExpertsConfig(
        hf.num_experts, hf.num_experts_per_tok, hf.moe_intermediate_size, layers, "qwen",
        renormalize=hf.norm_topk_prob,
        shared_intermediate_size=getattr(hf, "shared_expert_intermediate_size", 0))} if hf.num_experts else {}


def olmoe_experts(hf) -> dict:
    return {"experts": ExpertsConfig(hf.num_experts, hf.num_experts_per_tok, hf.intermediate_size,
                                     (True,) * hf.num_hidden_layers, "qwen", renormalize=hf.norm_topk_prob)}


def mixtral_experts(hf) -> dict:
    return {"experts": ExpertsConfig(hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size,
                                     (True,) * hf.num_hidden_layers, "mixtral", renormalize=True, wide_weights=True)}


def gpt_oss_experts(hf) -> dict:
    return {"experts": ExpertsConfig(hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size,
                                     (True,) * hf.num_hidden_layers, "gpt_oss", softmax_first=False, bias=True,
                                     swiglu=(hf.swiglu_alpha, hf.swiglu_limit))}


_GEMMA = weight_plus_one, embedding_times_root
_GEMMA2 = (*_GEMMA, hidden_activation, attention_bias, norms_around, query_pre_attn_scalar, final_logit_softcapping,
           sliding_window_by_layer)
_OLMO2 = attention_bias, full_width_qk_norm, norms_after, norm_in_float32

FAMILIES = {
    "qwen2": ("Qwen2ForCausalLM", qkv_bias, sliding_window_by_layer),
    "qwen3": ("Qwen3ForCausalLM", attention_bias, qk_norm, sliding_window_by_layer),
    "llama": ("LlamaForCausalLM", attention_bias, mlp_bias),
    "mistral": ("MistralForCausalLM", sliding_window),
    "gemma": ("GemmaForCausalLM", *_GEMMA, attention_bias),
    "gemma2": ("Gemma2ForCausalLM", *_GEMMA2, attn_logit_softcapping),
    "gemma3_text": ("Gemma3ForCausalLM", *_GEMMA2, qk_norm, rope_by_layer_type),
    "glm": ("GlmForCausalLM", qkv_attention_bias, fused_gate_up, partial_rotation, rotation_in_pairs),
    "glm4": ("Glm4ForCausalLM", qkv_attention_bias, fused_gate_up, partial_rotation, rotation_in_pairs,
             norms_around_glm4),
    "granite": ("GraniteForCausalLM", attention_bias, mlp_bias, multipliers, attention_multiplier),
    "olmo2": ("Olmo2ForCausalLM", *_OLMO2),
    "olmo3": ("Olmo3ForCausalLM", *_OLMO2, sliding_window_by_layer, rope_by_layer_type),
    "phi3": ("Phi3ForCausalLM", fused_qkv, fused_gate_up, partial_rotation, sliding_window,
             longrope_within_its_original_length),
    "smollm3": ("SmolLM3ForCausalLM", attention_bias, mlp_bias, sliding_window_by_layer, no_rope_layers),
    "qwen2_moe": ("Qwen2MoeForCausalLM", qkv_bias, sliding_window_by_layer, qwen_experts),
    "qwen3_moe": ("Qwen3MoeForCausalLM", attention_bias, qk_norm, sliding_window, qwen_experts),
    "mixtral": ("MixtralForCausalLM", sliding_window, mixtral_experts),
    "olmoe": ("OlmoeForCausalLM", attention_bias, full_width_qk_norm, olmoe_experts),
    "gpt_oss": ("GptOssForCausalLM", attention_bias, sinks, sliding_window_by_layer, norm_in_float32, gpt_oss_experts),
}
ARCHITECTURES = {model_type: architecture for model_type, (architecture, *_) in FAMILIES.items()}


def read_traits(hf: Any) -> dict:
    """All traits of a ``model_type`` in the table, as fields of a ``ModelConfig``."""
    traits: dict = {}
    for trait in FAMILIES[hf.model_type][1:]:
        traits |= trait(hf)
    return traits


class Reading:
    """A transformers config that remembers which of its fields were asked for."""

    def __init__(self, hf: Any):
        self._hf, self._read = hf, set(_NO_EFFECT)

    def __getattr__(self, name: str):
        self._read.add(name)
        return getattr(self._hf, name)

    def refuse_unread(self) -> None:
        """``CheckpointError`` naming a field of this type of model that says something and that no trait has read."""
        from transformers import PreTrainedConfig

        common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
        for field in dataclasses.fields(self._hf):
            value = getattr(self._hf, field.name)
            if field.name not in self._read | common and value != field.default:
                raise CheckpointError(f"{field.name} is {value!r}, for which a {self._hf.model_type} has no trait "
                                      f"here; {field.default!r} works")

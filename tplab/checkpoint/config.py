"""``config.json`` read through Hugging Face's own config classes, and refused where tplab cannot follow it."""

import copy
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .errors import CheckpointError, words_of
from .headers import read_json
from .quantised import scale_block
from .traits import ARCHITECTURES, LAYER_TYPES, SLIDING, ExpertsConfig, Reading, read_traits

CONFIGS = ("config.json", "generation_config.json")  # the second need not be there
_QUANTISED = ("quantization_config", "compression_config")
_NORMS = (("input_layernorm", "input_layernorm"), ("post_attention_layernorm", "post_attention_layernorm"))
_LARGEST, _MOST_LAYERS = 1 << 24, 10_000  # beyond any model; tables of such a length must not be built to find out


@dataclass(frozen=True)
class ModelConfig:
    """The global sizes of a model, as the checkpoint states them; nothing in it depends on the number of ranks.

    Sizes count elements; ``head_dim`` need not be ``hidden_size / num_heads``. ``eos_token_ids`` may be
    empty. ``hf`` is the transformers config object the sizes were read from (RoPE: ``hf.rope_parameters``).

    Attributes of models that are more than a Llama (:attr:`traits` says which of them a model has):
        full_width_qk_norm: q and k are normalised over all heads together, not head by head.
        scaling: of the scores in attention.
        windows: for each layer, how many tokens a query sees, itself among them; None: all before it.
        sinks: a logit per head takes part in each softmax, and has no value.
        attn_logit_softcapping, final_logit_softcapping: scores and logits stay within these.
        rotates: for each layer, whether q and k are rotated at all.
        rope_layer_types: the layers' types where each type has its own frequencies; empty otherwise.
        partial_rotary_factor: how much of a head is rotated.
        rotates_pairs: neighbours are rotated together, not a head's halves.
        norm: which RMSNorm it is, a class of :mod:`tplab.model.norm`.
        norms: for each norm of a layer, its place (a name of :class:`tplab.model.decoder.DecoderLayer`) and the
            checkpoint's name for it.
        embedding_multiplier, residual_multiplier, logits_scaling: factors, and a divisor.
        rounds_multiplier: the embedding's factor is rounded to the weights' dtype.
        fused_qkv, fused_gate_up: stored as one tensor.
        experts: None for a model without.
        scale_block: of quantised weights, how many rows and columns share a scale (0: all); the weights are widened.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    hf: Any = field(repr=False, compare=False)
    scaling: float
    windows: tuple[int | None, ...]
    rotates: tuple[bool, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    full_width_qk_norm: bool = False
    sinks: bool = False
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope_layer_types: tuple[str, ...] = ()
    partial_rotary_factor: float = 1.0
    rotates_pairs: bool = False
    norm: str = "RMSNorm"
    norms: tuple[tuple[str, str], ...] = _NORMS
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0
    fused_qkv: bool = False
    fused_gate_up: bool = False
    experts: ExpertsConfig | None = None
    scale_block: tuple[int, int] | None = None

    @property
    def q_size(self) -> int:
        """Rows of all query heads together, over all ranks."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of all key heads together (as many again for the values), over all ranks."""
        return self.num_kv_heads * self.head_dim

    @property
    def ropes(self) -> dict[str | None, dict]:
        """The parameters of RoPE, by the type of layer where types differ; ``{None: parameters}`` otherwise."""
        parameters = self.hf.rope_parameters
        return {kind: parameters[kind] for kind in dict.fromkeys(self.rope_layer_types)} or {None: parameters}

    @property
    def rope_types(self) -> set[str]:
        """The kinds of RoPE in it, such as ``{"default"}``."""
        return {rope["rope_type"] for rope in self.ropes.values()}

    @property
    def traits(self) -> list[str]:
        """What it has beyond a Llama, Qwen2 or Qwen3, in words: code that computes must support all of it."""
        moe = self.experts
        return [what for what, has in {
            "a sliding window": any(self.windows), "attention sinks": self.sinks,
            "capped scores": self.attn_logit_softcapping, "capped logits": self.final_logit_softcapping,
            "a q/k norm over the full width": self.full_width_qk_norm,
            "scores scaled by a number of its own": self.scaling != self.head_dim ** -0.5,
            "norms in other places": self.norms != _NORMS, "norms with weight + 1": self.norm == "GemmaRMSNorm",
            "norms that multiply in float32": self.norm == "WideRMSNorm",
            "layers without rotation": not all(self.rotates), "rotation by the type of layer": self.rope_layer_types,
            "rotation of a part of each head": self.partial_rotary_factor != 1, "rotation in pairs": self.rotates_pairs,
            "a scaled embedding": self.embedding_multiplier != 1, "a scaled residual": self.residual_multiplier != 1,
            "scaled logits": self.logits_scaling != 1, "experts": moe,
            "a shared expert": moe and moe.shared_intermediate_size,
        }.items() if has]

    @classmethod
    def from_hf(cls, hf: Any, eos_token_id: int | list[int] | None = None) -> "ModelConfig":
        """The same facts from a transformers config object.

        ``eos_token_id`` overrides the config's own, as ``generation_config.json`` does in Hugging Face.
        Raises ``CheckpointError`` for what is unsupported and for sizes that cannot be.
        """
        if hf.model_type not in ARCHITECTURES:
            raise CheckpointError(_unknown_type(hf.model_type))
        fields = Reading(hf)
        layers, head_dim = fields.num_hidden_layers, getattr(fields, "head_dim", None) or _head_dim(fields)
        eos = fields.eos_token_id
        eos = eos if eos_token_id is None else eos_token_id
        config = cls(**{
            "model_type": hf.model_type, "hidden_size": fields.hidden_size,
            "intermediate_size": fields.intermediate_size, "num_layers": layers,
            "num_heads": fields.num_attention_heads, "num_kv_heads": fields.num_key_value_heads, "head_dim": head_dim,
            "vocab_size": fields.vocab_size, "rms_norm_eps": fields.rms_norm_eps,
            "hidden_act": getattr(fields, "hidden_act", None), "tie_word_embeddings": fields.tie_word_embeddings,
            "max_position_embeddings": fields.max_position_embeddings, "hf": hf,
            "eos_token_ids": tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,),
            "scaling": head_dim ** -0.5, "windows": (None,) * layers, "rotates": (True,) * layers
        } | read_traits(fields))
        fields.refuse_unread()
        _check_sizes(config)
        _check_ropes(config)
        longest = math.inf if "dynamic" in config.rope_types else config.max_position_embeddings
        # A window as long as the longest sequence never hides anything.
        return replace(config, windows=tuple(size if size and size < longest else None for size in config.windows))


def read_config(folder: Path) -> ModelConfig:
    """The config of the checkpoint in ``folder``; ``CheckpointError`` with the folder's name if it cannot be used."""
    raw = read_json(folder / "config.json")
    generation = read_json(folder / CONFIGS[1]) if (folder / CONFIGS[1]).exists() else {}
    try:
        return config_of(raw, generation.get("eos_token_id"))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: config.json: {error}") from error.__cause__


def config_of(raw: dict[str, Any], eos_token_id: int | list[int] | None = None) -> ModelConfig:
    """The config that a ``config.json`` states; ``CheckpointError`` if it cannot be used."""
    from transformers import AutoConfig

    model_type, layers = raw.get("model_type"), raw.get("num_hidden_layers", 1)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(_unknown_type(model_type))
    architectures = raw.get("architectures") or [ARCHITECTURES[model_type]]
    if architectures != [ARCHITECTURES[model_type]]:
        raise CheckpointError(f"architectures {architectures!r} is not supported; expected {ARCHITECTURES[model_type]}")
    quantisation = next((raw[key] for key in _QUANTISED if raw.get(key) is not None), None)
    block = scale_block(quantisation)
    if quantisation is not None and block is None:
        method = quantisation.get("quant_method", "") if isinstance(quantisation, dict) else ""
        raise CheckpointError(f"the weights are quantised ({method}), which is not supported; what is read is fp8 with "
                              "weight_block_size and compressed-tensors of 8 bits a channel")
    if raw.get("per_layer_config") is not None:
        raise CheckpointError("layers with configs of their own (per_layer_config) are not supported")
    if type(layers) is not int or not 0 < layers <= _MOST_LAYERS:  # Hugging Face would build lists of that length
        raise CheckpointError(f"num_hidden_layers is {layers!r}, not a whole number from 1 to {_MOST_LAYERS}")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind not in LAYER_TYPES for kind in layer_types):
        raise CheckpointError(f"layer_types {layer_types!r} is not supported; it can name {' and '.join(LAYER_TYPES)}")
    try:
        hf = AutoConfig.for_model(**copy.deepcopy(without_quantisation(raw)))
    except Exception as error:  # its validation raises many types; all of them mean a config that cannot be used
        raise CheckpointError(words_of(error)) from error
    return replace(ModelConfig.from_hf(hf, eos_token_id), scale_block=block)


def without_quantisation(raw: dict[str, Any]) -> dict[str, Any]:
    """A ``config.json`` of the same model with plain weights."""
    return {key: value for key, value in raw.items() if key not in _QUANTISED}


def _unknown_type(model_type: Any) -> str:
    return f"model_type {model_type!r} is not supported; tplab runs {', '.join(ARCHITECTURES)}"


def _head_dim(hf: Any) -> int:
    if hf.num_attention_heads < 1 or hf.hidden_size % hf.num_attention_heads:
        raise CheckpointError(f"hidden_size {hf.hidden_size} is no multiple of {hf.num_attention_heads} heads")
    return hf.hidden_size // hf.num_attention_heads


def _check_sizes(config: ModelConfig) -> None:
    from transformers.activations import ACT2FN

    experts = config.experts
    sizes = {name: getattr(config, name) for name in (
        "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size",
        "max_position_embeddings")} | ({f"{name} of the experts": getattr(experts, name) for name in (
            "num_experts", "top_k", "intermediate_size")} if experts else {})
    for name, size in sizes.items():
        if type(size) is not int or not 0 < size <= _LARGEST:
            raise CheckpointError(f"{name} is {size!r}, not a whole number from 1 to {_LARGEST}")
    if experts and experts.top_k > experts.num_experts:
        raise CheckpointError(f"a token cannot go to {experts.top_k} of {experts.num_experts} experts")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise CheckpointError(f"head_dim is {config.head_dim}; RoPE turns pairs, so it must be even")
    if config.hidden_act not in ACT2FN:
        raise CheckpointError(f"hidden_act {config.hidden_act!r} is unknown to transformers")
    if wrong := [size for size in config.windows if size is not None and (type(size) is not int or size < 1)]:
        raise CheckpointError(f"a sliding window of {wrong[0]!r} tokens is no window; it must be from 1 up")
    if SLIDING in (getattr(config.hf, "layer_types", None) or ()) and not any(config.windows):
        raise CheckpointError(f"layer_types has layers with a sliding window, but a {config.model_type} of this config "
                              "has none")


def _check_ropes(config: ModelConfig) -> None:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rotated = int(config.head_dim * config.partial_rotary_factor)
    for layer_type, rope in config.ropes.items():
        kind, theta = rope.get("rope_type"), rope.get("rope_theta")
        if type(theta) not in (int, float) or not 0 < theta < 1e30:
            raise CheckpointError(f"rope_theta is {theta!r}, not a positive number")
        if kind == "default":
            continue
        try:
            frequencies, scale = ROPE_INIT_FUNCTIONS[kind](copy.deepcopy(config.hf), **(
                {} if layer_type is None else {"layer_type": layer_type}))
            usable = len(frequencies) == -(-rotated // 2) and bool(torch.isfinite(frequencies * scale).all())
        except Exception as error:  # an unknown type, missing keys, lists of the wrong length, factors of another type
            raise CheckpointError(f"rope {kind!r} cannot be set up: {words_of(error)}; Hugging Face has default, "
                                  f"{', '.join(ROPE_INIT_FUNCTIONS)}") from error
        if not usable:
            raise CheckpointError(f"rope {kind!r} gives no finite frequency for each pair of {rotated} rotated numbers "
                                  f"of head_dim {config.head_dim}")

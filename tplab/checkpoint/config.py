"""``config.json`` read through Hugging Face's own config classes, and refused where tplab cannot follow it."""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CheckpointError, words_of
from .headers import read_json

ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM",
                 "mistral": "MistralForCausalLM"}
CONFIGS = ("config.json", "generation_config.json")  # the second need not be there
_SUPPORTED = "Qwen2/2.5, Qwen3, Llama and Mistral"
_LAYER_TYPES = ("full_attention", "sliding_attention")  # the second is refused only where it is active
_MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
# What a causal language model has no use for, but Hugging Face would build lists of that length from.
_CLASSIFIER_KEYS = ("num_labels", "id2label", "label2id")
_LARGEST = 1 << 24  # beyond any model; tables of such a length must not be built to find out


@dataclass(frozen=True)
class ModelConfig:
    """The global sizes of a model, as the checkpoint states them; nothing in it depends on the number of ranks.

    Sizes count elements; ``head_dim`` need not be ``hidden_size / num_heads``. ``eos_token_ids`` may be
    empty. ``hf`` is the transformers config object the sizes were read from (RoPE: ``hf.rope_parameters``).
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
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    hf: Any = field(repr=False, compare=False)

    @property
    def q_size(self) -> int:
        """Rows of all query heads together, over all ranks."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of all key heads together (as many again for the values), over all ranks."""
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, hf: Any, eos_token_id: int | list[int] | None = None) -> "ModelConfig":
        """The same facts from a transformers config object.

        ``eos_token_id`` overrides the config's own, as ``generation_config.json`` does in Hugging Face.
        Raises ``CheckpointError`` for what is unsupported and for sizes that cannot be.
        """
        if hf.model_type not in ARCHITECTURES:
            raise CheckpointError(f"model_type {hf.model_type!r} is not supported; tplab runs {_SUPPORTED}")
        attention_bias = bool(getattr(hf, "attention_bias", False))
        llama_like = hf.model_type in ("llama", "qwen3")
        config = cls(model_type=hf.model_type, hidden_size=hf.hidden_size, intermediate_size=hf.intermediate_size,
                     num_layers=hf.num_hidden_layers, num_heads=hf.num_attention_heads,
                     num_kv_heads=hf.num_key_value_heads, head_dim=getattr(hf, "head_dim", None) or _head_dim(hf),
                     vocab_size=hf.vocab_size, rms_norm_eps=hf.rms_norm_eps, hidden_act=hf.hidden_act,
                     tie_word_embeddings=hf.tie_word_embeddings,
                     qkv_bias=hf.model_type == "qwen2" or (llama_like and attention_bias),
                     o_bias=llama_like and attention_bias, mlp_bias=hf.model_type == "llama" and bool(hf.mlp_bias),
                     qk_norm=hf.model_type == "qwen3", max_position_embeddings=hf.max_position_embeddings,
                     eos_token_ids=_id_tuple(hf.eos_token_id if eos_token_id is None else eos_token_id), hf=hf)
        _check_sizes(config)
        _refuse_sliding_windows(config)
        _check_rope(config)
        return config


def read_config(folder: Path, tensor_count: int) -> ModelConfig:
    """The config of the checkpoint in ``folder``; ``CheckpointError`` with the folder's name if it cannot be used.

    ``tensor_count`` is how many tensors the files hold: a layer has several, so a larger number of layers is
    a lie, and is refused before anything is built with that length.
    """
    raw = read_json(folder / "config.json")
    generation, tokenizer = (read_json(folder / file) if (folder / file).exists() else {}
                             for file in ("generation_config.json", "tokenizer_config.json"))
    try:
        if "auto_map" in raw or "auto_map" in tokenizer or raw.get("trust_remote_code"):
            raise CheckpointError("asks for remote code (auto_map); tplab never runs code from a checkpoint")
        _refuse_unsupported(raw)
        layers = raw.get("num_hidden_layers")
        if not isinstance(layers, int) or not 0 < layers <= tensor_count:
            raise CheckpointError(f"num_hidden_layers is {layers!r}, but the files hold {tensor_count} tensors")
        return ModelConfig.from_hf(_hf_config(raw), generation.get("eos_token_id"))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: config.json: {error}") from error.__cause__


def _hf_config(raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    kept = {key: value for key, value in copy.deepcopy(raw).items() if key not in _CLASSIFIER_KEYS}
    try:
        return AutoConfig.for_model(**kept)
    except Exception as error:  # its validation raises many types; all of them mean a config that cannot be used
        raise CheckpointError(words_of(error)) from error


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    model_type = raw.get("model_type")
    if "moe" in str(model_type).lower() or model_type == "mixtral" or any(raw.get(key) for key in _MOE_KEYS):
        raise CheckpointError(f"{model_type!r} is a mixture of experts (MoE), which is not supported")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(f"model_type {model_type!r} is not supported; tplab runs {_SUPPORTED}")
    architectures = raw.get("architectures") or [ARCHITECTURES[model_type]]
    if architectures != [ARCHITECTURES[model_type]]:
        raise CheckpointError(f"architectures {architectures!r} is not supported; expected {ARCHITECTURES[model_type]}")
    for key in ("quantization_config", "compression_config"):
        if raw.get(key) is not None:
            raise CheckpointError(f"the weights are quantised ({key}), which is not supported")
    if raw.get("per_layer_config") is not None:
        raise CheckpointError("layers with configs of their own (per_layer_config) are not supported")
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        if rope is not None:
            if not isinstance(rope, dict):
                raise CheckpointError(f"{key} is {rope!r}, not an object")
            _check_rope_type(rope.get("rope_type", rope.get("type", "default")))
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind not in _LAYER_TYPES for kind in layer_types):
        raise CheckpointError(f"layer_types {layer_types!r} is not supported; every layer must attend in full")


def _check_rope_type(rope_type: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = ["default", *ROPE_INIT_FUNCTIONS]
    if rope_type not in known:
        raise CheckpointError(f"rope type {rope_type!r} is unknown; Hugging Face has {', '.join(known)}")


def _head_dim(hf: Any) -> int:
    if hf.num_attention_heads < 1 or hf.hidden_size % hf.num_attention_heads:
        raise CheckpointError(f"hidden_size {hf.hidden_size} is no multiple of {hf.num_attention_heads} heads")
    return hf.hidden_size // hf.num_attention_heads


def _id_tuple(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def _check_sizes(config: ModelConfig) -> None:
    from transformers.activations import ACT2FN

    sizes = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    for name in (*sizes, "max_position_embeddings"):
        value = getattr(config, name)
        if type(value) is not int or not 0 < value <= _LARGEST:
            raise CheckpointError(f"{name} is {value!r}, not a whole number from 1 to {_LARGEST}")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} KV heads evenly")
    if config.head_dim % 2:
        raise CheckpointError(f"head_dim is {config.head_dim}; RoPE turns pairs, so it must be even")
    eps = config.rms_norm_eps
    if not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise CheckpointError(f"rms_norm_eps is {eps!r}, not a small positive number")
    if config.hidden_act not in ACT2FN:
        raise CheckpointError(f"hidden_act {config.hidden_act!r} is unknown to transformers")
    for token in config.eos_token_ids:
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise CheckpointError(f"eos_token_id {token!r} is outside the vocabulary of {config.vocab_size}")


def _refuse_sliding_windows(config: ModelConfig) -> None:
    # A window as long as the longest sequence never hides anything: then it is not active. Mistral has one
    # window for all layers, or None; the others name the layers that have one.
    window = getattr(config.hf, "sliding_window", None)
    by_layer = "sliding_attention" in (getattr(config.hf, "layer_types", None) or ())
    if not by_layer and (config.model_type != "mistral" or window is None):
        return
    if window is None or window < config.max_position_embeddings:
        raise CheckpointError(f"a sliding window of {window} tokens is active, which is not supported")


def _check_rope(config: ModelConfig) -> None:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = config.hf.rope_parameters
    kind, theta = rope.get("rope_type"), rope.get("rope_theta")
    _check_rope_type(kind)
    if type(theta) not in (int, float) or not 0 < theta < 1e30:
        raise CheckpointError(f"rope_theta is {theta!r}, not a positive number")
    if kind == "default":
        return
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](copy.deepcopy(config.hf))
        usable = len(frequencies) == config.head_dim // 2 and bool(torch.isfinite(frequencies * scale).all())
    except Exception as error:  # missing keys, lists of the wrong length, factors of the wrong type
        raise CheckpointError(f"rope {kind!r} cannot be set up: {words_of(error)}") from error
    if not usable:
        raise CheckpointError(f"rope {kind!r} gives no finite frequency for each pair of head_dim {config.head_dim}")

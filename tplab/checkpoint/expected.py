"""Which tensors a config promises, and whether the files keep the promise."""

from collections.abc import Mapping
from pathlib import Path

from .config import ModelConfig
from .errors import CheckpointError
from .headers import TensorInfo

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def expected_shapes(config: ModelConfig, present: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this ``config`` must hold.

    Weights are ``[out_features, in_features]``. ``present`` decides, layer by layer, between separate
    ``q_proj/k_proj/v_proj`` and one fused ``qkv_proj`` (rows ``[q|k|v]``), and between ``gate_proj/up_proj``
    and ``gate_up_proj`` (rows ``[gate|up]``). A tied checkpoint needs no ``lm_head.weight``.
    """
    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)

    def linear(name: str, out_features: int, in_features: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (out_features, in_features)
        if bias:
            shapes[f"{name}.bias"] = (out_features,)

    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if f"{attn}.qkv_proj.weight" in present:
            linear(f"{attn}.qkv_proj", q + 2 * kv, hidden, config.qkv_bias)
        else:
            linear(f"{attn}.q_proj", q, hidden, config.qkv_bias)
            linear(f"{attn}.k_proj", kv, hidden, config.qkv_bias)
            linear(f"{attn}.v_proj", kv, hidden, config.qkv_bias)
        linear(f"{attn}.o_proj", hidden, q, config.o_bias)
        if config.qk_norm:
            shapes[f"{attn}.q_norm.weight"] = shapes[f"{attn}.k_norm.weight"] = (config.head_dim,)
        if f"{mlp}.gate_up_proj.weight" in present:
            linear(f"{mlp}.gate_up_proj", 2 * config.intermediate_size, hidden, config.mlp_bias)
        else:
            linear(f"{mlp}.gate_proj", config.intermediate_size, hidden, config.mlp_bias)
            linear(f"{mlp}.up_proj", config.intermediate_size, hidden, config.mlp_bias)
        linear(f"{mlp}.down_proj", hidden, config.intermediate_size, config.mlp_bias)
    return shapes


def check_tensors(folder: Path, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise ``CheckpointError`` naming the tensors that are missing, unexpected or mis-shaped.

    ``lm_head.weight`` beside tied embeddings is let through here; that it equals the embedding is checked
    with the data.
    """
    expected = expected_shapes(config, tensors)
    if missing := [name for name in expected if name not in tensors]:
        hint = " (the config does not tie the head to the embedding)" if HEAD in missing else ""
        raise CheckpointError(f"{folder}: {_some(missing)} missing{hint}")
    allowed = expected.keys() | {HEAD}
    if unexpected := [name for name in tensors if name not in allowed]:
        raise CheckpointError(
            f"{folder}: unexpected tensor {_some(unexpected)}: a {config.model_type} of this config has none"
        )
    shapes = expected | ({HEAD: expected[EMBEDDING]} if HEAD in tensors else {})
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"{folder}: {name} in {tensors[name].file} has shape {list(tensors[name].shape)}, "
                f"but config.json asks for {list(shape)} ({_sizes(config)})"
            )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _sizes(config: ModelConfig) -> str:
    return (
        f"vocab_size {config.vocab_size}, hidden_size {config.hidden_size}, intermediate_size "
        f"{config.intermediate_size}, {config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}"
    )

"""Which tensors a checkpoint holds and what of the model each one fills: the one description of a checkpoint's layout.

What a folder must hold, what a rank reads, what a shard is compared with, all follow from :func:`tensor_parts`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .config import ModelConfig
from .errors import CheckpointError
from .headers import TensorInfo

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Part(NamedTuple):
    """One of the tensors stacked in a parameter of the model, most often the only one."""

    parameter: str  # its path in the model: layers.0.self_attn.qkv_proj.weight
    tensor: str  # the checkpoint's tensor that holds it: one of its own name, or the fused one
    start: int  # its first row in that tensor
    shape: tuple[int, ...]


class _Rows:
    """A part's rows of a fused source, seen as a source of its own; nothing is read until sliced."""

    def __init__(self, source, start: int, shape: tuple[int, ...]):
        self.source, self.start, self.shape = source, start, shape

    def __getitem__(self, rows: slice):
        first, last, _ = rows.indices(self.shape[0])
        return self.source[self.start + first:self.start + last]


def tensor_parts(config: ModelConfig, present: Mapping[str, object]) -> dict[str, Part]:
    """Every tensor of a model of this ``config`` by its Hugging Face name, and where a checkpoint keeps it.

    Parts of one parameter stand in the order in which they are stacked: ``[q|k|v]``, ``[gate|up]``. The checkpoint's
    tensors in ``present`` decide, layer by layer, whether they are tensors of their own or rows of one ``qkv_proj`` or
    ``gate_up_proj``. A tied head is no part: it is the embedding.
    """
    parts: dict[str, Part] = {}

    def module(path: str, *columns: int, bias: bool = False, **stacked: int) -> None:
        whole = path if path == "lm_head" else f"model.{path}"
        fused, start = f"{whole}.weight" in present, 0
        for last, rows in stacked.items():
            own = f"{whole.rpartition('.')[0]}.{last}".lstrip(".")
            for kind, shape in [("weight", (rows, *columns)), ("bias", (rows,))][:1 + bias]:
                tensor = f"{whole if fused else own}.{kind}"
                parts[f"{own}.{kind}"] = Part(f"{path}.{kind}", tensor, start if fused else 0, shape)
            start += rows

    hidden, inter, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    module("embed_tokens", hidden, embed_tokens=config.vocab_size)
    module("norm", norm=hidden)
    if not config.tie_word_embeddings:
        module("lm_head", hidden, lm_head=config.vocab_size)
    for i in range(config.num_layers):
        layer = f"layers.{i}"
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        module(f"{layer}.input_layernorm", input_layernorm=hidden)
        module(f"{layer}.post_attention_layernorm", post_attention_layernorm=hidden)
        module(f"{attn}.qkv_proj", hidden, bias=config.qkv_bias, q_proj=q, k_proj=kv, v_proj=kv)
        module(f"{attn}.o_proj", q, bias=config.o_bias, o_proj=hidden)
        if config.qk_norm:
            module(f"{attn}.q_norm", q_norm=config.head_dim)
            module(f"{attn}.k_norm", k_norm=config.head_dim)
        module(f"{mlp}.gate_up_proj", hidden, bias=config.mlp_bias, gate_proj=inter, up_proj=inter)
        module(f"{mlp}.down_proj", inter, bias=config.mlp_bias, down_proj=hidden)
    return parts


def by_parameter(parts: Mapping[str, Part]) -> dict[str, dict[str, Part]]:
    """The same parts, those of each parameter together."""
    together: dict[str, dict[str, Part]] = {}
    for name, part in parts.items():
        together.setdefault(part.parameter, {})[name] = part
    return together


def sources(parts: Sequence[Part], reader) -> list:
    """The parts of one parameter as things to slice, each of its ``shape``; a fused tensor is asked for once."""
    tensors = {name: reader[name] for name in dict.fromkeys(part.tensor for part in parts)}
    return [tensors[part.tensor] if tuple(tensors[part.tensor].shape) == part.shape
            else _Rows(tensors[part.tensor], part.start, part.shape) for part in parts]


def read_part(part: Part, reader) -> torch.Tensor:
    """One part, whole, in the checkpoint's dtype."""
    return reader[part.tensor][part.start:part.start + part.shape[0]]


def expected_shapes(config: ModelConfig, present: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this ``config`` must hold, fused as those in ``present``."""
    parts = tensor_parts(config, present).values()  # of a fused tensor the last part's end is the whole's
    return {part.tensor: (part.start + part.shape[0], *part.shape[1:]) for part in parts}


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
        raise CheckpointError(f"{folder}: unexpected tensor {_some(unexpected)}: a {config.model_type} of this config "
                              "has none")
    shapes = expected | ({HEAD: expected[EMBEDDING]} if HEAD in tensors else {})
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise CheckpointError(f"{folder}: {name} in {tensors[name].file} has shape {list(tensors[name].shape)}, "
                                  f"but config.json asks for {list(shape)} ({_sizes(config)})")


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _sizes(config: ModelConfig) -> str:
    return (f"vocab_size {config.vocab_size}, hidden_size {config.hidden_size}, intermediate_size "
            f"{config.intermediate_size}, {config.num_heads} query and {config.num_kv_heads} KV heads of "
            f"{config.head_dim}")

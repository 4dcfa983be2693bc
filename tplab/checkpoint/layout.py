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
from .traits import ExpertsConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


# Router, and gate, up and down of an expert, as checkpoints name them inside a layer.
EXPERTS = {
    "qwen": ("mlp.gate", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj"),
    "mixtral": ("block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3",
                "block_sparse_moe.experts.{}.w2"),
    "gpt_oss": ("mlp.router", "mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")}


class Part(NamedTuple):
    """One of the tensors stacked in a parameter of the model, most often the only one."""

    parameter: str  # its path in the model: layers.0.self_attn.qkv_proj.weight
    tensor: str  # the checkpoint's tensor that holds it: one of its own name, or the fused one
    start: int  # its first row in that tensor
    shape: tuple[int, ...]
    step: int = 1  # every so many rows of that tensor are its own: 2 where gate and up take turns
    expert: int | None = None  # which matrix of a stack, each [in, out], as gpt-oss stores them
    whole: tuple[int, ...] = ()  # the shape of the stack


class _Rows:
    """A part's rows of a fused source, seen as a source of its own; nothing is read until sliced."""

    def __init__(self, source, part: Part):
        self.source, self.part, self.shape = source, part, part.shape

    def __getitem__(self, index):
        rows, *columns = index if isinstance(index, tuple) else (index,)
        first, last, _ = rows.indices(self.shape[0])
        start, step, expert = self.part.start, self.part.step, self.part.expert
        if expert is None:
            return self.source[(slice(start + first, start + last), *columns)]
        columns = columns or [slice(None)] * (len(self.shape) - 1)
        stack = self.source[(slice(expert, expert + 1), *columns, slice(first * step, last * step))][0]
        return stack[..., start::step].mT.contiguous() if columns else stack[start::step].contiguous()


class _Kept:
    """A source that keeps what was read last: gate and up that take turns are cut out of the same rows."""

    def __init__(self, source):
        self.source, self.shape, self.last, self.piece = source, source.shape, None, None

    def __getitem__(self, index):
        if index != self.last:
            self.last, self.piece = index, self.source[index]
        return self.piece


def tensor_parts(config: ModelConfig, present: Mapping[str, object]) -> dict[str, Part]:
    """Every tensor of a model of this ``config`` by its Hugging Face name, and where a checkpoint keeps it.

    Parts of one parameter stand in the order in which they are stacked: ``[q|k|v]``, ``[gate|up]``. The checkpoint's
    tensors in ``present`` decide, layer by layer, whether they are tensors of their own or rows of one ``qkv_proj`` or
    ``gate_up_proj``, where the architecture does not always have one. A tied head is no part: it is the embedding.
    Experts that are stored as one stack have the names that each would have alone.
    """
    parts: dict[str, Part] = {}

    def module(path: str, rows: dict[str, int], *columns: int, bias: bool = False, fused: bool = False) -> None:
        whole, start = f"model.{path}", 0
        fused = fused or len(rows) > 1 and f"{whole}.weight" in present
        for name, count in rows.items():
            for kind, shape in [("weight", (count, *columns)), ("bias", (count,))][:1 + bias]:
                tensor = f"{whole if fused else name}.{kind}"
                parts[f"{name}.{kind}"] = Part(f"{path}.{kind}", tensor, start if fused else 0, shape)
            start += count

    def mlp(path: str, size: int, bias: bool = False) -> None:
        at = f"model.{path}"
        module(f"{path}.gate_up_proj", {f"{at}.gate_proj": size, f"{at}.up_proj": size}, hidden, bias=bias,
               fused=config.fused_gate_up)
        module(f"{path}.down_proj", {f"{at}.down_proj": hidden}, size, bias=bias)

    def experts(path: str, layer: str, moe: ExpertsConfig) -> None:
        router, gate, up, down = (f"model.{layer}.{name}" for name in EXPERTS[moe.stored])
        module(f"{path}.gate", {router: moe.num_experts}, hidden, bias=moe.bias)
        for e in range(moe.num_experts):
            at = f"{path}.experts.{e}"
            module(f"{at}.gate_up_proj", dict.fromkeys((gate.format(e), up.format(e)), moe.intermediate_size), hidden,
                   bias=moe.bias)
            module(f"{at}.down_proj", {down.format(e): hidden}, moe.intermediate_size, bias=moe.bias)
        if moe.shared_intermediate_size:
            mlp(f"{path}.shared_expert", moe.shared_intermediate_size)
            module(f"{path}.shared_expert_gate", {f"model.{path}.shared_expert_gate": 1}, hidden)

    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    module("embed_tokens", {"model.embed_tokens": config.vocab_size}, hidden)
    module("norm", {"model.norm": hidden})
    if not config.tie_word_embeddings:
        module("lm_head", {"lm_head": config.vocab_size}, hidden)
    for i in range(config.num_layers):
        layer, attn = f"layers.{i}", f"layers.{i}.self_attn"
        for place, name in config.norms:
            module(f"{layer}.{place}", {f"model.{layer}.{name}": hidden})
        module(f"{attn}.qkv_proj", {f"model.{attn}.q_proj": q, f"model.{attn}.k_proj": kv, f"model.{attn}.v_proj": kv},
               hidden, bias=config.qkv_bias, fused=config.fused_qkv)
        module(f"{attn}.o_proj", {f"model.{attn}.o_proj": hidden}, q, bias=config.o_bias)
        if config.qk_norm:
            full = config.full_width_qk_norm
            module(f"{attn}.q_norm", {f"model.{attn}.q_norm": q if full else config.head_dim})
            module(f"{attn}.k_norm", {f"model.{attn}.k_norm": kv if full else config.head_dim})
        if config.sinks:
            parts[f"model.{attn}.sinks"] = Part(f"{attn}.sinks", f"model.{attn}.sinks", 0, (config.num_heads,))
        if config.experts and config.experts.layers[i]:
            experts(f"{layer}.mlp", layer, config.experts)
        else:
            mlp(f"{layer}.mlp", config.intermediate_size, config.mlp_bias)
    stacked = config.experts and config.experts.stored == "gpt_oss"
    return {name: _in_a_stack(part, config) for name, part in parts.items()} if stacked else parts


def _in_a_stack(part: Part, config: ModelConfig) -> Part:
    """Where gpt-oss keeps one expert's tensor: in ``experts.gate_up_proj``, ``[experts, in, out]``, gate and up taking
    turns, or in ``experts.down_proj``."""
    at, _, rest = part.tensor.partition(".experts.")
    if not rest:
        return part
    expert, last, kind = rest.split(".")
    size, columns = part.shape[0], part.shape[1:]
    stack, step = ("down_proj", 1) if last == "down_proj" else ("gate_up_proj", 2)
    return Part(part.parameter, f"{at}.experts.{stack}{'_bias' * (kind == 'bias')}", int(last == "up_proj"), part.shape,
                step, int(expert), (config.experts.num_experts, *columns, size * step))


def by_parameter(parts: Mapping[str, Part]) -> dict[str, dict[str, Part]]:
    """The same parts, those of each parameter together."""
    together: dict[str, dict[str, Part]] = {}
    for name, part in parts.items():
        together.setdefault(part.parameter, {})[name] = part
    return together


def sources(parts: Sequence[Part], reader) -> list:
    """The parts of one parameter as things to slice, each of its ``shape``; a fused tensor is asked for once."""
    tensors = {name: reader[name] for name in dict.fromkeys(part.tensor for part in parts)}
    tensors |= {part.tensor: _Kept(tensors[part.tensor]) for part in parts if part.step > 1}
    return [tensors[part.tensor] if tuple(tensors[part.tensor].shape) == part.shape
            else _Rows(tensors[part.tensor], part) for part in parts]


def read_part(part: Part, reader) -> torch.Tensor:
    """One part, whole, in the checkpoint's dtype."""
    return _Rows(reader[part.tensor], part)[:]


def expected_shapes(config: ModelConfig, present: Mapping[str, object]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this ``config`` must hold, fused as those in ``present``."""
    parts = tensor_parts(config, present).values()  # of a fused tensor the last part's end is the whole's
    return {part.tensor: part.whole or (part.start + part.shape[0], *part.shape[1:]) for part in parts}


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

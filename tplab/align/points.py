"""The trace points, the same for tplab and for Hugging Face: one table of how each is made and spread over the ranks.

A further architecture needs further rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


def _always(config, layer: int) -> bool:
    return True


def _qk_norm(config, layer: int) -> bool:
    return config.qk_norm


def _sparse(config, layer: int) -> bool:
    return config.experts is not None and config.experts.layers[layer]


def _dense(config, layer: int) -> bool:
    return not _sparse(config, layer)


def _norm_at(place: str) -> Callable:
    return lambda config, layer: place in dict(config.norms)


class Point(NamedTuple):
    """One point of the forward pass."""

    # "replicated" (the same values on every rank), "q_heads" or "kv_heads" (dealt out along dim 1 of [tokens, heads,
    # head_dim]), "mlp" or "vocab" (along the last dimension), or "partial" (a summand of a row-parallel sum per rank)
    layout: str
    op: str  # the operation that makes it
    made_from: tuple[str, ...]  # what goes in; "before" goes into the layer, of "q_norm|q" the first that there is does
    module: str = ""  # the checkpoint's, named inside its layer; a norm's place (see ModelConfig.norms)
    needs: Callable = _always  # whether a layer of a ModelConfig has it


def _norm(place: str, made_from: str) -> Point:
    return Point("replicated", "norm", (made_from,), place, _norm_at(place))


POINTS = {
    "embed": Point("replicated", "embed", (), "model.embed_tokens"),
    "input_norm": _norm("input_layernorm", "before"),
    "q": Point("q_heads", "linear", ("input_norm|before",), "self_attn.q_proj"),
    "k": Point("kv_heads", "linear", ("input_norm|before",), "self_attn.k_proj"),
    "v": Point("kv_heads", "linear", ("input_norm|before",), "self_attn.v_proj"),
    "q_norm": Point("q_heads", "norm", ("q",), "self_attn.q_norm", _qk_norm),
    "k_norm": Point("kv_heads", "norm", ("k",), "self_attn.k_norm", _qk_norm),
    "q_rope": Point("q_heads", "rope", ("q_norm|q",)),
    "k_rope": Point("kv_heads", "rope", ("k_norm|k",)),
    "attn": Point("q_heads", "attention", ("q_rope", "k_rope", "v")),
    "o_partial": Point("partial", "linear", ("attn",), "self_attn.o_proj"),
    "o_proj": Point("replicated", "reduce", ("o_partial",), "self_attn.o_proj"),
    "attn_norm": _norm("post_self_attn_layernorm", "o_proj"),
    "residual": Point("replicated", "add", ("before", "attn_norm|o_proj")),
    "post_norm": _norm("post_attention_layernorm", "residual"),
    "router_logits": Point("replicated", "linear", ("post_norm|residual",), "mlp.gate", _sparse),
    "moe_partial": Point("partial", "experts", ("post_norm|residual", "router_logits"), "mlp.experts", _sparse),
    "gate": Point("mlp", "linear", ("post_norm|residual",), "mlp.gate_proj", _dense),
    "up": Point("mlp", "linear", ("post_norm|residual",), "mlp.up_proj", _dense),
    "mlp_act": Point("mlp", "gated", ("gate", "up"), needs=_dense),
    "mlp_partial": Point("partial", "linear", ("mlp_act",), "mlp.down_proj", _dense),
    "mlp": Point("replicated", "reduce", ("mlp_partial|moe_partial",), "mlp.down_proj"),
    "mlp_norm": _norm("post_mlp_layernorm", "mlp"),
    "output": Point("replicated", "add", ("residual", "mlp_norm|mlp")),
    "norm": Point("replicated", "norm", ("before",), "model.norm"),
    "logits": Point("vocab", "head", ("norm",), "lm_head"),
}
NORM_PLACES = {name: point.module for name, point in POINTS.items() if point.needs not in (_always, _qk_norm)
               and point.op == "norm"}  # point → place
# Of each row-parallel layer's output, the point of a rank's summand and that of the sum.
SUMS = {"o": ("o_partial", "o_proj"), "down": ("mlp_partial", "mlp"), "experts": ("moe_partial", "mlp")}
OUTER = ("embed", "norm", "logits")  # the points of no layer
LAYER_POINTS = tuple(name for name in POINTS if name not in OUTER)


def short_name(name: str) -> str:
    """The last part of a point's canonical name: ``"layers.3.q"`` → ``"q"``."""
    return name.rpartition(".")[2]


def layout(name: str) -> str:
    """The :attr:`Point.layout` of a trace point."""
    return POINTS[short_name(name)].layout


def layer_of(name: str) -> int | None:
    """The layer of a point's canonical name, or of its beginning (``"layers.3."``); None at the ends of the model."""
    return int(name.split(".")[1]) if name.startswith("layers.") else None


def point_names(config, gate_up: bool = False) -> list[str]:
    """All points of a model in the order in which the forward pass reaches them. ``gate`` and ``up`` only if asked for:
    the lab's own engine computes them as one."""
    inner = [(p, POINTS[p].needs) for p in LAYER_POINTS if gate_up or p not in ("gate", "up")]
    layers = range(config.num_layers)
    return ["embed", *(f"layers.{i}.{p}" for i in layers for p, needs in inner if needs(config, i)), "norm", "logits"]


def made_from(name: str, config) -> tuple[str, ...]:
    """The points (short names, or ``"before"``) from which a point (canonical name) of this model is made."""
    layer = layer_of(name)
    return tuple(next(point for point in names.split("|") if point == "before" or POINTS[point].needs(config, layer))
                 for names in POINTS[short_name(name)].made_from)


def existing(name: str, config) -> str:
    """The point itself; for a norm that a layer does not have, the norm's input."""
    at, _, point = name.rpartition(".")
    if not at or point not in POINTS or POINTS[point].op != "norm" or POINTS[point].needs(config, layer_of(name)):
        return name
    before = layer_of(name) - 1
    into = "embed" if before < 0 else f"layers.{before}.output"
    return next(into if choice == "before" else f"{at}.{choice}" for choice in POINTS[point].made_from)


def inputs(name: str, config) -> list[str]:
    """The points (canonical names) from which a point is made."""
    at, _, _ = name.rpartition(".")
    before = config.num_layers - 1 if layer_of(name) is None else layer_of(name) - 1
    into = "embed" if before < 0 else f"layers.{before}.output"
    return [into if choice == "before" else f"{at}.{choice}".lstrip(".") for choice in made_from(name, config)]


def columns_of(items: Sequence[int], size: int) -> Sequence[int]:
    """The features of heads (or of other items) that have ``size`` each."""
    if in_a_row(items):
        return range(items[0] * size, (items[-1] + 1) * size)
    return [item * size + j for item in items for j in range(size)]


def as_index(indices: Sequence[int]) -> slice | torch.Tensor:
    """Indices as something to index with; a slice, which copies nothing, where they follow one another."""
    if in_a_row(indices):
        return slice(indices[0], indices[0] + len(indices))
    return torch.tensor(list(indices), dtype=torch.long)


def in_a_row(indices: Sequence[int]) -> bool:
    row = range(indices[0], indices[0] + len(indices)) if len(indices) else ()
    return len(indices) > 0 and (indices == row if isinstance(indices, range) else list(indices) == list(row))

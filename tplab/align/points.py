"""The trace points, the same for tplab and for Hugging Face: one table of how each is made, and spread over the ranks.

A further architecture is a matter of further rows.
"""

from typing import NamedTuple

from tplab.errors import TplabError


class UnknownTraitError(TplabError):
    """The model has something for which there are no points and operations yet."""


class Point(NamedTuple):
    """One point of the forward pass.

    Attributes:
        layout: ``"replicated"`` (the same values on every rank), ``"q_heads"`` or ``"kv_heads"`` (dealt out along dim 1
            of ``[tokens, heads, head_dim]``), ``"mlp"`` or ``"vocab"`` (along the last dimension), or ``"partial"``
            (one summand of a row-parallel sum per rank).
        op: the operation of :class:`tplab.align.operations.Operations` that makes it.
        made_from: the points of the layer that go in; ``"before"`` is what goes into the layer. RoPE and attention take
            the first of ``q_norm`` and ``q`` that the model has.
        module: the checkpoint's module, named inside its layer.
    """

    layout: str
    op: str
    made_from: tuple[str, ...]
    module: str = ""


POINTS = {
    "embed": Point("replicated", "embed", (), "model.embed_tokens"),
    "input_norm": Point("replicated", "norm", ("before",), "input_layernorm"),
    "q": Point("q_heads", "linear", ("input_norm",), "self_attn.q_proj"),
    "k": Point("kv_heads", "linear", ("input_norm",), "self_attn.k_proj"),
    "v": Point("kv_heads", "linear", ("input_norm",), "self_attn.v_proj"),
    "q_norm": Point("q_heads", "norm", ("q",), "self_attn.q_norm"),
    "k_norm": Point("kv_heads", "norm", ("k",), "self_attn.k_norm"),
    "q_rope": Point("q_heads", "rope", ("q_norm", "q")),
    "k_rope": Point("kv_heads", "rope", ("k_norm", "k")),
    "attn": Point("q_heads", "attention", ("q_rope", "k_rope", "v")),
    "o_partial": Point("partial", "linear", ("attn",), "self_attn.o_proj"),
    "o_proj": Point("replicated", "reduce", ("o_partial",), "self_attn.o_proj"),
    "residual": Point("replicated", "add", ("before", "o_proj")),
    "post_norm": Point("replicated", "norm", ("residual",), "post_attention_layernorm"),
    "gate": Point("mlp", "linear", ("post_norm",), "mlp.gate_proj"),
    "up": Point("mlp", "linear", ("post_norm",), "mlp.up_proj"),
    "mlp_act": Point("mlp", "gated", ("gate", "up")),
    "mlp_partial": Point("partial", "linear", ("mlp_act",), "mlp.down_proj"),
    "mlp": Point("replicated", "reduce", ("mlp_partial",), "mlp.down_proj"),
    "output": Point("replicated", "add", ("residual", "mlp")),
    "norm": Point("replicated", "norm", ("before",), "model.norm"),
    "logits": Point("vocab", "head", ("norm",), "lm_head"),
}
OUTER = ("embed", "norm", "logits")  # the points of no layer
LAYER_POINTS = tuple(name for name in POINTS if name not in OUTER)


def refuse_unknown_traits(ckpt) -> None:
    """UnknownTraitError for a model with a trait that the table does not know: no comparison may miss it."""
    if traits := ckpt.config.traits:
        raise UnknownTraitError(f"{ckpt.name} has {', '.join(traits)}: the comparison with Hugging Face does not know "
                                "that yet; generate runs it")


def made_by(*ops: str) -> tuple[str, ...]:
    """The points that one of these operations makes."""
    return tuple(name for name, point in POINTS.items() if point.op in ops)


def layout(name: str) -> str:
    """The :attr:`Point.layout` of a trace point."""
    return POINTS[name.rpartition(".")[2]].layout


def point_names(num_layers: int, qk_norm: bool, gate_up: bool = False) -> list[str]:
    """All points of a model in the order in which the forward pass reaches them. ``gate`` and ``up`` only if asked for:
    the lab's own engine computes them as one."""
    inner = [p for p in LAYER_POINTS if (qk_norm or p not in ("q_norm", "k_norm"))
             and (gate_up or p not in ("gate", "up"))]
    return ["embed", *(f"layers.{i}.{p}" for i in range(num_layers) for p in inner), "norm", "logits"]


def goes_into(point: str, other: str) -> bool:
    """Whether the point ``other`` of a layer (short names) is made from the point ``point``, directly or not."""
    made_from = POINTS[other].made_from if other in POINTS else ()
    return point in made_from or any(goes_into(point, one) for one in made_from)


def inputs(name: str, num_layers: int, qk_norm: bool) -> list[str]:
    """The points (canonical names) from which a point is made."""
    at, _, point = name.rpartition(".")
    before = int(at.split(".")[1]) - 1 if at else num_layers - 1
    into = "embed" if before < 0 else f"layers.{before}.output"
    left_out = ("q_norm", "k_norm") if not qk_norm else ("q", "k") if point.endswith("_rope") else ()
    return [into if one == "before" else f"{at}.{one}".lstrip(".") for one in POINTS[point].made_from
            if one not in left_out]

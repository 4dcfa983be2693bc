"""The names of the trace points, the same for tplab and for Hugging Face, and how each is spread over the ranks."""

_LAYOUTS = {
    # replicated: every rank must hold the same values
    "embed": "replicated", "input_norm": "replicated", "o_proj": "replicated", "residual": "replicated",
    "post_norm": "replicated", "mlp": "replicated", "output": "replicated", "norm": "replicated",
    # sharded along the heads (dim 1 of [tokens, heads, head_dim])
    "q": "q_heads", "q_norm": "q_heads", "q_rope": "q_heads", "attn": "q_heads",
    "k": "kv_heads", "k_norm": "kv_heads", "k_rope": "kv_heads", "v": "kv_heads",
    # sharded along the last dimension
    "gate": "mlp", "up": "mlp", "mlp_act": "mlp", "logits": "vocab",
    # one summand of a row-parallel sum per rank
    "o_partial": "partial", "mlp_partial": "partial",
}
LAYER_POINTS = ("input_norm", "q", "k", "v", "q_norm", "k_norm", "q_rope", "k_rope", "attn", "o_partial", "o_proj",
                "residual", "post_norm", "gate", "up", "mlp_act", "mlp_partial", "mlp", "output")


def layout(name: str) -> str:
    """``"replicated"``, ``"q_heads"``, ``"kv_heads"``, ``"mlp"``, ``"vocab"`` or ``"partial"`` for a trace point."""
    return _LAYOUTS[name.rpartition(".")[2]]


def point_names(num_layers: int, qk_norm: bool, gate_up: bool = False) -> list[str]:
    """All points of a model in the order in which the forward pass reaches them. ``gate`` and ``up`` only if asked for:
    the lab's own engine computes them as one."""
    inner = [p for p in LAYER_POINTS if (qk_norm or p not in ("q_norm", "k_norm"))
             and (gate_up or p not in ("gate", "up"))]
    return ["embed", *(f"layers.{i}.{p}" for i in range(num_layers) for p in inner), "norm", "logits"]


# What each point is made from, in the same layer; ``before`` is what goes into the layer.
_MADE_FROM = {
    "embed": (), "input_norm": ("before",), "q": ("input_norm",), "k": ("input_norm",), "v": ("input_norm",),
    "q_norm": ("q",), "k_norm": ("k",), "q_rope": ("q_norm", "q"), "k_rope": ("k_norm", "k"),
    "attn": ("q_rope", "k_rope", "v"), "o_partial": ("attn",), "o_proj": ("o_partial",),
    "residual": ("before", "o_proj"), "post_norm": ("residual",), "gate": ("post_norm",), "up": ("post_norm",),
    "mlp_act": ("gate", "up"), "mlp_partial": ("mlp_act",), "mlp": ("mlp_partial",), "output": ("residual", "mlp"),
    "norm": ("before",), "logits": ("norm",),
}


def goes_into(point: str, other: str) -> bool:
    """Whether the point ``other`` of a layer (short names) is made from the point ``point``, directly or not."""
    made_from = _MADE_FROM.get(other, ())
    return point in made_from or any(goes_into(point, one) for one in made_from)


def inputs(name: str, num_layers: int, qk_norm: bool) -> list[str]:
    """The points (canonical names) from which a point is made."""
    at, _, point = name.rpartition(".")
    before = int(at.split(".")[1]) - 1 if at else num_layers - 1
    into = "embed" if before < 0 else f"layers.{before}.output"
    left_out = ("q_norm", "k_norm") if not qk_norm else ("q", "k") if point.endswith("_rope") else ()
    return [into if one == "before" else f"{at}.{one}".lstrip(".") for one in _MADE_FROM[point] if one not in left_out]

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
                "residual", "post_norm", "mlp_act", "mlp_partial", "mlp", "output")


def layout(name: str) -> str:
    """``"replicated"``, ``"q_heads"``, ``"kv_heads"``, ``"mlp"``, ``"vocab"`` or ``"partial"`` for a trace point."""
    return _LAYOUTS[name.rpartition(".")[2]]


def point_names(num_layers: int, qk_norm: bool) -> list[str]:
    """All points of a model in the order in which the forward pass reaches them."""
    inner = [p for p in LAYER_POINTS if qk_norm or p not in ("q_norm", "k_norm")]
    return ["embed", *(f"layers.{i}.{p}" for i in range(num_layers) for p in inner), "norm", "logits"]

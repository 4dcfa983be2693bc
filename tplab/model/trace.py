"""Trace points: named places in the forward pass where a tensor can be looked at.

A point costs one attribute look-up when nobody records. The names are the same for tplab and for Hugging Face, so the
two recordings can be laid side by side. ``layout(name)`` says how a point is spread over the ranks.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_LAYOUTS = {
    # replicated: every rank must hold the same values
    "embed": "replicated", "input_norm": "replicated", "o_proj": "replicated", "residual": "replicated",
    "post_norm": "replicated", "mlp": "replicated", "output": "replicated", "norm": "replicated",
    # sharded along the heads (dim 1 of [tokens, heads, head_dim])
    "q": "q_heads", "q_norm": "q_heads", "q_rope": "q_heads", "attn": "q_heads",
    "k": "kv_heads", "k_norm": "kv_heads", "k_rope": "kv_heads", "v": "kv_heads",
    # sharded along the last dimension
    "mlp_act": "mlp", "logits": "vocab",
    # one summand of a row-parallel sum per rank
    "o_partial": "partial", "mlp_partial": "partial",
}
LAYER_POINTS = ("input_norm", "q", "k", "v", "q_norm", "k_norm", "q_rope", "k_rope", "attn", "o_partial", "o_proj",
                "residual", "post_norm", "mlp_act", "mlp_partial", "mlp", "output")

_active = threading.local()


def layout(name: str) -> str:
    """``"replicated"``, ``"q_heads"``, ``"kv_heads"``, ``"mlp"``, ``"vocab"`` or ``"partial"`` for a trace point."""
    return _LAYOUTS[name.rpartition(".")[2]]


def point_names(num_layers: int, qk_norm: bool) -> list[str]:
    """All points of a model in the order in which the forward pass reaches them."""
    inner = [p for p in LAYER_POINTS if qk_norm or p not in ("q_norm", "k_norm")]
    return ["embed", *(f"layers.{i}.{p}" for i in range(num_layers) for p in inner), "norm", "logits"]


@contextmanager
def recording() -> Iterator[dict[str, torch.Tensor]]:
    """Record every point that this thread passes; yields the dictionary that fills up with copies."""
    if getattr(_active, "points", None) is not None:
        raise RuntimeError("a trace is being recorded already")
    _active.points = {}
    try:
        yield _active.points
    finally:
        _active.points = None


def point(name: str, tensor: torch.Tensor) -> None:
    """Pass a trace point. The copy matters: some tensors are overwritten later (the all-reduce works in place)."""
    points = getattr(_active, "points", None)
    if points is not None:
        points[name] = tensor.detach().clone()

"""Hugging Face's arithmetic, one function an operation, in whatever dtype its arguments have.

Casts are made in the same places: statistics of norms, softmax and rotary tables are always float32.
"""

from collections.abc import Callable

import torch

from tplab.model.rope import rotate

LARGEST = 1 << 24  # scores in memory at once, so that a long text does not need all of its length squared


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, kind: str = "RMSNorm",
             over: torch.Tensor | None = None) -> torch.Tensor:
    """``weight * x / rms(x)`` along the last dimension; a ``kind`` of :mod:`tplab.model.norm`; ``over``: the tensor
    whose mean square is taken."""
    y = x.to(torch.float32)
    y = y * torch.rsqrt((y if over is None else over.to(torch.float32)).pow(2).mean(-1, keepdim=True) + eps)
    if kind == "RMSNorm":
        return weight * y.to(x.dtype)
    return (y * ((kind == "GemmaRMSNorm") + weight.to(torch.promote_types(weight.dtype, torch.float32)))).to(x.dtype)


def rotated(model_type: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``x [rows, heads, head_dim]`` rotated by Hugging Face's function for this type of model."""
    x = x.transpose(0, 1)[None]
    return rotate(model_type)(x, x[:, :0], cos, sin)[0][0].transpose(0, 1)  # it wants queries and keys


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """transformers' activation of this name."""
    from transformers.activations import ACT2FN

    return ACT2FN[name]


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """``x`` kept within ``cap``."""
    return torch.tanh(x / cap) * cap


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scaling: float,
           cap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Eager attention: q ``[n, heads, dim]``, k and v ``[m, heads, dim]``, visible ``[n, m]`` boolean; scores within
    ``cap``; a sink for each head."""
    k, v = k.permute(1, 2, 0), v.transpose(0, 1)
    rows = max(1, LARGEST // max(1, len(k) * k.shape[2]))
    found = []
    for some, seen in zip(q.split(rows), visible.split(rows)):
        scores = some.transpose(0, 1) @ k * scaling
        scores = (soft_cap(scores, cap) if cap else scores).masked_fill_(~seen, float("-inf"))
        if sinks is None:
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        else:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, len(some), 1)], -1)
            weights = torch.softmax(scores, -1)[..., :-1]
        found.append((weights @ v).transpose(0, 1))
    return torch.cat(found)


def route(logits: torch.Tensor, moe) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits ``[rows, experts]`` → weights and ids of each row's experts, by a configuration of experts."""
    if not moe.softmax_first:
        chosen, ids = torch.topk(logits, moe.top_k, -1)
        return torch.softmax(chosen, -1), ids
    weights, ids = torch.topk(torch.softmax(logits, -1, dtype=torch.float32), moe.top_k, -1)
    weights = weights / weights.sum(-1, keepdim=True) if moe.renormalize else weights
    return weights if moe.wide_weights else weights.to(logits.dtype), ids


def clamped(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gpt-oss' gated activation."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def as_dtype(dtype: torch.dtype, x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Stored as ``x / scale`` in a narrow floating-point dtype, and read again."""
    largest = torch.finfo(dtype).max
    return (x / scale).clamp(-largest, largest).to(torch.float32).to(dtype).to(x.dtype) * scale


def distance(ours: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, each row's relative to the row's largest value in ``right``, ``[rows, …]`` both.

    Row by row, because the first token's activations can be a thousand times the others'. Entries that are not finite
    in ``right`` are left out; an entry that is not finite in ``ours`` alone counts as infinitely far.
    """
    if not right.numel():
        return 0.0
    ours, right = ours.to(right.dtype).flatten(1), right.flatten(1)
    gap, scale = (ours - right).abs_().amax(1), torch.maximum(right.amax(1), -right.amin(1))
    if gap.max().isfinite():  # then all is
        return (gap / scale.clamp(min=max(1e-4 * scale.max().item(), 1e-30))).max().item()
    known = torch.isfinite(right)
    gap = (ours - right).abs().masked_fill_(~known, 0).nan_to_num_(nan=float("inf"), posinf=float("inf"))
    size = right.abs().masked_fill_(~known, 0)
    scale = size.amax(1)
    return (gap.amax(1) / scale.clamp(min=max(1e-4 * scale.max().item(), 1e-30))).max().item()

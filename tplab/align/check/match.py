"""The dimensions along which tensors are dealt out, and usual shares of them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

Indices = tuple[int, ...]  # labels: numbers of items in the whole, in the rank's order
PADDING = -1


class Group(NamedTuple):
    """A dimension: the points along it, the plan's name for it, and the points that are wrong, too, where it is dealt
    out wrongly."""

    words: str
    points: tuple[str, ...]
    plan: str
    behind: tuple[str, ...] = ()


PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
GROUPS = {"q": Group("query heads", ("q", "q_norm", "q_rope", "attn"), "q_heads", ("attn", "o_partial", "o_proj")),
          "k": Group("key heads", ("k", "k_norm", "k_rope"), "kv_heads", ("attn",)),
          "v": Group("value heads", ("v",), "kv_heads", ("attn",)),
          "mlp": Group("MLP columns", ("gate", "mlp_act", "up"), "mlp", ("mlp_partial", "mlp")),
          "vocab": Group("vocabulary rows", ("logits",), "vocab")}
GROUP_OF = {point: key for key, dimension in GROUPS.items() for point in dimension.points}


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors differ by rounding only; NaN and infinity count as 0."""
    if a.shape != b.shape:
        return False
    left, right = (torch.nan_to_num(tensor.float(), 0.0, 0.0, 0.0) for tensor in (a, b))
    return bool((left - right).norm() <= {torch.float64: 1e-4, torch.float32: 1e-3}.get(a.dtype, 5e-2) * right.norm())


def real_items(labels: Sequence[int]) -> tuple[list[int], Indices]:
    """Each item's first place in a rank's tensor, and its label; padding is no item."""
    first = {label: at for at, label in reversed(list(enumerate(labels))) if label != PADDING}
    kept = sorted(first.values())
    return kept, tuple(labels[at] for at in kept)

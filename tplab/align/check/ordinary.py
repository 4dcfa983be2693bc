"""Differences that a right engine of lower precision may have: random, small, and in nearly all rows."""

import torch

from tplab.align.guilty import by_row

_ABLE = {"q", "k", "v", "attn", "o_partial", "o_proj", "gate", "up", "mlp_act", "mlp_partial", "mlp", "logits"}


def noisy(report, names: list[str]) -> bool:
    """Whether points are off at random, by as much as eight bits round, and in every layer that has them."""
    judge, kinds = report.judge, {name.rpartition(".")[2] for name in names}
    alike = {name for name in report.local if name.rpartition(".")[2] in kinds}
    return alike == set(names) and kinds <= _ABLE and all(
        _noise(judge.held(name, of), judge.expected(name, of), judge.tolerance(name, of))
        for name in names for of in report.local[name].guilty)


def _noise(held: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    """Whether a difference is small beside the right values, no multiple of them, and in nearly all rows."""
    off, size = (held.to(right.dtype) - right).flatten(1), right.norm()
    return bool(off.isfinite().all() and 5e-3 * size <= off.norm() <= 0.2 * size and (
        off * right.flatten(1)).sum().abs() <= 0.8 * off.norm() * size and (
        by_row(held, right) > tolerance).double().mean() >= 0.8)

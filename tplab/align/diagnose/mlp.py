"""Mistakes of what stands between the MLP's products."""

from collections.abc import Callable

import torch
from torch.nn import functional as F

from tplab.align.arithmetic import activation
from tplab.align.diagnose.altered import At, misfit
from tplab.align.diagnose.case import Case
from tplab.align.diagnose.table import Family, Mistake

ACTIVATIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "relu²": lambda x: F.relu(x) ** 2, "no activation": lambda x: x}


def _ways(case: Case) -> dict[str, Callable]:
    """Other activations, and the model's applied elsewhere: in words → ``act(gate, up)``."""
    own, act = case.config.hidden_act, activation(case.config.hidden_act)
    return {f"{name}(gate) × up": lambda gate, up, f=f: f(gate) * up for name, f in ACTIVATIONS.items()} | {
        f"{own}(gate), up left out": lambda gate, up: act(gate),
        f"{own}(up), gate left out": lambda gate, up: act(up),
        f"{own}(gate) × {own}(up)": lambda gate, up: act(gate) * act(up),
        f"{own}(gate × up)": lambda gate, up: act(gate * up),
        f"{own}(gate) + up": lambda gate, up: act(gate) + up}


def _other_ways(case: Case) -> dict[str, str]:
    """The best of those that fit, with all of them in words: rounding can hide which it is."""
    gaps = {way: misfit(case, lambda at, act=act: {"act": act}) for way, act in _ways(case).items()}
    found = sorted((way for way, gap in gaps.items() if gap <= case.tolerance), key=gaps.get)
    alike = " (these numbers are too coarse to tell which)" * (len(found) > 1)
    right = f"{case.config.hidden_act}(gate) × up"
    return {way: " or ".join(found) + alike for way in found[:1] if way != right}


def _fused_act(change: Callable) -> Callable:
    """The activation of columns that were split in another way than they were filled."""
    def made(at: At) -> torch.Tensor:
        first, second = change(at.make("gate"), at.make("up"))
        return activation(at.case.config.hidden_act)(first) * second
    return made


MLP = (
    Family("mlp_act", Mistake(
        "gate_up_order", "{op} is act(up) × gate: gate and up were taken for each other. In a fused projection their "
        "order is [gate|up].", _fused_act(lambda gate, up: (up, gate)))),
    Family(("gate", "up"), Mistake(
        "gate_up_order", "{op} is what {text} should be: the two were taken for each other.",
        lambda at, other: at.make(other), lambda case: {other: other for other in ("gate", "up") if other != case.op}),
        own=True),
    Family("mlp_act", Mistake("wrong_activation", "{op} is {text}; right is {c.hidden_act}(gate) × up.",
                              lambda at, way: {"act": _ways(at.case)[way]}, _other_ways)),
    Family("mlp_act", Mistake(
        "gate_up_interleaved", "The fused tensor behind {op} was split in another way than it was filled: it holds "
        "[gate|up], and was read as gate 0, up 0, gate 1, up 1, ….", _fused_act(
            lambda gate, up: torch.cat([gate, up], 1).unflatten(1, (-1, 2)).unbind(-1))), Mistake(
        "gate_up_interleaved", "The fused tensor behind {op} was split in another way than it was filled: it holds "
        "gate 0, up 0, gate 1, up 1, …, and was read as [gate|up].", _fused_act(
            lambda gate, up: torch.stack([gate, up], -1).flatten(1).chunk(2, 1)))),
)

"""Hypotheses about the MLP's inside: gate, up and what is made of them."""

import torch
from torch.nn import functional as F

from tplab.align.diagnose.case import Case, Diagnosis
from tplab.align.diagnose.registry import hypothesis
from tplab.align.diagnose.wrong import OnRank, activation, explains, fitting, linear, right

_ACTIVATIONS = {
    "silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "sigmoid": torch.sigmoid, "tanh": torch.tanh,
    "relu²": lambda x: F.relu(x) ** 2, "no activation": lambda x: x}


@hypothesis("mlp_act")
def gate_and_up_exchanged(case: Case) -> Diagnosis | None:
    """Was the activation applied to up instead of gate?"""
    if explains(case, lambda at, op: activation(case)(at("up")) * at("gate")):
        return case.diagnosis("gate_up_order", f"{case.op} is act(up) × gate: the two halves of the fused "
                              "projection were taken for each other. Its order is [gate|up].")


@hypothesis("gate", "up")
def gate_is_up(case: Case) -> Diagnosis | None:
    """Is gate what up should be, or the other way round?"""
    other = {"gate": "up", "up": "gate"}[case.op]
    if case.op == case.point and explains(case, lambda at, op: linear(at, other)):
        return case.diagnosis("gate_up_order", f"{case.op} is what {other} should be: the two were taken for each "
                              "other.")


@hypothesis("gate", "up", last=True)
def features_in_other_places(case: Case) -> Diagnosis | None:
    """Is every feature on a rank one of this layer's, in another place?"""
    if case.op != case.point:
        return None
    every = torch.arange(case.config.intermediate_size)
    for rank in case.wrong_ranks:
        at = right(case, rank)
        gaps = torch.cdist(case.shard(case.op, rank).double().T, linear(at, case.op, features=every).double().T,
                           p=float("inf"))
        if not torch.isfinite(gaps).all() or (
                gaps.min(1).values > case.tolerance * case.shard(case.op, rank).abs().max()).any():
            return None
    column, wanted = next((column, wanted) for column, wanted in zip(gaps.argmin(1).tolist(), at.indices(case.op))
                          if column != wanted)
    return case.diagnosis("mlp_columns", f"Every feature of {case.op} is one of the checkpoint's in another place: "
                          f"rank {rank} has feature {column} where {wanted} belongs. gate, up and the columns of "
                          "down_proj must be cut alike.", rank=rank, column=column, wanted=wanted)


@hypothesis("mlp_act")
def another_activation(case: Case) -> Diagnosis | None:
    """Does another activation fit, or one that is applied elsewhere?"""
    act, right = activation(case), case.config.hidden_act
    wrong = {f"{name}(gate) × up": lambda at, op, f=f: f(at("gate")) * at("up") for name, f in _ACTIVATIONS.items()}
    wrong |= {f"{right}(gate), up left out": lambda at, op: act(at("gate")),
              f"{right}(up), gate left out": lambda at, op: act(at("up")),
              f"{right}(gate) × {right}(up)": lambda at, op: act(at("gate")) * act(at("up")),
              f"{right}(gate × up)": lambda at, op: act(at("gate") * at("up")),
              f"{right}(gate) + up": lambda at, op: act(at("gate")) + at("up")}
    found = fitting(case, wrong)
    if found and found[0] != f"{right}(gate) × up":
        alike = " (these numbers are too coarse to tell which)" * (len(found) > 1)
        return case.diagnosis("wrong_activation", f"{case.op} is {' or '.join(found)}{alike}; right is {right}(gate) "
                              "× up.")


def _fused(at: OnRank) -> torch.Tensor:
    """What this rank's fused projection gives, ``[tokens, gate here | up here]``."""
    return torch.cat([linear(at, "gate"), linear(at, "up")], 1)


@hypothesis("mlp_act")
def gate_and_up_in_turns(case: Case) -> Diagnosis | None:
    """Were gate and up taken to stand in turns in the fused tensor, or as blocks where they stand in turns?"""
    act = activation(case)

    def turns(at, op):
        return act(_fused(at)[:, 0::2]) * _fused(at)[:, 1::2]

    def blocks(at, op):  # columns g0 u0 g1 u1 …, of which the first half is taken for gate
        g, u = linear(at, "gate"), linear(at, "up")
        first, second = torch.stack([g, u], -1).flatten(1).chunk(2, 1)
        return act(first) * second
    for wrong, says in ((turns, "it holds [gate|up], and was read as gate 0, up 0, gate 1, up 1, …"),
                        (blocks, "it holds gate 0, up 0, gate 1, up 1, …, and was read as [gate|up]")):
        if explains(case, wrong):
            return case.diagnosis("gate_up_interleaved", f"The fused tensor behind {case.op} was split in "
                                  f"another way than it was filled: {says}.")

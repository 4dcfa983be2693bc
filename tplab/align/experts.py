"""The operations of :mod:`tplab.align.operations` for experts."""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from tplab.align.arithmetic import activation, clamped, route
from tplab.checkpoint.layout import EXPERTS


class ExpertOperations:
    """A rank's share of each expert is the plan's."""

    def experts_on(self, rank: int) -> dict[int, int]:
        """The experts of which a rank holds a share: the id that the router chooses → the expert with the weights."""
        return {expert: expert for expert in self.plan.ranks[rank].experts}

    def expert(self, at: str, number: int, x: torch.Tensor, columns: range, share: float) -> torch.Tensor:
        """The output of these columns of one expert for some rows; ``share``: the part of its last bias."""
        moe, columns = self.config.experts, slice(columns.start, columns.stop)
        _, *names = (f"model.{at}{name.format(number)}" for name in EXPERTS[moe.stored])
        (w_gate, b_gate), (w_up, b_up), (w_down, b_down) = (
            (self.weights[f"{name}.weight"], self.weights[f"{name}.bias"] if moe.bias else None) for name in names)
        gate, up = (F.linear(x, w[columns], None if b is None else b[columns])
                    for w, b in ((w_gate, b_gate), (w_up, b_up)))
        hidden = clamped(gate, up, *moe.swiglu) if moe.swiglu else activation(self.config.hidden_act)(gate) * up
        y = F.linear(hidden, w_down[:, columns])
        return y if b_down is None else y + share * b_down

    def shared_expert(self, at: str, x: torch.Tensor, columns: range) -> torch.Tensor:
        """The same of the shared expert, which every token uses, times its gate."""
        columns, name = slice(columns.start, columns.stop), f"model.{at}mlp.shared_expert"
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        hidden = activation(self.config.hidden_act)(F.linear(x, gate[columns])) * F.linear(x, up[columns])
        return torch.sigmoid(F.linear(x, self.weights[f"{name}_gate.weight"])) * F.linear(hidden, down[:, columns])

    def experts(self, at: str, point: str, rank: int, *, x: torch.Tensor | None = None, moe=None,
                among: Sequence[int] | None = None, held: dict[int, int] | None = None, share: float | None = None,
                shared: bool = True) -> torch.Tensor:
        """This rank's summand of the output of each token's experts.

        ``moe``: another configuration of the router; ``among``: the experts among which tokens choose; ``held``: as
        :meth:`experts_on` gives them; ``share``: of the experts' last biases; ``shared``: whether the shared expert is
        in it.
        """
        own, moe = self.plan.ranks[rank], moe or self.config.experts
        logits = self.value(at + "router_logits", rank) if x is None else self.linear(at, "router_logits", rank, x=x)
        x = self.given(at, point, rank) if x is None else x
        held = self.experts_on(rank) if held is None else held
        if share is None:  # the bias belongs to the sum: the first rank that holds columns adds it
            share = float(self.plan.enable_expert_parallel or rank == self.holders(at)[0])
        among = torch.arange(moe.num_experts) if among is None else torch.tensor(among)
        weights, ids = route(logits[:, among], moe)
        ids, out = among[ids], torch.zeros_like(x)
        for number, expert in held.items():
            rows, place = torch.where(ids == number)
            if len(rows):
                y = self.expert(at, expert, x[rows], own.expert_mlp, share)
                out.index_add_(0, rows, y * weights[rows, place, None].to(y.dtype))
        if shared and self.config.experts.shared_intermediate_size:
            out = out + self.shared_expert(at, x, own.shared_mlp)
        return out

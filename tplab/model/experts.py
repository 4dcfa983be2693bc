"""Mixture of experts (arXiv:1701.06538): every token goes to the few experts that a router chooses for it.

Router and gates are replicated, so all ranks choose the same experts. A rank holds some columns of every expert (tensor
parallel) or some experts whole (expert parallel, arXiv:2006.16668). In both cases it computes a summand of the block's
output, and one all-reduce adds the summands. Names are those of vLLM's ``FusedMoE``.
"""

from collections.abc import Callable

import torch
from torch import nn

from tplab.model.mlp import GatedMLP
from tplab.model.trace import point
from tplab.ranks import all_reduce, rank
from tplab.shard import ReplicatedLinear, ShardPlan

Route = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def softmax_then_top_k(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits ``[tokens, experts]`` → weights and global ids of each token's experts, both ``[tokens, top_k]``.

    The weights are probabilities over *all* experts, in float32, divided by their sum where ``renormalize`` says so.
    """
    weights, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), top_k, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights, ids


def top_k_then_softmax(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with probabilities over the chosen experts alone, in the logits' dtype (gpt-oss)."""
    chosen, ids = torch.topk(logits, top_k, dim=-1)
    return torch.softmax(chosen, dim=-1), ids


def routed_by(moe) -> Route:
    """The routing function that an :class:`tplab.checkpoint.traits.ExpertsConfig` describes."""
    def route(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = (softmax_then_top_k(logits, moe.top_k, moe.renormalize) if moe.softmax_first
                        else top_k_then_softmax(logits, moe.top_k))
        return weights if moe.wide_weights else weights.to(logits.dtype), ids
    return route


class ClampedMLP(GatedMLP):
    """gpt-oss' expert: ``(up + 1) * gate * sigmoid(alpha * gate)``, gate and up kept within a limit."""

    def __init__(self, *args, swiglu: tuple[float, float], **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha, self.limit = swiglu

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj.split(self.gate_up_proj(x))
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class FusedMoE(nn.ModuleDict):
    """The experts of which this rank holds something, by their global ids."""

    def __init__(self, config, plan: ShardPlan, dtype: torch.dtype):
        moe = config.experts
        make, options = (ClampedMLP, {"swiglu": moe.swiglu}) if moe.swiglu else (GatedMLP, {})
        columns = {expert: [shard.expert_mlp if expert in shard.experts else range(0) for shard in plan.ranks]
                   for expert in plan.ranks[rank()].experts}
        super().__init__({str(expert): make(config, moe.intermediate_size, parts, bias=moe.bias, dtype=dtype, **options)
                          for expert, parts in columns.items()})

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """This rank's summand, ``[tokens, hidden]``, of what the experts ``ids`` give, in Hugging Face's order."""
        partial = torch.zeros_like(x)
        for expert, mlp in self.items():
            assert isinstance(mlp, GatedMLP)
            place, rows = torch.where(ids.T == int(expert))
            if len(rows):
                weighted = mlp.partial(x[rows]) * weights[rows, place, None]
                partial.index_add_(0, rows, weighted.to(partial.dtype))
        return partial


class SparseMoeBlock(nn.Module):
    """The experts of a layer, instead of an MLP. A shared expert, if the model has one, has its own gate."""

    def __init__(self, config, plan: ShardPlan, layer: int, dtype: torch.dtype):
        super().__init__()
        moe, self.layer = config.experts, layer
        self.gate = ReplicatedLinear(config.hidden_size, moe.num_experts, bias=moe.bias, dtype=dtype)
        self.route = routed_by(moe)
        self.experts = FusedMoE(config, plan, dtype)
        self.shared_expert = self.shared_expert_gate = None
        if moe.shared_intermediate_size:
            self.shared_expert = GatedMLP(config, moe.shared_intermediate_size,
                                          [shard.shared_mlp for shard in plan.ranks], bias=False, dtype=dtype)
            self.shared_expert_gate = ReplicatedLinear(config.hidden_size, 1, dtype=dtype)

    def partial(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """This rank's summand, ``[tokens, hidden]``."""
        partial = self.experts(x, *self.route(logits))
        if self.shared_expert is not None and self.shared_expert_gate is not None:
            partial = partial + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert.partial(x)
        return partial

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` → ``[tokens, hidden]``, whole on every rank."""
        name = f"layers.{self.layer}."
        logits = self.gate(x)
        logits = point(name + "router_logits", logits)
        partial = self.partial(x, logits)
        partial = point(name + "moe_partial", partial)
        out = all_reduce(partial)
        return point(name + "mlp", out)

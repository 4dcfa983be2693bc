"""The gated MLP: two column-parallel matrices as one, a product, one row-parallel matrix (Megatron-LM's pattern)."""

from collections.abc import Sequence

import torch
from torch import nn

from tplab.model.trace import point
from tplab.shard import MergedColumnParallelLinear, RowParallelLinear, ShardPlan


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` over this rank's intermediate columns: a dense MLP, or one expert.

    Args:
        size: **global** intermediate columns; ``columns`` are one range of them per rank.
    """

    def __init__(self, config, size: int, columns: Sequence[range], *, bias: bool, dtype: torch.dtype):
        super().__init__()
        from transformers.activations import ACT2FN

        self.act = ACT2FN[config.hidden_act]
        self.layer: int | None = None  # its points have a name in a dense layer alone
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, [size] * 2, parts=[columns, columns],
                                                       bias=bias, dtype=dtype)
        self.down_proj = RowParallelLinear(size, config.hidden_size, parts=columns, bias=bias, dtype=dtype)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` → ``[tokens, columns here]``."""
        gate, up = self.gate_up_proj.split(self.gate_up_proj(x))
        if self.layer is not None:
            gate, up = point(f"layers.{self.layer}.gate", gate), point(f"layers.{self.layer}.up", up)
        return self.act(gate) * up

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, ``[tokens, hidden]``."""
        return self.down_proj.partial(self.gated(x))


class TensorParallelMLP(GatedMLP):
    """A dense layer's MLP; one all-reduce. Any split works."""

    def __init__(self, config, plan: ShardPlan, layer: int, dtype: torch.dtype):
        super().__init__(config, config.intermediate_size, [shard.mlp for shard in plan.ranks], bias=config.mlp_bias,
                         dtype=dtype)
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` → ``[tokens, hidden]``, whole on every rank."""
        name = f"layers.{self.layer}."
        hidden = self.gated(x)
        hidden = point(name + "mlp_act", hidden)
        partial = self.down_proj.partial(hidden)
        partial = point(name + "mlp_partial", partial)
        out = self.down_proj.reduce(partial)
        return point(name + "mlp", out)

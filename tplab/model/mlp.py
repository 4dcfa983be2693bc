"""The gated MLP: two column-parallel matrices as one, a product, one row-parallel matrix (Megatron-LM's pattern)."""

import torch
from torch import nn

from tplab.model.trace import point
from tplab.shard import MergedColumnParallelLinear, RowParallelLinear, ShardPlan


class TensorParallelMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` over this rank's intermediate columns; one all-reduce. Any split works."""

    def __init__(self, config, plan: ShardPlan, layer: int, dtype: torch.dtype):
        super().__init__()
        from transformers.activations import ACT2FN

        self.layer, self.act = layer, ACT2FN[config.hidden_act]
        columns = [shard.mlp for shard in plan.ranks]
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, [config.intermediate_size] * 2,
                                                       parts=[columns, columns], bias=config.mlp_bias, dtype=dtype)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, parts=columns,
                                           bias=config.mlp_bias, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` → ``[tokens, hidden]``, whole on every rank."""
        name = f"layers.{self.layer}."
        gate, up = self.gate_up_proj.split(self.gate_up_proj(x))
        hidden = self.act(gate) * up
        point(name + "mlp_act", hidden)
        partial = self.down_proj.partial(hidden)
        point(name + "mlp_partial", partial)
        out = self.down_proj.reduce(partial)
        point(name + "mlp", out)
        return out

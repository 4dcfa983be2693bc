"""RMSNorm, with Hugging Face's float32 cast (arXiv:1910.07467)."""

import torch
from torch import nn
from torch.nn import functional as F

from tplab.shard.parameter import sharded_parameter


class RMSNorm(nn.Module):
    """``weight * x / rms(x)``; statistics in float32 whatever the working dtype, exactly where Hugging Face casts."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype):
        super().__init__()
        self.eps = eps
        self.weight = sharded_parameter(self, "weight", torch.empty(size, dtype=dtype), [range(size)])

    def load(self, parameter: str, source) -> None:
        """Fill ``"weight"``: replicated, so whole."""
        getattr(self, parameter).data.copy_(source[:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:  # nothing to cast: the fused function gives the same bits in half the time
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        y = F.rms_norm(x.to(torch.float32), self.weight.shape, None, self.eps)
        return self.weight * y.to(x.dtype)

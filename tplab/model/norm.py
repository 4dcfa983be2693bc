"""RMSNorm, with Hugging Face's float32 cast (arXiv:1910.07467)."""

import torch
from torch import nn

from tplab.kernels.fused import rms_norm, rms_norm_by_torch
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
        y = rms_norm(x, self.weight, self.eps)
        return rms_norm_by_torch(x, self.weight, self.eps) if y is None else y

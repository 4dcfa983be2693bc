"""RMSNorm, with Hugging Face's float32 cast (arXiv:1910.07467)."""

import torch
from torch import nn

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
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class WideRMSNorm(RMSNorm):
    """The same, multiplied before the cast back (OLMo-2, gpt-oss): another rounding in bfloat16 alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


class GemmaRMSNorm(RMSNorm):
    """``(1 + weight) * x / rms(x)``, all of it in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.to(torch.float32))).to(x.dtype)


def make_norm(config, size: int, dtype: torch.dtype) -> RMSNorm:
    """The kind of norm that a :class:`tplab.checkpoint.ModelConfig` names."""
    kinds = {kind.__name__: kind for kind in (RMSNorm, WideRMSNorm, GemmaRMSNorm)}
    return kinds[config.norm](size, config.rms_norm_eps, dtype)

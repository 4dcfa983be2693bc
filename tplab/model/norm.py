"""RMSNorm, with Hugging Face's float32 cast (arXiv:1910.07467), of the residual stream and of q and k."""

import torch
from torch import nn

from tplab.ranks import all_gather, rank
from tplab.shard import ShardPlan
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

    def inverse_rms(self, wide: torch.Tensor) -> torch.Tensor:
        """``[…, size]`` → ``[…, 1]``."""
        return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * self.inverse_rms(wide)
        return self.weight * wide.to(x.dtype)


class WideRMSNorm(RMSNorm):
    """The same, multiplied before the cast back (OLMo-2, gpt-oss): another rounding in bfloat16 alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * self.inverse_rms(wide)
        return (self.weight * wide).to(x.dtype)


class GemmaRMSNorm(RMSNorm):
    """``(1 + weight) * x / rms(x)``, all of it in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * self.inverse_rms(wide)
        return (wide * (1.0 + self.weight.to(torch.float32))).to(x.dtype)


def make_norm(config, size: int, dtype: torch.dtype) -> RMSNorm:
    """The kind of norm that a :class:`tplab.checkpoint.ModelConfig` names."""
    kinds = {kind.__name__: kind for kind in (RMSNorm, WideRMSNorm, GemmaRMSNorm)}
    return kinds[config.norm](size, config.rms_norm_eps, dtype)


def norm_each_head(q_norm: RMSNorm, k_norm: RMSNorm, q: torch.Tensor, k: torch.Tensor
                   ) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k ``[tokens, heads here, head_dim]`` normalised head by head (Qwen3); it needs nothing from other ranks."""
    return q_norm(q), k_norm(k)


class FullWidthNorm:
    """q and k normalised over all heads of the model (OLMo-2): one all-gather, since a rank sees only its own.

    Summing up the ranks' squares would send less, but add in another order than Hugging Face does, in float32.
    """

    def __init__(self, plan: ShardPlan):
        self.shard, self.sizes = plan.ranks[rank()], [len(s.q_heads) + len(s.kv_heads) for s in plan.ranks]
        gathered = [(kind, head) for s in plan.ranks for kind in ("q_heads", "kv_heads") for head in getattr(s, kind)]
        # Where each head stands among the gathered ones; a KV head that several ranks hold counts once.
        self.at = [[gathered.index((kind, head)) for head in range(count)]
                   for kind, count in (("q_heads", plan.num_heads), ("kv_heads", plan.num_kv_heads))]

    def __call__(self, q_norm: RMSNorm, k_norm: RMSNorm, q: torch.Tensor, k: torch.Tensor
                 ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = all_gather(torch.cat([q, k], dim=1), dim=1, sizes=self.sizes)
        q, k = (norm(whole[:, at].flatten(1)).unflatten(1, (len(at), -1))
                for norm, at in zip((q_norm, k_norm), self.at))
        q_heads, kv_heads = self.shard.q_heads, self.shard.kv_heads
        return q[:, q_heads.start:q_heads.stop], k[:, kv_heads.start:kv_heads.stop]

"""``x @ weight.T``, and how a weight lies in memory so that this is quick on a CPU.

Decoding one sequence reads every weight once per token, so it is as fast as weights stream from memory, and kernels
differ in how well they stream. Measured on one core (GB/s, float32, weights beyond the cache, one row of ``x``):
``F.linear`` on ``[out, in]`` rows 12 to 20, numpy's BLAS on the transpose 20 to 28, of 30 that reading alone reaches.
Several rows go through ``F.linear`` as they do in Hugging Face: oneDNN was 1.1 to 1.4 times as fast, and three times as
far from the float64 result on SmolLM2.
"""

import numpy as np
import torch
from torch.nn import functional as F


def empty_weight(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """An unfilled ``[out_features, in_features]`` weight. In float32 its *columns* are contiguous in memory."""
    if dtype == torch.float32:
        return torch.empty(in_features, out_features, dtype=dtype).t()
    return torch.empty(out_features, in_features, dtype=dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, as ``torch.nn.functional.linear``; ``x`` is ``[rows, in]``, ``weight`` ``[out, in]``."""
    if x.dtype != torch.float32 or weight.stride(0) != 1 or x.dim() != 2 or len(x) != 1 or x.requires_grad:
        return F.linear(x, weight, bias)
    y = torch.from_numpy(np.matmul(x.numpy(), weight.detach().numpy().T))
    return y if bias is None else y.add_(bias)

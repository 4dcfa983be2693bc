"""``x @ weight.T``, and how a weight lies in memory so that this is quick on a CPU.

Decoding reads every weight once per step, so it is as fast as weights stream from memory, and kernels differ in how
well they stream. Measured on one core (GB/s, float32, weights beyond the cache, one row of ``x``): ``F.linear`` on
``[out, in]`` rows 12 to 20, numpy's BLAS on the transpose 20 to 28, of 30 that reading alone reaches. With a few rows,
one product after the other, each weight still warm from the row before, beats one product of them all (two rows 1.2
times, four rows 1.1 to 1.5 times, about even at six). More rows go through ``F.linear`` as they do in Hugging Face:
oneDNN was 1.1 to 1.4 times as fast, and three times as far from the float64 result on SmolLM2.
"""

import numpy as np
import torch
from torch.nn import functional as F

FEW_ROWS = 6
WARM_BYTES = 1 << 22  # so much of a weight is multiplied with all rows before the next part is read


def empty_weight(out_features: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """An unfilled ``[out_features, in_features]`` weight. In float32 its *columns* are contiguous in memory."""
    if dtype == torch.float32:
        return torch.empty(in_features, out_features, dtype=dtype).t()
    return torch.empty(out_features, in_features, dtype=dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, as ``torch.nn.functional.linear``; ``x`` is ``[rows, in]``, ``weight`` ``[out, in]``."""
    if (x.dtype != torch.float32 or weight.stride(0) != 1 or x.dim() != 2 or not 0 < len(x) <= FEW_ROWS
            or x.requires_grad):
        return F.linear(x, weight, bias)
    y = torch.from_numpy(_row_by_row(x.numpy(), weight.detach().numpy().T))
    return y if bias is None else y.add_(bias)


def _row_by_row(x: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """``x [rows, in] @ columns [in, out]``, a product for each row."""
    if len(x) == 1:
        return np.matmul(x, columns)
    width = max(16, WARM_BYTES // columns[:, :1].nbytes // 16 * 16)
    y = np.empty((len(x), columns.shape[1]), dtype=x.dtype)
    for start in range(0, columns.shape[1], width):
        warm = columns[:, start:start + width]
        for row in range(len(x)):
            np.matmul(x[row:row + 1], warm, out=y[row:row + 1, start:start + width])
    return y

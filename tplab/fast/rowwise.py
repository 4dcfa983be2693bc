"""The operations between the products of a layer, row by row in float32: plain loops that LLVM vectorises."""

import numpy as np

from tplab.fast.compiled import inner
from tplab.fast.simd import largest, rounded, widened


@inner
def exp(x):
    """The exponential of a float32 number, within 2e-7 of it (Cephes' polynomial); 0 below -87.3."""
    low = x if not x < np.float32(-87.3) else np.float32(-87.3)  # NaN stays NaN
    low = low if not low > np.float32(88.7) else np.float32(88.7)
    n = np.floor(low * np.float32(1.44269504) + np.float32(0.5))
    r = (low - n * np.float32(0.693359375)) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r + np.float32(c)
    y = y * r * r + r + np.float32(1)
    y *= np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return y if not x < np.float32(-87.3) else np.float32(0)


@inner
def copy(x, y):
    """``y = x``, in the format of ``y``; the rest of ``y`` becomes zero."""
    for i in range(len(x)):
        y[i] = rounded(y, widened(x[i]))
    y[len(x):] = 0


@inner
def add(x, y):
    """``y += x``; nothing if ``x`` is empty, as the bias of a layer without one is."""
    for i in range(len(x)):
        y[i] += x[i]


@inner
def rms_norm(x, weight, eps, y):
    """``y = weight * x / rms(x)`` (arXiv:1910.07467); the rest of ``y`` becomes zero."""
    squares = np.float32(0)
    for i in range(len(x)):
        squares += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(squares / np.float32(len(x)) + eps)
    for i in range(len(x)):
        y[i] = rounded(y, x[i] * scale * weight[i])
    y[len(x):] = 0


@inner
def apply_rotary_pos_emb(head, cos, sin, y):
    """``y = head * cos + cat(-head[half:], head[:half]) * sin``"""
    half = len(head) // 2
    for i in range(half):
        a, b = head[i], head[half + i]
        y[i] = rounded(y, a * cos[i] - b * sin[i])
        y[half + i] = rounded(y, b * cos[half + i] + a * sin[half + i])


@inner
def silu_and_mul(gate, up, y):
    """``y = silu(gate) * up``; the rest of ``y`` becomes zero."""
    for i in range(len(gate)):
        y[i] = rounded(y, gate[i] / (np.float32(1) + exp(-gate[i])) * up[i])
    y[len(gate):] = 0


@inner
def softmax(scores, scaling, y):
    """``y = softmax(scores * scaling)``, but for a factor, the same for all, which is returned.

    ``scaling`` is positive; the rest of ``y`` becomes zero.
    """
    most, total = np.float32(-np.inf), np.float32(0)
    for i in range(len(scores)):
        most = largest(most, scores[i])
    for i in range(len(scores)):
        number = exp((scores[i] - most) * scaling)
        total += number
        y[i] = rounded(y, number)
    y[len(scores):] = 0
    return np.float32(1) / total


@inner
def scale(x, factor, y):
    """``y = x * factor``; the rest of ``y`` becomes zero."""
    for i in range(len(x)):
        y[i] = rounded(y, x[i] * factor)
    y[len(x):] = 0

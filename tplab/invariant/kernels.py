"""Products, attention, norms and activations whose bits do not depend on the batch, in numpy.

A sum of whole multiples of one unit, each product below 2 ** 53 units, is exact in float64: no order of its additions
changes it. So each row of a product's operands is rounded to whole multiples of a power of two, and any library may add
up their products as it likes. The rounding is about as large as that of a float32 product. All else here is made of
additions, multiplications, divisions and square roots of single numbers: IEEE 754 defines their bits, wherever a number
stands in an array. A library's ``exp`` is not among them: it may compute the end of an array differently.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from tplab.invariant.tree import additions

LONGEST = 128  # inputs that one exact sum adds up: with more of them, fewer bits would be left for each
SHARES = 2.0 ** 32  # a softmax's weights become whole multiples of its inverse
_LOWEST = np.float32(-87.3)  # below it, an exponential is zero
_EXP = [np.float32(number) for number in (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)]


def power_of_two(x: np.ndarray) -> np.ndarray:
    """``[…, inputs]`` in float64 → ``[…, 1]``: the largest power of two that is no larger than a row's largest number.
    0 for zeros, infinity for NaN."""
    return (np.abs(x).max(-1, keepdims=True).view(np.int64) & 0x7FF << 52).view(np.float64)


@np.errstate(invalid="ignore")  # infinity less infinity is NaN
def whole(x: np.ndarray, length: int = LONGEST) -> np.ndarray:
    """``[…, inputs]`` rounded to whole multiples of a unit of its row, in float64; a row with NaN becomes NaN.

    The products of two such rows can be added up ``length`` times before they need more than 53 bits.
    """
    wide, bits = x.astype(np.float64), (51 - (length - 1).bit_length()) // 2
    shift = power_of_two(wide) * (1.5 * 2.0 ** (52 - bits))  # beside it, a float64 number has no bits below the unit
    wide += shift
    wide -= shift
    return wide


def matmul(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """``x @ y`` of whole multiples, on this rank's threads."""
    return torch.matmul(torch.from_numpy(x), torch.from_numpy(y)).numpy()


class Product:
    """``x @ weight.T`` in float32: each number has the same bits, whatever stands beside it.

    The inputs are cut into ``leaves`` (pieces of at most :data:`LONGEST` if not given), of which each is an exact sum.
    These are added up along the tree below each of ``nodes`` (see :mod:`tplab.invariant.tree`): one product for each.
    ``length`` is that of the longest leaf on any rank.
    """

    def __init__(self, weight: torch.Tensor, leaves: Sequence[range] = (), nodes: Sequence[tuple[int, int]] = (),
                 length: int = LONGEST):
        (_, inputs), self.dtype, self.length = weight.shape, weight.dtype, length
        leaves = leaves or [range(first, min(first + LONGEST, inputs)) for first in range(0, inputs, LONGEST)]
        nodes, widest = nodes or [(0, len(leaves))], max(map(len, leaves))
        # Where each leaf's inputs stand; shorter leaves are filled up with a column of zeros behind the last input.
        self.places = np.array([[*leaf, *[inputs] * (widest - len(leaf))] for leaf in leaves])
        self.is_even = len(leaves) * widest == inputs
        self.weight = torch.from_numpy(whole(self._by_leaves(weight), length).swapaxes(1, 2).copy())
        self.at, done, levels = [first for first, _ in nodes], defaultdict(int), defaultdict(list)
        for left, right in (add for node in nodes for add in additions(*node)):
            done[left] = max(done[left], done[right]) + 1
            levels[done[left]].append((left, right))
        self.levels = [np.array(levels[level]).T for level in sorted(levels)]  # additions that can be one operation

    def _by_leaves(self, x: torch.Tensor) -> np.ndarray:
        """``[rows, inputs]`` → ``[leaves, rows, length]``."""
        wide = x.float().numpy()
        if self.is_even:
            return wide.reshape(len(wide), *self.places.shape).swapaxes(0, 1)
        return np.concatenate([wide, np.zeros((len(wide), 1), np.float32)], 1)[:, self.places].swapaxes(0, 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, inputs]`` in the weight's dtype → ``[nodes, rows, outputs]`` in float32."""
        y = (torch.from_numpy(whole(self._by_leaves(x), self.length)) @ self.weight).float()
        if not self.levels:
            return y
        leaves = y.numpy()
        for left, right in self.levels:
            leaves[left] += leaves[right]
        return y[self.at]


@np.errstate(invalid="ignore")  # the exponent of NaN
def exp(x: np.ndarray) -> np.ndarray:
    """The exponential of float32 numbers, within 2e-7 of it (Cephes' polynomial); 0 below -87.3."""
    near = np.minimum(np.maximum(x, _LOWEST), np.float32(88.7))
    n = np.floor(near * np.float32(1.44269504) + np.float32(0.5))
    r = near - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = r * _EXP[0]
    for coefficient in _EXP[1:]:
        y += coefficient
        y *= r
    y *= r
    y += r
    y += np.float32(1)
    y *= (n.astype(np.int32) + 127 << 23).view(np.float32)
    y[x < _LOWEST] = 0
    return y


def silu(x: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(x)``, number by number."""
    wide = x.float().numpy()
    return torch.from_numpy(wide / (np.float32(1) + exp(-wide))).to(x.dtype)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``[…, size]`` in float32 → ``[…, 1]``: what an RMSNorm multiplies each row by, computed in float64."""
    squares = np.square(whole(x.numpy(), x.shape[-1]))
    return torch.from_numpy((1 / np.sqrt(squares.mean(-1, keepdims=True) + eps)).astype(np.float32))


@np.errstate(invalid="ignore")
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float) -> torch.Tensor:
    """:func:`tplab.model.attention.attend`, in float32. A key that a query does not see adds an exact zero, so it does
    not matter how many of them there are."""
    dtype, head_dim = q.dtype, q.shape[-1]
    q, keys, values = (x.float().numpy() for x in (q, k, v))
    grouped = q.reshape(len(q), k.shape[1], -1, head_dim)  # the queries of a KV head stand together
    scores = matmul(whole(grouped, head_dim), whole(keys, head_dim).swapaxes(2, 3)) * scaling
    scores = scores.astype(np.float32).reshape(*q.shape[:3], -1)
    scores = np.where(mask.numpy(), -np.float32(np.inf), scores)
    weights = np.rint(exp(scores - scores.max(-1, keepdims=True)).astype(np.float64) * SHARES)
    total = weights.sum(-1, keepdims=True)
    # A value's unit joins its weight: what is added up below is whole in one unit for all keys.
    units = power_of_two(values.astype(np.float64))
    shares = whole((weights / total).reshape(*grouped.shape[:3], -1) * units.swapaxes(2, 3))
    numbers = whole(values) / np.where(units == 0, 1, units)
    y = np.zeros(grouped.shape)
    for first in range(0, k.shape[2], LONGEST):  # these sums are added in the order of the positions
        y += matmul(shares[..., first:first + LONGEST], numbers[:, :, first:first + LONGEST])
    return torch.from_numpy(y.astype(np.float32).reshape(q.shape)).to(dtype)

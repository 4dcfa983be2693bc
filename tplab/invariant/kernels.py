"""Products, attention, norms and activations with one fixed order for every sum.

numba compiles these loops without permission to change the order of additions, so a number is the same whether it is
computed inside a vector or in the rest after it, in a long array or in a short one.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from tplab.fast import rowwise
from tplab.fast.compiled import entry, in_order
from tplab.fast.linear import linear_by_vectors, pack_weight, padded, panels, per_word
from tplab.fast.simd import WIDTH
from tplab.invariant.tree import additions

KEYS = 64  # whose values are added up before they join the sum of those before

exp = in_order(rowwise.exp.py_func)


@entry
def _multiply(x, x_row, rows, weight, count, words, adds, y):
    """For each leaf ``y[leaf] = x @ weight.T`` over its own words of ``x``; then ``y[a] += y[b]`` for each of adds."""
    size, at, weight_at = rows * count * WIDTH, 0, 0
    for leaf in range(len(words)):
        linear_by_vectors(x[at:], x_row, rows, words[leaf], weight, weight_at, words[leaf] * WIDTH, 0, count, 1,
                          y[leaf * size:], count * WIDTH)
        at += words[leaf]
        weight_at += words[leaf] * count * WIDTH
    for add in range(len(adds)):
        left, right = y[adds[add, 0] * size:], y[adds[add, 1] * size:]
        for i in range(size):
            left[i] += right[i]


class Product:
    """``x @ weight.T`` in float32: each number is one sum over the inputs in their order, whatever stands beside it.

    With ``leaves`` (ranges of the inputs), each leaf is a sum of its own, and then the leaves are added up along the
    tree below each of ``nodes`` (see :mod:`tplab.invariant.tree`): one product for each node.
    """

    def __init__(self, weight: torch.Tensor, leaves: Sequence[range] = (),
                 nodes: Sequence[tuple[int, int]] = ((0, 1),)):
        (self.outputs, inputs), self.dtype = weight.shape, weight.dtype
        leaves = leaves or [range(inputs)]
        sizes = [padded(len(leaf), self.dtype) for leaf in leaves]
        self.width, self.count = sum(sizes), panels(self.outputs)
        starts = [end - size for end, size in zip(accumulate(sizes), sizes)]
        # Where each input stands among the padded ones; None where they are the same.
        self.places = None if self.width == inputs else torch.cat([
            torch.arange(start, start + len(leaf)) for start, leaf in zip(starts, leaves)])
        self.panels = np.concatenate([pack_weight(weight[:, leaf.start:leaf.stop]) for leaf in leaves])
        self.words = np.array(sizes) // per_word(self.dtype)
        self.adds = np.array([add for node in nodes for add in additions(*node)], np.int64).reshape(-1, 2)
        self.at = [first for first, _ in nodes]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[rows, inputs]`` in the weight's dtype → ``[nodes, rows, outputs]`` in float32."""
        full = x.contiguous()
        if self.places is not None:
            full = x.new_zeros(len(x), self.width)
            full[:, self.places] = x
        words = full.flatten().numpy() if self.dtype == torch.float32 else (
            full.view(torch.int32).flatten().numpy().view(np.uint32))
        y = np.empty(len(self.words) * len(x) * self.count * WIDTH, np.float32)
        _multiply(words, self.width // per_word(self.dtype), len(x), self.panels, self.count, self.words, self.adds, y)
        return torch.from_numpy(y).view(len(self.words), len(x), self.count * WIDTH)[self.at, :, :self.outputs]


@in_order
def _tanh(x):
    return np.float32(1) - np.float32(2) / (exp(np.float32(2) * x) + np.float32(1))


def _entry_in_order(function):
    return entry(function, in_order)


@_entry_in_order
def _silu(x, y):
    for i in range(len(x)):
        y[i] = x[i] / (np.float32(1) + exp(-x[i]))


@_entry_in_order
def _gelu_pytorch_tanh(x, y):
    for i in range(len(x)):
        inner = np.float32(0.7978845608) * (x[i] + np.float32(0.044715) * x[i] * x[i] * x[i])
        y[i] = np.float32(0.5) * x[i] * (np.float32(1) + _tanh(inner))


@_entry_in_order
def _soft_cap(x, cap, y):
    for i in range(len(x)):
        y[i] = cap * _tanh(x[i] / cap)


@_entry_in_order
def _inverse_rms(x, eps, y):
    for r in range(len(x)):
        total = 0.0
        for i in range(x.shape[1]):
            total += np.float64(x[r, i]) * np.float64(x[r, i])
        y[r] = 1 / np.sqrt(total / x.shape[1] + eps)


@_entry_in_order
def _attend(q, k, v, hidden, seen, scaling, cap, sinks, y, k_columns, scores, part):
    group = q.shape[1] // k.shape[1]
    for b in range(len(q)):
        for kv in range(k.shape[1]):
            for j in range(k.shape[2]):
                for d in range(k.shape[3]):
                    k_columns[d, j] = k[b, kv, j, d]
            for head in range(kv * group, (kv + 1) * group):
                for row in range(q.shape[2]):
                    first, last, out = hidden[b, row], seen[b, row], y[b, head, row]
                    own = scores[:last - first]
                    own[:] = 0
                    for d in range(q.shape[3]):
                        factor, column = q[b, head, row, d], k_columns[d, first:last]
                        for j in range(len(own)):
                            own[j] += factor * column[j]
                    most = -np.float32(np.inf)
                    for j in range(len(own)):
                        own[j] *= scaling
                        if cap > 0:
                            own[j] = cap * _tanh(own[j] / cap)
                        most = own[j] if not own[j] <= most else most  # NaN stays
                    total = 0.0
                    if len(sinks):
                        most = max(most, sinks[head])
                        total += exp(sinks[head] - most)
                    for j in range(len(own)):
                        own[j] = exp(own[j] - most)
                        total += own[j]
                    out[:] = 0
                    for begin in range(0, len(own), KEYS):
                        part[:] = 0
                        for j in range(begin, min(len(own), begin + KEYS)):
                            weight, value = own[j], v[b, kv, first + j]
                            for d in range(len(part)):
                                part[d] += weight * value[d]
                        for d in range(len(part)):
                            out[d] += part[d]
                    for d in range(len(part)):
                        out[d] /= np.float32(total)


def _elementwise(kernel, x: torch.Tensor, *numbers) -> torch.Tensor:
    wide = x.float().flatten()
    y = torch.empty_like(wide)
    kernel(wide.numpy(), *map(np.float32, numbers), y.numpy())
    return y.view(x.shape).to(x.dtype)


def activation(name: str):
    """``"silu"`` or ``"gelu_pytorch_tanh"``, number by number."""
    kernel = {"silu": _silu, "gelu_pytorch_tanh": _gelu_pytorch_tanh}[name]
    return lambda x: _elementwise(kernel, x)


def soft_cap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """:func:`tplab.model.attention.soft_cap`."""
    return _elementwise(_soft_cap, x, cap)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``[…, size]`` in float32 → ``[…, 1]``: what an RMSNorm multiplies each row by, computed in float64."""
    y = torch.empty(x.shape[:-1] + (1,))
    _inverse_rms(x.contiguous().view(-1, x.shape[-1]).numpy(), eps, y.view(-1).numpy())
    return y


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scaling: float, *,
           softcap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`tplab.model.attention.attend`, in float32: a query meets the keys that it sees one after the other, and
    no others. They stand together: the mask hides some before them and some behind."""
    visible, (keys, head_dim) = ~mask[:, 0], k.shape[2:]
    hidden = visible.int().argmax(-1)
    wide = [x.float().contiguous().numpy() for x in (q, k, v)]
    y = np.empty(q.shape, np.float32)
    _attend(*wide, hidden.numpy(), (hidden + visible.sum(-1)).numpy(), np.float32(scaling), np.float32(softcap or 0),
            np.empty(0, np.float32) if sinks is None else sinks.float().numpy(), y,
            np.empty((head_dim, keys), np.float32), np.empty(keys, np.float32), np.empty(head_dim, np.float32))
    return torch.from_numpy(y).to(q.dtype)

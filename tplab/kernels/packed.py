"""A weight whose memory is in the order of the library that multiplies with it."""

import torch
from torch.utils._pytree import tree_map_only

from tplab.kernels.mkl import MKL
from tplab.kernels.onednn import OneDNN
from tplab.kernels.stream import MOST_STREAMED, Stream


class PackedWeight(torch.Tensor):
    """A ``[out, in]`` weight in another order. Whatever reads it otherwise gets a plain copy with the same bits.

    ``order`` is its memory; up to ``streamed_rows`` rows, and more that suit it, meet it in ``stream``, all others in
    ``order.product``.
    """

    @staticmethod
    def __new__(cls, order: MKL | OneDNN, stream: Stream | None, streamed_rows: int):
        made = torch.Tensor._make_wrapper_subclass(cls, order.shape, dtype=order.dtype)
        most = 0 if stream is None else MOST_STREAMED if stream.tiled else streamed_rows
        made.order, made.stream, made.streamed_rows = order, stream, min(streamed_rows, most)
        return made

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x [rows, in]`` → ``[rows, out]``."""
        rows = x.shape[0]
        if rows <= self.streamed_rows or rows > MOST_STREAMED and self.stream is not None and self.stream.suits(rows):
            return self.stream.product(x, bias)
        return self.order.product(x, bias)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = args[0]
        if func is torch.ops.aten.detach.default:
            return cls(first.order, first.stream, first.streamed_rows)
        if func is torch.ops.aten.embedding.default and isinstance(first, cls):
            return first.order.rows(args[1])
        args, kwargs = tree_map_only(cls, lambda packed: packed.order.plain(), (args, kwargs or {}))
        found = func(*args, **kwargs)
        if func._schema.is_mutable and isinstance(first, cls):
            first.order.fill(args[0])
            return first
        return found

    def __setitem__(self, index, value):  # else a slice would be written into, and that is a slice of a copy
        whole = self.order.plain()
        whole[index] = value
        self.order.fill(whole)

"""Column-parallel and row-parallel linear layers (Megatron-LM's pair, with vLLM's names).

A weight is ``[out_features, in_features]``, as in ``torch.nn.Linear`` and in every Hugging Face checkpoint. Column
parallel keeps some *rows* of it (dim 0: output features), row parallel some *columns* (dim 1: input features). A
column-parallel layer needs no communication; the row-parallel layer after it needs one all-reduce.

A *source* is anything with ``.shape`` whose slices are tensors: a tensor, or a checkpoint slice that reads from disk
only what is asked for.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from tplab.ranks import all_reduce, rank, world_size
from tplab.shard.parameter import sharded_parameter
from tplab.shard.plan import RankShard, split_evenly


def column_shard(source, rows: range) -> torch.Tensor:
    """What a column-parallel layer keeps of a ``[out, in]`` weight or an ``[out]`` bias: some rows, dim 0."""
    return source[rows.start:rows.stop]


def row_shard(source, columns: range) -> torch.Tensor:
    """What a row-parallel layer keeps of a ``[out, in]`` weight: some columns, dim 1."""
    return source[:, columns.start:columns.stop]


def merged_shard(sources: Sequence, ranges: Sequence[range]) -> torch.Tensor:
    """This rank's rows of several column-parallel weights: each weight is cut separately, then they are stacked."""
    return torch.cat([column_shard(source, rows) for source, rows in zip(sources, ranges, strict=True)])


class MergedColumnParallelLinear(nn.Module):
    """Several column-parallel layers over the same input, multiplied as one: ``gate|up`` or ``q|k|v``.

    Args:
        output_sizes: **global** ``out_features`` of each merged layer.
        parts: for each merged layer, one range of its rows per rank; even cuts if not given.

    The forward pass maps ``[tokens, input_size]`` to ``[tokens, sum of this rank's rows]``.
    """

    def __init__(self, input_size: int, output_sizes: Sequence[int], *, bias: bool = False,
                 parts: Sequence[Sequence[range]] | None = None, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.input_size, self.output_sizes = input_size, tuple(output_sizes)
        parts = parts or [split_evenly(size, world_size()) for size in output_sizes]
        self.ranges = tuple(part[rank()] for part in parts)
        self.split_sizes = [len(rows) for rows in self.ranges]
        for size, part, rows in zip(self.output_sizes, parts, self.ranges, strict=True):
            assert part[-1].stop <= size and rows.stop <= size, f"rows {rows} stand outside of {size} outputs"
        rows = sum(self.split_sizes)
        self.weight = sharded_parameter(self, "weight", torch.empty(rows, input_size, dtype=dtype), self.ranges)
        self.bias = sharded_parameter(self, "bias", torch.empty(rows, dtype=dtype), self.ranges) if bias else None

    def load(self, parameter: str, *sources) -> None:
        """Fill ``"weight"`` or ``"bias"`` from one source per merged layer."""
        getattr(self, parameter).data.copy_(merged_shard(sources, self.ranges))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def split(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cut the merged output into the merged layers' outputs."""
        return y.split(self.split_sizes, dim=-1)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """A linear layer whose output features are dealt out over the ranks: ``Y_r = X W_rᵀ + b_r``, no communication.

    ``output_size`` is **global**; the others as in :class:`MergedColumnParallelLinear`.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool = False,
                 parts: Sequence[range] | None = None, dtype: torch.dtype = torch.float32):
        super().__init__(input_size, [output_size], bias=bias, parts=None if parts is None else [parts], dtype=dtype)


class QKVParallelLinear(MergedColumnParallelLinear):
    """The query, key and value projections as one column-parallel layer, cut at head boundaries.

    Takes **global** head counts; the local ones come from ``shards``, one per rank. ``head_size`` need not be
    ``hidden_size / total_num_heads``.
    """

    def __init__(self, hidden_size: int, head_size: int, total_num_heads: int, total_num_kv_heads: int, *,
                 shards: Sequence[RankShard], bias: bool = False, dtype: torch.dtype = torch.float32):
        def rows_of(heads: range) -> range:
            return range(heads.start * head_size, heads.stop * head_size)

        q_parts = [rows_of(shard.q_heads) for shard in shards]
        kv_parts = [rows_of(shard.kv_heads) for shard in shards]
        kv_size = total_num_kv_heads * head_size
        super().__init__(hidden_size, [total_num_heads * head_size, kv_size, kv_size], bias=bias,
                         parts=[q_parts, kv_parts, kv_parts], dtype=dtype)
        self.head_size = head_size
        self.num_heads, self.num_kv_heads = len(shards[rank()].q_heads), len(shards[rank()].kv_heads)
        expected = (self.num_heads + 2 * self.num_kv_heads) * head_size
        assert self.weight.shape[0] == expected, f"QKV weight has {self.weight.shape[0]} rows, {expected} expected"

    def split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[tokens, rows here]`` → q ``[tokens, heads here, head_size]``, k and v ``[tokens, kv heads here, …]``."""
        q, k, v = self.split(qkv)
        assert q.shape[-1] == self.num_heads * self.head_size and k.shape == v.shape, "a split boundary is off"
        return (q.view(-1, self.num_heads, self.head_size), k.view(-1, self.num_kv_heads, self.head_size),
                v.view(-1, self.num_kv_heads, self.head_size))


class RowParallelLinear(nn.Module):
    """A linear layer whose *input* features are dealt out: each rank computes a partial sum, one all-reduce adds them.

    The bias belongs to the sum, so exactly one rank adds it: the first that holds columns, so rank 0 as in vLLM, unless
    the layer is another rank's alone.

    Args:
        input_size: **global** ``in_features``.
        output_size: ``out_features``, whole on every rank.
        parts: one range of input columns per rank; even cuts if not given.
    """

    def __init__(self, input_size: int, output_size: int, *, bias: bool = False,
                 parts: Sequence[range] | None = None, dtype: torch.dtype = torch.float32):
        super().__init__()
        parts = parts or split_evenly(input_size, world_size())
        end = max(part.stop for part in parts)
        assert end == input_size, f"the parts end at {end}, the input at {input_size}"
        self.input_size, self.output_size, self.columns = input_size, output_size, parts[rank()]
        self.adds_bias = not any(parts[:rank()])
        weight, whole = torch.empty(output_size, len(self.columns), dtype=dtype), [range(output_size)]
        self.weight = sharded_parameter(self, "weight", weight, [self.columns], dim=1)
        self.bias = sharded_parameter(self, "bias", torch.empty(output_size, dtype=dtype), whole) if bias else None

    def load(self, parameter: str, source) -> None:
        """Fill ``"weight"`` (this rank's columns) or ``"bias"`` (whole: it is not sharded)."""
        data = row_shard(source, self.columns) if parameter == "weight" else source[:]
        getattr(self, parameter).data.copy_(data)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's summand, ``[tokens, output_size]``; the summands of all ranks add up to the layer's output."""
        return F.linear(x, self.weight, self.bias if self.adds_bias else None)

    def reduce(self, partial: torch.Tensor) -> torch.Tensor:
        """Add up the ranks' summands; overwrites ``partial``."""
        return all_reduce(partial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reduce(self.partial(x))


class ReplicatedLinear(nn.Module):
    """A linear layer that every rank holds whole: a router, a gate."""

    def __init__(self, input_size: int, output_size: int, *, bias: bool = False, dtype: torch.dtype = torch.float32):
        super().__init__()
        whole = [range(output_size)]
        self.weight = sharded_parameter(self, "weight", torch.empty(output_size, input_size, dtype=dtype), whole)
        self.bias = sharded_parameter(self, "bias", torch.empty(output_size, dtype=dtype), whole) if bias else None

    def load(self, parameter: str, source) -> None:
        """Fill ``"weight"`` or ``"bias"``."""
        getattr(self, parameter).data.copy_(source[:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

"""Linear layers that are spread over the ranks, after vLLM."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


def tp_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def tp_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce(x):
    if tp_size() > 1:
        dist.all_reduce(x)
    return x


@torch.inference_mode()
def apply_weight(x, weight, bias=None):
    return F.linear(x, weight, bias)


def share(total):
    """This rank's part of `total` heads or features: the first one, and how many."""
    size = total // tp_size()
    return tp_rank() * size, size


def kv_share(num_heads, num_kv_heads):
    """This rank's KV heads: the first one, how many, and how often each is repeated for the query heads."""
    num_heads_local = share(num_heads)[1]
    if tp_size() >= num_kv_heads:  # KV replication: one KV head per rank
        num_kv_head_replicas = tp_size() // num_kv_heads
        first, num_kv_heads_local = min(tp_rank() // num_kv_head_replicas, num_kv_heads - 1), 1
    else:
        first, num_kv_heads_local = share(num_kv_heads)
    return first, num_kv_heads_local, num_heads_local // num_kv_heads_local


class ColumnParallelLinear(nn.Module):
    """Each rank computes a part of the output features. `output_size` is the global size."""

    def __init__(self, input_size, output_size, bias=False):
        super().__init__()
        self.first, self.output_size_per_partition = share(output_size)
        self.weight = nn.Parameter(torch.empty(self.output_size_per_partition, input_size))
        self.bias = nn.Parameter(torch.empty(self.output_size_per_partition)) if bias else None

    def weight_loader(self, param, loaded, shard_id=None):
        param.data.copy_(loaded.narrow(0, self.first, param.shape[0]))

    def forward(self, x):
        return apply_weight(x, self.weight, self.bias)


def shard_weight(loaded, start, size, hidden_size):
    """The part of a checkpoint's q, k or v (a weight or a bias) that belongs to this rank."""
    if loaded.dim() == 1:
        return loaded.narrow(0, start, size)
    loaded = loaded.reshape(hidden_size, -1)  # [hidden_size, heads * head_size]
    return loaded.narrow(1, start, size).t()


def write_shard(fused, offset, shard):
    """Put this rank's part of q, k or v into its place in the fused weight or bias."""
    if fused.dim() == 1:
        fused.narrow(0, offset, shard.shape[0]).copy_(shard)
    else:  # [hidden_size, heads * head_size]: q, k and v are columns
        fused.view(shard.shape[1], -1).narrow(1, offset, shard.shape[0]).copy_(shard.t())


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections in one matrix, [q | k | v] by heads."""

    def __init__(self, hidden_size, head_size, total_num_heads, total_num_kv_heads, bias=True):
        self.first_head, self.num_heads = share(total_num_heads)
        self.first_kv_head, self.num_kv_heads, self.num_repeats = kv_share(total_num_heads, total_num_kv_heads)
        self.head_size = head_size
        # ColumnParallelLinear divides by tp_size again.
        output_size = (self.num_heads + 2 * self.num_kv_heads) * tp_size() * head_size
        super().__init__(hidden_size, output_size, bias)
        self.sizes = [n * head_size for n in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]

    def weight_loader(self, param, loaded, shard_id=None):
        part = "qkv".index(shard_id)
        first_head = self.first_head if shard_id == "q" else self.first_kv_head
        shard = shard_weight(loaded, first_head * self.head_size, self.sizes[part], param.shape[-1])
        write_shard(param.data, sum(self.sizes[:part]), shard)

    def split(self, qkv):
        """[batch, tokens, features] -> q, k and v as [batch, heads, tokens, head_size]."""
        return [part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in qkv.split(self.sizes, dim=-1)]


class RowParallelLinear(nn.Module):
    """Each rank holds a part of the input features; the results are summed over the ranks."""

    def __init__(self, first, input_size_per_partition, output_size, bias=False):
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.empty(output_size, input_size_per_partition))
        self.bias = nn.Parameter(torch.empty(output_size)) if bias else None

    def weight_loader(self, param, loaded, shard_id=None):
        param.data.copy_(loaded if loaded.dim() == 1 else loaded.narrow(1, self.first, param.shape[1]))

    def forward(self, x):
        out = all_reduce(apply_weight(x, self.weight))
        return out if self.bias is None else out + self.bias


class LMHead(nn.Module):
    """The output head. Not sharded: every rank gets all logits."""

    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def weight_loader(self, param, loaded, shard_id=None):
        param.data.copy_(loaded)

    def forward(self, hidden):
        return F.linear(hidden, self.weight)

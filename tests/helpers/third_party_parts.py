"""Parts of third-party engines: weights with any cut, and layers on logical ranks."""

from dataclasses import dataclass, replace

import torch
from safetensors.torch import load_file
from torch import nn

from tplab.checkpoint import Checkpoint
from tplab.ranks import all_reduce, rank
from tplab.shard import ShardPlan


@dataclass(frozen=True)
class Share:
    """What one rank holds; -1 is padding, rows of zeros."""

    q: tuple[int, ...]
    kv: tuple[int, ...]
    mlp: tuple[int, ...]
    vocab: tuple[int, ...]


def planned(ckpt: Checkpoint, size: int) -> list[Share]:
    """The lab's own shares."""
    return [Share(tuple(s.q_heads), tuple(s.kv_heads), tuple(s.mlp), tuple(s.vocab))
            for s in ShardPlan.from_config(ckpt.config, size).ranks]


def all_share(shares: list[Share], **fields) -> list[Share]:
    """The shares with some dimensions replaced: one tuple for each rank."""
    return [replace(share, **{name: tuple(values[r]) for name, values in fields.items()})
            for r, share in enumerate(shares)]


class Weights:
    """A checkpoint's tensors, cut into what a rank holds. ``cut`` may be replaced to cut wrongly."""

    def __init__(self, ckpt: Checkpoint, shares: list[Share], dtype: torch.dtype):
        tensors = {}
        for file in sorted(ckpt.folder.glob("*.safetensors")):
            tensors |= load_file(file)
        self.tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self.config, self.share = ckpt.config, shares[rank()]
        self.vocab_sizes = [len(share.vocab) for share in shares]

    def get(self, name: str) -> torch.Tensor | None:
        """A whole tensor."""
        if name == "lm_head.weight" and name not in self.tensors:
            name = "model.embed_tokens.weight"
        return self.tensors.get(name)

    def rows_of(self, name: str) -> list[int]:
        """The rows (of o_proj and down_proj: columns) of a module that the rank holds."""
        dim, share = self.config.head_dim, self.share
        heads = {"q_proj": share.q, "k_proj": share.kv, "v_proj": share.kv, "o_proj": share.q}.get(name)
        if heads is None:
            return list(share.mlp if name in ("gate_proj", "up_proj", "down_proj") else share.vocab)
        return [head * dim + j if head >= 0 else -1 for head in heads for j in range(dim)]

    def cut(self, module: str, kind: str = "weight") -> torch.Tensor | None:
        """This rank's part of a module's tensor."""
        tensor, leaf = self.get(f"{module}.{kind}"), module.rpartition(".")[2]
        if tensor is None:
            return None
        rows = self.rows_of(leaf)
        if leaf in ("o_proj", "down_proj"):
            if kind == "bias":
                return None if rank() else tensor  # added once
            return torch.cat([tensor, torch.zeros_like(tensor[:, :1])], 1)[:, rows]
        return torch.cat([tensor, torch.zeros_like(tensor[:1])])[rows]


class Matrix(nn.Module):
    """A linear layer; ``pair``: its output is ``(tensor, None)``; ``reduce``: summed over the ranks."""

    def __init__(self, *parts, bias=None, pair=False, reduce=False):
        super().__init__()
        weights, biases = [part[0] for part in parts], [part[1] for part in parts]
        self.weight = nn.Parameter(torch.cat(weights), False)
        bias = torch.cat(biases) if biases[0] is not None else None
        self.bias = None if bias is None else nn.Parameter(bias, False)
        self.pair, self.reduce = pair, reduce

    def forward(self, x):
        y = nn.functional.linear(x, self.weight, self.bias)
        y = all_reduce(y) if self.reduce else y
        return (y, None) if self.pair else y


class Norm(nn.Module):
    """RMS norm; with a residual it adds first and returns both, as vLLM's does."""

    def __init__(self, weight, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(weight, False), eps

    def forward(self, x, residual=None):
        x = x if residual is None else x + residual
        wide = x.float()
        y = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return y if residual is None else (y, x)


class Embedding(nn.Module):
    """Vocabulary-parallel: rows of other ranks are zero, then summed."""

    def __init__(self, weight, rows):
        super().__init__()
        self.weight, self.rows = nn.Parameter(weight, False), rows

    def forward(self, ids):
        local = {row: at for at, row in enumerate(self.rows)}
        y = torch.zeros(*ids.shape, self.weight.shape[1], dtype=self.weight.dtype)
        for at, token in enumerate(ids.reshape(-1).tolist()):
            if token in local:
                y.view(-1, y.shape[-1])[at] = self.weight[local[token]]
        return all_reduce(y)


class Rotary(nn.Module):
    """``(positions [tokens], q, k [tokens, heads * dim])`` → both rotated, in halves."""

    def __init__(self, config):
        super().__init__()
        self.dim, self.theta = config.head_dim, config.hf.rope_parameters["rope_theta"]

    def forward(self, positions, q, k):
        inverse = 1.0 / self.theta ** (torch.arange(0, self.dim, 2).float() / self.dim)
        angles = torch.outer(positions.float(), inverse)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return tuple(self.turn(x, cos, sin) for x in (q, k))

    def turn(self, x, cos, sin):
        a, b = x.unflatten(-1, (-1, self.dim)).float().chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype).view(x.shape)


class Core(nn.Module):
    """Causal attention over a cache of its own: ``[tokens, heads * dim]`` each, with the sequences of the call."""

    def __init__(self, config, share):
        super().__init__()
        self.dim, group = config.head_dim, config.num_heads // config.num_kv_heads
        # Where the query head's KV head is not on this rank, as a wrong engine would: by its local number.
        local = max(len(share.q) // len(share.kv), 1)
        self.reads = [share.kv.index(h // group) if h // group in share.kv else min(i // local, len(share.kv) - 1)
                      for i, h in enumerate(share.q)]
        self.call, self.past = None, {}

    def forward(self, q, k, v):
        q, k, v = (x.reshape(len(x), -1, self.dim) for x in (q, k, v))
        out = torch.empty_like(q)
        for number in dict.fromkeys(self.call):
            rows = [row for row, sequence in enumerate(self.call) if sequence == number]
            old = self.past.get(number)
            keys, values = (k[rows], v[rows]) if old is None else (torch.cat(p) for p in zip(old, (k[rows], v[rows])))
            self.past[number] = keys, values
            mask = torch.ones(len(rows), len(keys), dtype=torch.bool).tril(len(keys) - len(rows))
            scores = torch.einsum("qhd,khd->hqk", q[rows], keys[:, self.reads]) * self.dim ** -0.5
            weights = self.weigh(scores, mask).to(q.dtype)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values[:, self.reads])
        return out.flatten(1)

    def weigh(self, scores, mask):
        """``[heads, queries, keys]``."""
        return scores.masked_fill(~mask, float("-inf")).float().softmax(-1)


def linear(w: Weights, *modules, **options) -> Matrix:
    return Matrix(*((w.cut(module), w.cut(module, "bias")) for module in modules), **options)


def norm_of(w: Weights, name: str) -> Norm:
    return Norm(w.get(f"{name}.weight"), w.config.rms_norm_eps)


class ThirdParty(nn.Module):
    """What the engines share: the sequences of a call are said before it."""

    def call(self, ids, positions, sequences):
        for module in self.modules():
            if isinstance(module, Core):
                module.call = sequences
        return self(ids, positions)

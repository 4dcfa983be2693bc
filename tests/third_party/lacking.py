"""What public engines import and this environment lacks: things that do nothing; fairscale's layers and xformers'
attention are small ones, on logical ranks.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch import nn
from torch.nn import functional as F

from tplab.ranks import all_gather, all_reduce, rank, world_size


class _Nothing(type):
    def __getitem__(cls, item):
        return cls

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)


def _nothing(name: str) -> type:
    return _Nothing(name, (), {"__init__": lambda self, *args, **options: None,
                               "__call__": lambda self, *args: args[0]})


class _Module(ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)


class Lacking(MetaPathFinder, Loader):
    """Finds modules that do nothing, for some packages."""

    packages = ("lightning", "lightning_utilities", "tiktoken", "torchao", "simple_parsing", "mistral_common",
                "datasets", "sentencepiece", "omegaconf", "PIL", "kagglehub", "blobfile", "fire", "matplotlib",
                "requests", "torchvision", "torchdata", "jsonargparse", "pandas")

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self.packages else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def provide(name: str, **content) -> None:
    """A module of our own under a name of somebody else's."""
    parts = name.split(".")
    for i in range(1, len(parts) + 1):
        here = sys.modules.setdefault(".".join(parts[:i]), _Module(".".join(parts[:i])))
        if i > 1:
            setattr(sys.modules[".".join(parts[:i - 1])], parts[i - 1], here)
    vars(sys.modules[name]).update(content)


# fairscale's parallel layers, on logical ranks.

class Column(nn.Module):
    def __init__(self, size_in, size_out, bias=False, gather_output=True, init_method=None):
        super().__init__()
        self.weight, self.gather = nn.Parameter(torch.empty(size_out // world_size(), size_in)), gather_output

    def forward(self, x):
        y = F.linear(x, self.weight)
        return all_gather(y) if self.gather else y


class Row(nn.Module):
    def __init__(self, size_in, size_out, bias=False, input_is_parallel=True, init_method=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in // world_size()))

    def forward(self, x):
        return all_reduce(F.linear(x, self.weight))


class Vocabulary(nn.Module):
    def __init__(self, size, width, init_method=None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size // world_size(), width))

    def forward(self, ids):
        local = ids - rank() * len(self.weight)
        here = (local >= 0) & (local < len(self.weight))
        return all_reduce(F.embedding(local * here, self.weight) * here[..., None])


# xformers' attention of one text.

class Mask:
    def __init__(self, seen):
        self.seen = seen  # [queries, keys]

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_padding=None, kv_seqlen=None):
        if kv_seqlen is None:
            return cls(torch.ones(q_seqlen[0], q_seqlen[0], dtype=torch.bool).tril())
        return cls(torch.arange(kv_padding)[None] < kv_seqlen[0])

    def make_local_attention(self, size):
        return self


def memory_efficient_attention(q, k, v, mask):
    keys = mask.seen.any(0)  # what was never written may be anything
    q, k, v = (x.transpose(1, 2) for x in (q, k[:, keys], v[:, keys]))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.seen[:, keys]).transpose(1, 2)

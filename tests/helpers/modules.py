"""Small modules for the recorder's tests, and what was recorded of them."""

import torch
from torch import nn

from tplab.align.check.folder import read_recorded
from tplab.record import record

IDS = torch.arange(5)


class Toy(nn.Module):
    """Runs layers[0] twice; its head is called from outside."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 16)

    def forward(self, ids):
        x = self.embed(ids)
        return self.layers[1](self.layers[0](self.layers[0](x)))


class Calls(nn.Module):
    """A module that does what it is told."""

    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def recorded(folder, function, **limits):
    """What ``function(rec)`` recorded on one rank: its calls."""
    with record(folder, rank=0, world_size=1, **limits) as rec:
        function(rec)
    return read_recorded(folder).ranks[0].calls


def only(call, name, kind="out"):
    return [entry.tensor() for entry in call.entries if (entry.name, entry.kind) == (name, kind)]

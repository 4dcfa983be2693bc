"""Probes of the MLP's gate and of experts."""

import torch
from torch.nn import functional as F

from tplab.faults.probes.probe import probe

_GATED = "model.mlp.GatedMLP.gated"


def _gated(change):
    """``change(gate, up, the right activation)`` in the place of ``act(gate) * up``."""
    def wrong(self, x):
        return change(*self.gate_up_proj.split(self.gate_up_proj(x)), self.act)
    return wrong


def _in_turns(gate, up, act):
    fused = torch.cat([gate, up], -1)
    return act(fused[..., 0::2]) * fused[..., 1::2]


def _in_blocks(gate, up, act):
    gate, up = torch.stack([gate, up], -1).flatten(-2).chunk(2, -1)
    return act(gate) * up


_ACTIVATIONS = {"gelu": F.gelu, "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu": F.relu,
                "tanh": torch.tanh, "sigmoid": torch.sigmoid, "left out": lambda x: x}

for _name, _title, _change in (
        ("gate_up_order", "gate and up change places", lambda gate, up, act: act(up) * gate),
        ("gate_up_interleaved", "gate and up are read in turns, and they stand in blocks", _in_turns),
        ("gate_up_interleaved", "gate and up are read in blocks, and they stand in turns", _in_blocks),
        ("wrong_activation", "the activation is applied to up as well", lambda gate, up, act: act(gate) * act(up)),
        ("wrong_activation", "the activation is applied to the product of gate and up",
         lambda gate, up, act: act(gate * up))):
    probe(_name, "gated", _GATED, _title, _gated(_change))

probe("wrong_activation", "gated", _GATED, "the activation is {}",
      lambda name: _gated(lambda gate, up, act: _ACTIVATIONS[name](gate) * up), each=_ACTIVATIONS)

# Experts.

probe("shared_expert_missing", "experts", "model.experts.SparseMoeBlock.partial", "the shared expert is left out",
      lambda self, x, logits: self.experts(x, *self.route(logits)),
      needs=lambda config: config.experts and config.experts.shared_intermediate_size)

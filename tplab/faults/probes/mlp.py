"""Probes of the MLP's gate and of experts."""

import torch
from torch.nn import functional as F

from tplab.faults.probes.probe import probe, was

_GATED = "model.mlp.GatedMLP.gated"


def _gated(change):
    """``change(gate, up, the right activation)`` in the place of ``act(gate) * up``."""
    def wrong(self, x):
        return change(*self.gate_up_proj.split(self.gate_up_proj(x)), self.act)
    return wrong


probe("gate_up_order", "gated", _GATED, "gate and up change places", _gated(lambda gate, up, act: act(up) * gate))




def _in_turns(gate, up, act):
    fused = torch.cat([gate, up], -1)
    return act(fused[..., 0::2]) * fused[..., 1::2]


def _in_blocks(gate, up, act):
    gate, up = torch.stack([gate, up], -1).flatten(-2).chunk(2, -1)
    return act(gate) * up


probe("gate_up_interleaved", "gated", _GATED, "gate and up are read in turns, and they stand in blocks",
      _gated(_in_turns))

probe("gate_up_interleaved", "gated", _GATED, "gate and up are read in blocks, and they stand in turns",
      _gated(_in_blocks))

_ACTIVATIONS = {"gelu": F.gelu, "gelu (tanh)": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu": F.relu,
                "tanh": torch.tanh, "sigmoid": torch.sigmoid, "left out": lambda x: x}

probe("wrong_activation", "gated", _GATED, "the activation is {}",
      lambda name: _gated(lambda gate, up, act: _ACTIVATIONS[name](gate) * up), each=_ACTIVATIONS)

probe("wrong_activation", "gated", _GATED, "the activation is applied to up as well",
      _gated(lambda gate, up, act: act(gate) * act(up)))

probe("wrong_activation", "gated", _GATED, "the activation is applied to the product of gate and up",
      _gated(lambda gate, up, act: act(gate * up)))


_SPARSE = "model.experts.SparseMoeBlock.partial"

probe("shared_expert_missing", "experts", _SPARSE, "the shared expert is left out",
      lambda self, x, logits: self.experts(x, *self.route(logits)),
      needs=lambda config: config.experts and config.experts.shared_intermediate_size)

probe("shared_expert_ungated", "experts", _SPARSE, "the shared expert's own gate is left out",
      lambda self, x, logits: self.experts(x, *self.route(logits)) + self.shared_expert.partial(x),
      needs=lambda config: config.experts and config.experts.shared_intermediate_size)

probe("expert_weights_missing", "experts", "model.experts.FusedMoE.forward", "the router's weights are not applied",
      lambda self, x, weights, ids: was("model.experts.FusedMoE.forward")(self, x, torch.ones_like(weights), ids),
      needs=lambda config: config.experts)

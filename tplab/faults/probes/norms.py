"""Probes of norms."""

import torch
from torch.nn import functional as F

from tplab.faults.probes.probe import probe, was
from tplab.model.norm import GemmaRMSNorm

_NORM, _RMS = "model.norm.RMSNorm.forward", "model.norm.RMSNorm.inverse_rms"
_NORMS = f"{_NORM} model.norm.WideRMSNorm.forward model.norm.GemmaRMSNorm.forward"
_EPSILONS = (1e-6, 1e-5, 1e-3, 1e-2, 1e-8, 1e-12, 0.0)

probe("norm_epsilon", "norm", _RMS, "the norm's epsilon is {:g}",
      lambda eps: lambda self, wide: torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps), each=_EPSILONS)

probe("norm_epsilon", "norm", _RMS, "the norm's epsilon of {:g} is added behind the root",
      lambda eps: lambda self, wide: 1 / (wide.pow(2).mean(-1, keepdim=True).sqrt() + eps), each=_EPSILONS[:4])

probe("norm_by_deviation", "norm", _RMS, "the norm divides by the standard deviation, not by the root of the mean "
      "square (correction {})",
      lambda correction: lambda self, wide: torch.rsqrt(wide.var(-1, keepdim=True, correction=correction) + self.eps),
      each=(1, 0))

probe("norm_by_sum", "norm", _RMS, "the norm divides by the root of the sum of squares, not of their mean",
      lambda self, wide: torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + self.eps))

probe("norm_over_all_heads", "norm", _RMS, "q and k are normalised over all heads of a token together",
      lambda self, wide: torch.rsqrt(wide.pow(2).mean([*range(1, wide.dim())], keepdim=True) + self.eps),
      needs=lambda config: config.qk_norm and not config.full_width_qk_norm)


def _changed(change):
    """A norm whose result is ``change(self, x in float32, the factor that its weight is)``."""
    def wrong(self, x):
        return change(self, x.float(), self.weight.float() + isinstance(self, GemmaRMSNorm)).to(x.dtype)
    return wrong


def _once(norm, x, factor):
    return x * norm.inverse_rms(x) * factor


for _name, _title, _change in (
        ("norm_weight_missing", "the norm does not multiply by its weight", lambda self, x, w: _once(self, x, 1)),
        ("norm_plus_one", "the norm multiplies by 1 + weight, as Gemma does", lambda self, x, w: _once(self, x, 1 + w)),
        ("layer_norm", "a LayerNorm stands where an RMSNorm should: the mean is subtracted",
         lambda self, x, w: F.layer_norm(x, x.shape[-1:], eps=self.eps) * w),
        ("norm_missing", "there is no norm", lambda self, x, w: x),
        ("norm_missing", "the norm multiplies by its weight and does not normalise", lambda self, x, w: x * w),
        ("norm_twice", "it is normalised twice", lambda self, x, w: _once(self, _once(self, x, w), w))):
    probe(_name, "norm", _NORMS, _title, _changed(_change))

_NORMED, _OTHER = "model.decoder.DecoderLayer.normed", {"input_norm": "post_attention_layernorm",
                                                        "post_norm": "input_layernorm"}

probe("norm_weight_exchanged", "norm", _NORMED, "the norm has the weight of the layer's other norm",
      lambda self, name, norm, x: was(_NORMED)(
          self, name, getattr(self, _OTHER[name]) if name in _OTHER else norm, x))

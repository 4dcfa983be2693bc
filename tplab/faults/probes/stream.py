"""Probes of the residual stream: what is added, and what goes into the blocks."""

from tplab.faults.probes.probe import probe
from tplab.model.trace import point
from tplab.ranks import world_size

_LAYER = "model.decoder.DecoderLayer.forward"


def _layer(residual=lambda self, x, normed, a: x + a, output=lambda x, r, behind, m, a: r + m,
           attended=lambda x, normed: normed, gated=lambda normed, r, behind: behind):
    """A decoder layer with other sums or inputs; by default the right one.

    ``x`` goes in, ``normed`` is it behind the first norm, ``a`` and ``m`` are the blocks' outputs, ``r`` is the stream
    between the blocks and ``behind`` it behind its norm. ``attended`` and ``gated`` are what goes into the blocks.
    """
    def wrong(self, x, cos, sin, context):
        name = f"layers.{self.layer}."
        normed = self.normed("input_norm", self.input_layernorm, x)
        a = self.self_attn(attended(x, normed), cos, sin, context)
        a = self.scaled(self.normed("attn_norm", self.post_self_attn_layernorm, a))
        r = point(name + "residual", residual(self, x, normed, a))
        behind = self.normed("post_norm", self.post_attention_layernorm, r)
        m = self.scaled(self.normed("mlp_norm", self.post_mlp_layernorm, self.mlp(gated(normed, r, behind))))
        return point(name + "output", output(x, r, behind, m, a))
    return wrong


probe("residual_missing", "add", _LAYER, "the residual is not added: the stream is the {}'s output alone",
      lambda block: _layer(residual=lambda self, x, normed, a: a) if block == "attention" else
      _layer(output=lambda x, r, behind, m, a: m), each=("attention", "MLP"))

probe("residual_wrong_place", "add", _LAYER, "the {}'s output is added to the stream behind the norm",
      lambda block: _layer(residual=lambda self, x, normed, a: normed + a) if block == "attention" else
      _layer(output=lambda x, r, behind, m, a: behind + m), each=("attention", "MLP"))

probe("residual_wrong_place", "add", _LAYER, "the MLP's output is added to the stream from before attention",
      _layer(output=lambda x, r, behind, m, a: x + m))

probe("sublayer_missing", "add", _LAYER, "the {}'s output is not added",
      lambda block: _layer(residual=lambda self, x, normed, a: x) if block == "attention" else
      _layer(output=lambda x, r, behind, m, a: r), each=("attention", "MLP"))

probe("residual_on_every_rank", "add", _LAYER, "the residual is added once for each rank, before the sum",
      _layer(residual=lambda self, x, normed, a: world_size() * x + a,
             output=lambda x, r, behind, m, a: world_size() * r + m))

probe("residual_unscaled", "add", "model.decoder.DecoderLayer.scaled", "the block's output is not scaled",
      lambda self, branch: branch, needs=lambda config: config.residual_multiplier != 1)

probe("parallel_sublayers", "add", _LAYER, "the attention's output is added twice: with the MLP's once more",
      _layer(output=lambda x, r, behind, m, a: r + m + a))

probe("norm_in_place", "add", _LAYER, "the second norm overwrites the stream",
      _layer(residual=lambda self, x, normed, a: self.post_attention_layernorm(x + a)))

probe("norm_skipped", "linear gated", _LAYER, "the {} is given the stream, not what the norm makes of it",
      lambda block: _layer(attended=lambda x, normed: x) if block == "attention" else
      _layer(gated=lambda normed, r, behind: r), each=("attention", "MLP"))

probe("norm_wrong_input", "linear gated", _LAYER, "the MLP is given what goes into attention",
      _layer(gated=lambda normed, r, behind: normed))

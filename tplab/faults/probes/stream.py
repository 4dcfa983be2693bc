"""Probes of the residual stream: what is added, and what goes into the blocks."""

from tplab.faults.probes.probe import probe
from tplab.model.trace import point
from tplab.ranks import world_size

_LAYER = "model.decoder.DecoderLayer.forward"


def _layer(residual=lambda self, x, normed, a: x + a, output=lambda x, r, behind, m, a: r + m,
           attended=lambda x, normed: normed, gated=lambda normed, r, behind: behind, in_place=False):
    """A decoder layer with other sums or inputs; by default the right one.

    ``x`` goes in, ``normed`` is it behind the first norm, ``a`` and ``m`` are the blocks' outputs, ``r`` is the stream
    between the blocks and ``behind`` it behind its norm. ``attended`` and ``gated`` are what goes into the blocks;
    ``in_place``: ``behind`` is ``r`` itself.
    """
    def wrong(self, x, cos, sin, context):
        at = f"layers.{self.layer}."
        normed = self.normed("input_norm", self.input_layernorm, x)
        a = self.self_attn(attended(x, normed), cos, sin, context)
        a = self.scaled(self.normed("attn_norm", self.post_self_attn_layernorm, a))
        r = point(at + "residual", residual(self, x, normed, a))
        behind = point(at + "post_norm", r) if in_place else self.normed("post_norm", self.post_attention_layernorm, r)
        m = self.scaled(self.normed("mlp_norm", self.post_mlp_layernorm, self.mlp(gated(normed, r, behind))))
        return point(at + "output", output(x, r, behind, m, a))
    return wrong


for _name, _title, _wrong in (
        ("residual_missing", "the stream is the attention's output alone", _layer(residual=lambda self, x, n, a: a)),
        ("residual_missing", "the stream is the MLP's output alone", _layer(output=lambda x, r, n, m, a: m)),
        ("residual_wrong_place", "the attention's output is added to the stream behind the norm",
         _layer(residual=lambda self, x, n, a: n + a)),
        ("residual_wrong_place", "the MLP's output is added to the stream behind the norm",
         _layer(output=lambda x, r, n, m, a: n + m)),
        ("residual_wrong_place", "the MLP's output is added to the stream from before attention",
         _layer(output=lambda x, r, n, m, a: x + m)),
        ("sublayer_missing", "the attention's output is not added", _layer(residual=lambda self, x, n, a: x)),
        ("sublayer_missing", "the MLP's output is not added", _layer(output=lambda x, r, n, m, a: r)),
        ("residual_on_every_rank", "the residual is added once for each rank, before the sum",
         _layer(lambda self, x, n, a: world_size() * x + a, lambda x, r, n, m, a: world_size() * r + m)),
        ("parallel_sublayers", "the attention's output is added twice: with the MLP's once more",
         _layer(output=lambda x, r, n, m, a: r + m + a)),
        ("norm_in_place", "the second norm overwrites the stream",
         _layer(lambda self, x, n, a: self.post_attention_layernorm(x + a), in_place=True))):
    probe(_name, "add", _LAYER, _title, _wrong)

for _name, _title, _wrong in (
        ("norm_skipped", "attention is given the stream from before the norm", _layer(attended=lambda x, n: x)),
        ("norm_skipped", "the MLP is given the stream from before the norm", _layer(gated=lambda n, r, b: r)),
        ("norm_wrong_input", "the MLP is given what goes into attention", _layer(gated=lambda n, r, b: n))):
    probe(_name, "linear gated", _LAYER, _title, _wrong)

probe("residual_unscaled", "add", "model.decoder.DecoderLayer.scaled", "the block's output is not scaled",
      lambda self, branch: branch, needs=lambda config: config.residual_multiplier != 1)

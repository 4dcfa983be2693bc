"""Probes of the rotary position embedding."""

import torch

from tplab.faults.probes.probe import probe, was

_ROPE, _ROTARY = "model.attention.TensorParallelAttention.apply_rope", "model.rope.Rotary.__call__"


# The rotation.

def _turned(change):
    """``change(right, q, k, cos, sin)``, where ``right(q, k, cos, sin)`` turns as the engine does."""
    def wrong(self, q, k, cos, sin):
        return change(lambda *args: was(_ROPE)(self, *args), q, k, cos, sin)
    return wrong


def _neighbours(table):
    return table[..., :table.shape[-1] // 2].repeat_interleave(2, -1)


def _unscaled(right, q, k, cos, sin):
    size = (cos[..., :1] ** 2 + sin[..., :1] ** 2).sqrt()
    return right(q, k, cos / size, sin / size)


for _name, _title, _change in (
        ("rope_direction", "q and k are turned the other way round",
         lambda right, q, k, cos, sin: right(q, k, cos, -sin)),
        ("rope_twice", "q and k are turned twice",
         lambda right, q, k, cos, sin: right(*right(q, k, cos, sin), cos, sin)),
        ("rope_terms", "cos and sin change places", lambda right, q, k, cos, sin: right(q, k, sin, cos)),
        ("rope_terms", "the term with sin is missing", lambda right, q, k, cos, sin: right(q, k, cos, 0 * sin)),
        ("rope_terms", "the term with cos is missing", lambda right, q, k, cos, sin: right(q, k, 0 * cos, sin)),
        ("rope_terms", "cos and sin are laid out for neighbours, and halves are turned",
         lambda right, q, k, cos, sin: right(q, k, _neighbours(cos), _neighbours(sin))),
        ("low_precision", "q and k are rounded to bfloat16 before they are turned",
         lambda right, q, k, cos, sin: right(q.bfloat16().to(q), k.bfloat16().to(k), cos, sin)),
        ("low_precision", "q and k are rounded to float16 before they are turned",
         lambda right, q, k, cos, sin: right(q.half().to(q), k.half().to(k), cos, sin)),
        ("rope_attention_factor", "cos and sin lack the scaling's attention factor", _unscaled)):
    probe(_name, "rope", _ROPE, _title, _turned(_change), needs=lambda config, name=_name: (
        name != "rope_attention_factor" or config.hf.rope_parameters.get("rope_type") in ("yarn", "longrope")))


@probe("rope_terms", "rope", _ROPE, "the half that should be subtracted is added, so each pair is mirrored")
def _(self, q, k, cos, sin):
    return tuple(x * cos[0, :, None] + x.roll(x.shape[-1] // 2, -1) * sin[0, :, None] for x in (q, k))


@probe("rope_viewed", "rope", _ROPE, "heads and tokens are viewed as each other, not transposed, for the rotation")
def _(self, q, k, cos, sin):
    turned = self.rotate(*(x.reshape(1, x.shape[1], -1, x.shape[2]) for x in (q, k)), cos, sin)
    return tuple(y.reshape(x.shape) for x, y in zip((q, k), turned))


@probe("rope_partial", "rope", _ROPE, "only the first 1/{0[0]} of a head is turned",
       each=[(2, 1), (4, 1), (2, 2), (4, 4)])  # with the head's first frequencies, or with those of a smaller head
def _(value):
    def turn(x, cos, sin):
        size = x.shape[-1] // value[0] // 2 * 2  # pairs of numbers
        cos, sin = (table[0, :, None, :size // 2 * value[1]:value[1]].repeat(1, 1, 2) for table in (cos, sin))
        a, b = x[..., :size].chunk(2, -1)
        return torch.cat([x[..., :size] * cos + torch.cat([-b, a], -1) * sin, x[..., size:]], -1)
    return lambda self, q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin))


@probe("rope_partial", "rope", _ROPE, "only the first 1/{} of the pairs is turned", each=(2, 4))
def _(share):
    def change(right, q, k, cos, sin):
        half = cos.shape[-1] // 2
        still = torch.arange(cos.shape[-1]) % half >= half // share
        return right(q, k, cos.masked_fill(still, 1), sin.masked_fill(still, 0))
    return _turned(change)


# The angles.

def _angles(change):
    """Tables of ``change(positions [tokens, 1] in float32, the rotary module's frequencies [pairs], theta)``."""
    def wrong(self, x, positions, lengths, *kind):
        cos, sin = was(_ROTARY)(self, x, positions, lengths, *kind)
        theta, pairs = self.config.rope_parameters.get("rope_theta", 10000.0), cos.shape[-1] // 2
        plain = theta ** (-torch.arange(pairs) / pairs)
        angles = change(positions[:, None].float(), getattr(self.embedding, "inv_freq", plain).float(), theta)
        angles = torch.cat([angles, angles], -1)[None]
        scale = getattr(self.embedding, "attention_scaling", 1.0)
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)
    return wrong


probe("rope_theta", "rope", _ROTARY, "q and k are turned with theta {:g}",
      lambda theta: _angles(lambda p, right, own: p * theta ** (-torch.arange(len(right)) / len(right))),
      each=(1e4, 1e3, 1e5, 5e5, 1e6, 5e6, 1e7))

probe("rope_theta", "rope", _ROTARY, "the exponents of theta are counted over {}, not over the rotated numbers",
      lambda size: _angles(lambda p, right, theta: p * theta ** (-torch.arange(0, 2 * len(right), 2) / size)),
      each=lambda config: {config.hidden_size // config.num_heads, config.head_dim, config.hidden_size})

probe("rope_scaling", "rope", _ROTARY, "positions are divided by {:g}",
      lambda factor: _angles(lambda p, right, theta: p / factor * right), each=(2, 4, 8, 16, 32, 0.5, 0.25, 0.125))


@probe("rope_dtype", "rope", _ROTARY, "the frequencies, the angles, or cos and sin are computed in {0[0]}",
       each=[(dtype, stages) for dtype in (torch.bfloat16, torch.float16) for stages in ("f", "t", "pf", "pfa", "a")])
def _(value):
    dtype, stages = value

    def few(x, stage):
        return x.to(dtype).float() if stage in stages else x

    def wrong(self, x, positions, lengths, *kind):
        right = _angles(lambda p, right, theta: few(few(p, "p") * few(right, "f"), "a"))
        return tuple(few(table.float(), "t").to(x.dtype) for table in right(self, x, positions, lengths, *kind))
    return wrong

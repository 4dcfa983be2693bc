"""Probes of attention: its mask, its scores, the heads that it reads, and its cache."""

import torch

from tplab.faults.probes.probe import probe, was
from tplab.model.attention import NoCache, causal_mask, mask_scores, within_window

_ATTEND, _ALL = "model.attention.attend", "model.attention.TensorParallelAttention.attend_all"
_SCORES, _SOFTMAX = "model.attention.mask_scores", "model.attention.softmax"
_MASK = "model.attention.causal_mask cache.paged.causal_mask"


# The mask.

@probe("mask_off_by_one", "attention", _MASK, "the mask's diagonal is off by {:+}", each=(1, -1))
def _(shift):
    def wrong(positions, keys):
        first = (torch.arange(keys) == 0) & (positions[..., None] + shift < 0)  # a row sees one key at least
        return causal_mask(positions + shift, keys) & ~first[:, None]
    return wrong


for _name, _title, _change in (
        ("mask_of_another_row", "all rows of a batch have the mask of its first one",
         lambda positions, keys: causal_mask(positions[:1].expand_as(positions), keys)),
        ("mask_without_past", "the mask begins at the first key, not behind the cached ones",
         lambda positions, keys: causal_mask(positions - positions[:, :1], keys)),
        ("cache_not_read", "tokens see their own call alone", lambda positions, keys: causal_mask(positions, keys) | (
            torch.arange(keys) < positions[:, :1, None])[:, None])):
    probe(_name, "attention", _MASK, _title, _change)

for _name, _title, _change in (
        ("mask_misused", "the mask is multiplied with the scores, where it must hide", lambda s, mask: s * ~mask),
        ("mask_misused", "the mask is added as 1, where it must hide", lambda s, mask: s + mask.to(s)),
        ("mask_misused", "the mask is added as -1, where it must hide", lambda s, mask: s - mask.to(s)),
        ("mask_inverted", "the mask is the wrong way round", lambda s, mask: mask_scores(s, ~mask))):
    probe(_name, "attention", _SCORES, _title, _change)

probe("sliding_window", "attention", _MASK, "each token sees the last {} tokens alone",
      lambda size: lambda positions, keys: causal_mask(positions, keys) | (
          torch.arange(keys) <= positions[..., None] - size)[:, None],
      each=lambda config: (*range(2, 17), 20, 24, 32, 48, 64, 128, 256, 512, 1024) if not any(config.windows) else ())

probe("sliding_window", "attention", "model.attention.within_window", "the window is off by {:+}",
      lambda more: lambda mask, window: within_window(mask, window + more), each=(-1, 1))

probe("cross_sequence_attention", "attention", _ALL, "the sequences of a call see each other", lambda self, q, k, v, c:
      was(_ALL)(self, q, k, v, c if any(s.start for s in getattr(c, "segments", ())) else (
          [*c.batches(self.layer, k, v)], NoCache([len(q)]))[1]))


# The scores and their softmax.

probe("softmax_scale", "attention", _ATTEND, "scores are multiplied by {:.4g}, not by the model's scale",
      lambda scale: lambda q, k, v, mask, scaling, **options: was(_ATTEND)(q, k, v, mask, scale, **options),
      each=lambda config: (1.0, 1 / config.head_dim, config.head_dim ** 0.5, config.head_dim ** -0.5,
                           config.hidden_size ** -0.5, config.num_heads ** -0.5,
                           *(config.scaling * 2 ** (half / 2) for half in (-2, -1, 1, 2))))

probe("softmax_scale", "attention", _ATTEND, "the weights are scaled, not the scores",
      lambda q, k, v, mask, scaling, **options: scaling * was(_ATTEND)(q, k, v, mask, 1.0, **options))


def _weighted(weights):
    """Attention whose weights are ``weights(scaled scores, mask)``, both ``[batch, heads, queries, keys]``."""
    def wrong(q, k, v, mask, scaling, **options):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * scaling
        return weights(scores, mask.expand_as(scores)) @ v
    return wrong


for _name, _title, _weights in (
        ("mask_misused", "the mask is applied behind the softmax", lambda scores, mask: scores.softmax(-1) * ~mask),
        ("softmax_missing", "the scores are the weights, without a softmax", lambda scores, mask: scores * ~mask),
        ("softmax_dim", "the softmax runs over the queries, not over the keys",
         lambda scores, mask: mask_scores(scores, mask).softmax(-2))):
    probe(_name, "attention", _ATTEND, _title, _weighted(_weights))

probe("softmax_dtype", "attention", _SOFTMAX, "the softmax is computed in {}",
      lambda dtype: lambda scores: torch.softmax(scores.to(dtype), -1).to(scores.dtype),
      each=(torch.bfloat16, torch.float16))

probe("sinks_missing", "attention", "model.attention.softmax_with_sinks", "the sinks are left out",
      lambda scores, sinks: torch.softmax(scores, -1), needs=lambda config: config.sinks)

probe("scores_uncapped", "attention", "model.attention.soft_cap", "scores are not capped",
      lambda x, cap: x, needs=lambda config: config.attn_logit_softcapping is not None)


# Queries, keys and values.

probe("keys_for_values", "attention", _ATTEND, "the keys stand where the values should",
      lambda q, k, v, mask, scaling, **options: was(_ATTEND)(q, k, k, mask, scaling, **options))

probe("attention_missing", "attention", _ATTEND, "attention returns {}",
      lambda what: lambda q, k, v, mask, scaling, **options: q * (what == "its queries"), each=("its queries", "zeros"))


@probe("heads_not_transposed", "attention", _ALL, "heads and tokens of the output are viewed as each other")
def _(self, q, k, v, context):
    counts = [part[0] if isinstance(part, tuple) else part for part in context.lengths]
    parts = was(_ALL)(self, q, k, v, context).split(counts)
    return torch.cat([part.transpose(0, 1).reshape(part.shape) for part in parts])


@probe("query_to_kv", "attention", _ATTEND, "query heads read the {} of KV head h modulo the number of KV heads",
       each=("keys and values", "keys", "values"))
def _(which):
    def wrong(q, k, v, mask, scaling, **options):
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat(1, group, 1, 1) if name in which else x.repeat_interleave(group, 1)
                for name, x in (("keys", k), ("values", v)))
        return was(_ATTEND)(q, k, v, mask, scaling, **options)
    return wrong


probe("query_to_kv", "attention", _ATTEND, "all query heads of a rank read its first KV head",
      lambda q, k, v, mask, scaling, **options: was(_ATTEND)(q, k[:, :1], v[:, :1], mask, scaling, **options))


@probe("rope_on_values", "attention", "model.attention.TensorParallelAttention.forward", "values are turned, too")
def _(self, x, cos, sin, context):
    def turned(layer, k, v):
        return right(layer, k, self.apply_rope(v, v, cos, sin)[0])
    right, context.batches = context.batches, turned
    try:
        return was("model.attention.TensorParallelAttention.forward")(self, x, cos, sin, context)
    finally:
        del context.batches


# The cache.

@probe("cache_rows_lost", "attention", "cache.paged.PagedContext._batch", "the keys of decoded tokens are not kept")
def _(self, indices):
    slots, mask = was("cache.paged.PagedContext._batch")(self, indices)
    starts, prompts = (torch.tensor(x)[:, None, None, None] for x in zip(*(
        (self.segments[i].start, self.segments[i].prompt_length) for i in indices)))
    keys = torch.arange(mask.shape[-1])
    return slots, mask | (keys >= prompts) & (keys < starts)

"""Probes of the two ends of the model."""

import torch
from torch.nn import functional as F

from tplab.faults.probes.probe import probe, was
from tplab.model.trace import point

_EMBED, _HEAD = "shard.embedding.VocabParallelEmbedding.forward", "shard.embedding.ParallelLMHead.forward"
_LOGITS, _FINISH = "model.decoder.TensorParallelCausalLM.compute_logits", "model.decoder.TensorParallelCausalLM.finish"


@probe("embedding_scale", "embed", _EMBED, "the embedding is multiplied by {:g}", lambda config: (
    config.hidden_size ** 0.5, config.hidden_size ** -0.5, 1 / config.embedding_multiplier, 0.5, 2.0))
def _(factor):
    return lambda self, ids: was(_EMBED)(self, ids) * factor


@probe("ids_shifted", "embed", _EMBED, "each token has the embedding of its neighbour ({:+} row)", (1, -1))
def _(shift):
    return lambda self, ids: was(_EMBED)(self, ids.roll(shift))


@probe("head_tied", "head", _LOGITS, "the head is the embedding, and the checkpoint has a head of its own",
       lambda config: (None,) * (not config.tie_word_embeddings))
def _(_):
    return lambda self, hidden: point("logits", self.finish(F.linear(hidden, self.embed_tokens.weight)))


@probe("head_rows", "head", _HEAD, "the rows of the head stand in {} order", ("reverse",))
def _(_):
    return lambda self, hidden: was(_HEAD)(self, hidden).flip(-1)


@probe("head_rows", "head", _HEAD, "the rows of the head are shifted by {:+}", (1, -1))
def _(shift):
    return lambda self, hidden: was(_HEAD)(self, hidden).roll(shift, -1)


@probe("rows_shifted", "head", _HEAD, "each row has the logits of its neighbour ({:+})", (1, -1))
def _(shift):
    return lambda self, hidden: was(_HEAD)(self, hidden).roll(shift, 0)


@probe("vocab_rows_missing", "head", _HEAD, "the last {} rows of a rank's head are missing", (1, 2, 3, 4, 8, 16, 32, 64))
def _(count):
    def wrong(self, hidden):
        logits = was(_HEAD)(self, hidden)
        return logits.masked_fill(torch.arange(logits.shape[-1]) >= logits.shape[-1] - count, 0)
    return wrong


@probe("logits_softcap", "head", _FINISH, "logits are capped at {:g}", lambda config: (
    30.0, 50.0, 20.0, 15.0) if config.final_logit_softcapping is None else ())
def _(cap):
    return lambda self, logits: cap * torch.tanh(was(_FINISH)(self, logits) / cap)


@probe("logits_uncapped", "head", "model.decoder.soft_cap", "logits are not capped",
       lambda config: (None,) * (config.final_logit_softcapping is not None))
def _(_):
    return lambda x, cap: x


@probe("logits_scale", "head", _FINISH, "logits are multiplied by {:g}", lambda config: (
    config.logits_scaling, config.hidden_size ** -0.5, config.hidden_size ** 0.5, 0.5, 2.0))
def _(factor):
    return lambda self, logits: was(_FINISH)(self, logits) * factor

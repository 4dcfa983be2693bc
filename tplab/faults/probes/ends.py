"""Probes of the two ends of the model."""

import torch
from torch.nn import functional as F

from tplab.faults.probes.probe import probe, was
from tplab.model.trace import point

_EMBED, _HEAD = "shard.embedding.VocabParallelEmbedding.forward", "shard.embedding.ParallelLMHead.forward"
_LOGITS, _FINISH = "model.decoder.TensorParallelCausalLM.compute_logits", "model.decoder.TensorParallelCausalLM.finish"

probe("embedding_scale", "embed", _EMBED, "the embedding is multiplied by {:g}",
      lambda factor: lambda self, ids: was(_EMBED)(self, ids) * factor,
      each=lambda config: (config.hidden_size ** 0.5, config.hidden_size ** -0.5, 1 / config.embedding_multiplier, 0.5,
                           2.0))

probe("ids_shifted", "embed", _EMBED, "each token has the embedding of its neighbour ({:+} row)",
      lambda shift: lambda self, ids: was(_EMBED)(self, ids.roll(shift)), each=(1, -1))

probe("head_tied", "head", _LOGITS, "the head is the embedding, and the checkpoint has a head of its own",
      lambda self, hidden: point("logits", self.finish(F.linear(hidden, self.embed_tokens.weight))),
      needs=lambda config: not config.tie_word_embeddings)

probe("head_rows", "head", _HEAD, "the ranks' logits are joined in reverse order",
      lambda self, hidden: torch.cat(self.gather(was(_HEAD)(self, hidden)).split(self.sizes, -1)[::-1], -1)[
          :, self.rows.start:self.rows.stop])

probe("head_rows", "head", _HEAD, "the rows of the head are shifted by {:+}",
      lambda shift: lambda self, hidden: was(_HEAD)(self, hidden).roll(shift, -1), each=(1, -1))

probe("rows_shifted", "head", _HEAD, "each row has the logits of its neighbour ({:+})",
      lambda shift: lambda self, hidden: was(_HEAD)(self, hidden).roll(shift, 0), each=(1, -1))


@probe("vocab_rows_missing", "head", _HEAD, "the last {} rows of a rank's head are missing",
       each=(1, 2, 3, 4, 8, 16, 32, 64))
def _(count):
    def wrong(self, hidden):
        logits = was(_HEAD)(self, hidden)
        return logits.masked_fill(torch.arange(logits.shape[-1]) >= logits.shape[-1] - count, 0)
    return wrong


probe("logits_softcap", "head", _FINISH, "logits are capped at {:g}",
      lambda cap: lambda self, logits: cap * torch.tanh(was(_FINISH)(self, logits) / cap),
      each=(30.0, 50.0, 20.0, 15.0), needs=lambda config: config.final_logit_softcapping is None)

probe("logits_uncapped", "head", "model.decoder.soft_cap", "logits are not capped",
      lambda x, cap: x, needs=lambda config: config.final_logit_softcapping is not None)

probe("logits_scale", "head", _FINISH, "logits are multiplied by {:g}",
      lambda factor: lambda self, logits: was(_FINISH)(self, logits) * factor,
      each=lambda config: (config.logits_scaling, config.hidden_size ** -0.5, config.hidden_size ** 0.5, 0.5, 2.0))

"""The sampler on logical ranks, without a model: each rank has its part of given logits."""

from types import SimpleNamespace

from tplab.engine.sampler import sample
from tplab.ranks import all_gather, logical_ranks, rank
from tplab.shard import split_evenly


def on_ranks(tp, logits, draws):
    """``sample`` on ``tp`` logical ranks over the whole ``logits [n, vocabulary]``; every rank's answer."""
    parts = split_evenly(logits.shape[-1], tp)

    def on_rank():
        here = parts[rank()]
        lm_head = SimpleNamespace(rows=here, num_embeddings=logits.shape[-1],
                                  gather=lambda part: all_gather(part, dim=-1, sizes=[len(p) for p in parts]))
        return sample(lm_head, logits[:, here.start:here.stop], draws)

    return logical_ranks(tp, on_rank)

"""Probes of the sums over the ranks."""

import torch
from torch.nn import functional as F

from tplab.faults.probes.probe import probe, was
from tplab.ranks import all_gather, all_reduce, rank, world_size
from tplab.shard.embedding import local_ids

_REDUCE, _EMBED = "shard.linear.RowParallelLinear.reduce", "shard.embedding.VocabParallelEmbedding.forward"

probe("all_reduce_twice", "reduce", _REDUCE, "the sum is reduced twice",
      lambda self, partial: all_reduce(all_reduce(partial)))

probe("all_reduce_average", "reduce", _REDUCE, "the ranks' summands are averaged",
      lambda self, partial: all_reduce(partial) / world_size())

probe("all_reduce_subset", "reduce", _REDUCE, "rank {} is missing in the sum",
      lambda missing: lambda self, partial: all_reduce(partial * (rank() != missing)), each=range(8))

probe("all_reduce_subset", "reduce", _REDUCE, "each rank adds its left neighbour's summand alone",
      lambda self, partial: partial + all_gather(partial, dim=-1).split(partial.shape[-1], -1)[rank() - 1])


@probe("buffer_reused", "reduce", _REDUCE, "the first half of the rows is the second half's sum, by one buffer")
def _(self, partial):
    whole, half = all_reduce(partial), -(-len(partial) // 2)
    return torch.cat([whole[half:], whole[len(whole) - half:half], whole[half:]])


probe("all_reduce_twice", "add", "model.decoder.DecoderLayer.scaled", "the block's output is added once for each rank",
      lambda self, branch: branch * world_size())


def _own_rows(self, ids):
    here, elsewhere = local_ids(ids, self.rows)
    return F.embedding(here, self.weight).masked_fill(elsewhere[..., None], 0)


probe("all_reduce_missing", "embed", _EMBED, "no all-reduce after the embedding", _own_rows)

probe("all_reduce_twice", "embed", _EMBED, "the embedding is reduced twice",
      lambda self, ids: all_reduce(was(_EMBED)(self, ids)))

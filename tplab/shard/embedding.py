"""The two ends of the model, sharded over the vocabulary: input embedding and LM head."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from tplab.ranks import all_gather, all_reduce, rank, world_size
from tplab.shard.linear import column_shard
from tplab.shard.parameter import sharded_parameter
from tplab.shard.plan import split_evenly


def local_ids(input_ids: torch.Tensor, rows: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids → row numbers in this rank's shard, and a mask of the tokens that live on other ranks (row 0 there)."""
    elsewhere = (input_ids < rows.start) | (input_ids >= rows.stop)
    return (input_ids - rows.start).masked_fill(elsewhere, 0), elsewhere


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are dealt out: the rank that holds a token looks it up, others have zeros; then summed.

    Adding zeros is exact, so the result equals the unsharded lookup bit for bit. ``num_embeddings`` is **global**, any
    number, without padding; ``parts`` are one range of rows per rank, even cuts if not given.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, *, parts: Sequence[range] | None = None,
                 dtype: torch.dtype = torch.float32):
        super().__init__()
        parts = parts or split_evenly(num_embeddings, world_size())
        self.num_embeddings, self.sizes, self.rows = num_embeddings, [len(part) for part in parts], parts[rank()]
        weight = torch.empty(len(self.rows), embedding_dim, dtype=dtype)
        self.weight = sharded_parameter(self, "weight", weight, [self.rows])

    def load(self, parameter: str, source) -> None:
        """Fill ``"weight"`` with this rank's rows."""
        getattr(self, parameter).data.copy_(column_shard(source, self.rows))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        ids, elsewhere = local_ids(input_ids, self.rows)
        return all_reduce(F.embedding(ids, self.weight).masked_fill_(elsewhere[..., None], 0))


class ParallelLMHead(VocabParallelEmbedding):
    """The output projection, sharded over the vocabulary: each rank computes the logits of its own tokens.

    The forward pass maps ``[tokens, hidden]`` to ``[tokens, vocabulary here]``; :meth:`gather` makes them whole.
    """

    def tie_weights(self, embedding: VocabParallelEmbedding) -> "ParallelLMHead":
        """Share the embedding's shard, as vLLM does; both are cut at the same rows."""
        assert self.rows == embedding.rows, f"head rows {self.rows} are not the embedding's {embedding.rows}"
        self.weight = embedding.weight
        return self

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight)

    def gather(self, logits_here: torch.Tensor) -> torch.Tensor:
        """Every rank's logits → ``[tokens, num_embeddings]`` on every rank."""
        return all_gather(logits_here, dim=-1, sizes=self.sizes)

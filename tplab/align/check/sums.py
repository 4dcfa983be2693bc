"""Outputs that are sums over the ranks: before or after the all-reduce?"""

from functools import cache

import torch

from tplab.align.check.layouts import PADDING, near
from tplab.align.check.shares import Shares
from tplab.align.check.sources import FEW, SAMPLE, Source
from tplab.align.operations import columns_of
from tplab.checkpoint.layout import EMBEDDING

_SUMS = {"o_proj": "o", "o_partial": "o", "mlp": "down", "mlp_partial": "down"}
_PARTIAL = {"o": "o_partial", "down": "mlp_partial"}


class Sums:
    """Says of each row-parallel output whether it is one rank's summand or the sum."""

    def __init__(self, shares: Shares):
        self.shares, self.sources = shares, shares.sources
        self._decided: dict[tuple, bool] = {}

    def sources_of(self, name: str) -> list[Source]:
        """What can be taken for a replicated point or for a sum's summands, the strongest claim first."""
        at, _, point = name.rpartition(".")
        found = self.sources.of(name)
        if which := _SUMS.get(point):
            summand = point.endswith("partial")
            found += [source for source in self.sources.of(f"{at}.{which}")
                      if self._is_summand(source, which) == summand]
            found.sort(key=self.sources.rank_of)
        if name == "embed":
            found = [source for source in found if not self._is_masked(source)]
        return found

    def _is_summand(self, source: Source, which: str) -> bool:
        """Decided once for all layers, by most of those looked at: one layer that differs has a bug."""
        if source.pattern not in self._decided:
            votes = []
            for at in self.shares.sampled:
                votes += [self._looks_partial(same, which, at) for same in self.sources.of(at + which)
                          if same.pattern == source.pattern]
            self._decided[source.pattern] = bool(votes) and sum(votes) > len(votes) / 2
        return self._decided[source.pattern]

    def _looks_partial(self, source: Source, which: str, at: str) -> bool:
        ranks = self.sources.complete(source)
        size = self.shares.seat(ranks[0])[1]
        if size == 1:
            return False
        outs = {rank: self.sources.rows(source, rank, FEW) for rank in ranks}
        if any(out is None for out in outs.values()):
            return False
        if len(ranks) > 1 and all(near(out, outs[ranks[0]]) for out in outs.values()):
            return self._made_of_the_same(source, which, at, ranks)
        own = {rank: self._summand(at, which, rank, source) for rank in ranks}
        if any(summand is None for summand in own.values()):
            return len(ranks) > 1 and not _any_pair(outs)
        bias = self.shares.evidence.bias(int(at.split(".")[1]), _PARTIAL[which])
        added = [0.0] if bias is None else [0.0, bias, bias / size]
        mine = [any(near(outs[rank], own[rank] + more) for more in added) for rank in ranks]
        if all(mine):
            return True
        total = sum(own.values())  # of one rank among several it says nothing: its output may well be the sum
        return len(ranks) > 1 and not _any_pair(outs) and not any(
            near(out, total + more) for out in outs.values() for more in added)

    def _made_of_the_same(self, source: Source, which: str, at: str, ranks: list[int]) -> bool:
        """Whether ranks that put out the same have the same share of the input, too: then it is no sum over shares."""
        inputs = [self._input(at, which, rank, source) for rank in ranks]
        total = self.shares.totals["q" if which == "o" else "mlp"]
        return all(x is not None and x.shape[1] < total and torch.isfinite(x).all() and near(x, inputs[0])
                   for x in inputs)

    def _input(self, at: str, which: str, rank: int, source: Source) -> torch.Tensor | None:
        """What a row-parallel layer was given on a rank, ``[rows, heads or columns here, …]``."""
        held = [h for h in self.shares.held(at + ("attn" if which == "o" else "mlp_act"), FEW) if rank in h.tensors]
        return min(held, key=lambda h: h.source.name != source.name).tensors[rank] if held else None

    def _summand(self, at: str, which: str, rank: int, source: Source) -> torch.Tensor | None:
        if (x := self._input(at, which, rank, source)) is None:
            return None
        indices = self.shares.layouts["q" if which == "o" else "mlp"].indices[rank]
        if indices is None or x.shape[1] != len(indices):
            return None
        kept = [i for i, index in enumerate(indices) if index != PADDING]
        dim = self.shares.config.head_dim if which == "o" else 1
        columns = columns_of([indices[i] for i in kept], dim)
        return self.shares.evidence.summand(int(at.split(".")[1]), _PARTIAL[which], x[:, kept].flatten(1), columns)

    @cache  # noqa: B019  (one Sums lives as long as one placement)
    def _is_masked(self, source: Source) -> bool:
        """Whether an embedding's output has only the rows of the rank's own share of the vocabulary."""
        ids = [self.sources.texts.ids[number][position] for number, position in self.sources.places[:SAMPLE]]
        ranks = self.sources.complete(source)
        outs = [self.sources.rows(source, rank, FEW) for rank in ranks]
        hidden = self.shares.config.hidden_size
        if self.shares.seat(ranks[0])[1] == 1 or any(out is None or out.shape[1] != hidden for out in outs):
            return False
        table = self.shares.evidence.weight(EMBEDDING)[ids]
        masked = [[not row.any() for row in out] for out in outs]
        mine = all(zero or near(row, true) for out, zeros in zip(outs, masked)
                   for row, zero, true in zip(out, zeros, table))
        return mine and any(map(any, masked))


def _any_pair(outs: dict[int, torch.Tensor]) -> bool:
    ranks = list(outs)
    return any(near(outs[a], outs[b]) for i, a in enumerate(ranks) for b in ranks[i + 1:])

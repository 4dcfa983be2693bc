"""Outputs that are sums over the ranks: before or after the all-reduce?"""

from functools import cache

import torch

from tplab.align.check.evidence import Evidence
from tplab.align.check.match import PADDING, near
from tplab.align.check.shares import Shares
from tplab.align.check.sources import FEW, Source
from tplab.align.operations import columns_of
from tplab.align.points import POINTS
from tplab.checkpoint.layout import EMBEDDING

ROWS = {"o": ("o_partial", "attn", "q"), "down": ("mlp_partial", "mlp_act", "mlp")}  # role → summand, input, dimension
_ROLE_OF = {"o_proj": "o", "o_partial": "o", "mlp": "down", "mlp_partial": "down"}


def kinds(evidence: Evidence, name: str, outs: dict[int, torch.Tensor], own: dict[int, torch.Tensor]) -> set[str]:
    """Whether each rank's output is its ``own`` ``"summand"`` or the ``"sum"`` of all, with the bias or without; ``""``
    if neither."""
    at, _, point = name.rpartition(".")
    bias, total = evidence.weight(f"model.{at}.{POINTS[point].module}.bias"), sum(own.values())
    added = [0.0] if bias is None else [0.0, bias, bias / len(own)]
    return {next((what for what, x in (("summand", own[rank]), ("sum", total))
                  if any(near(out, x + more) for more in added)), "") for rank, out in outs.items()}


class Sums:
    """Says of each row-parallel output whether it is one rank's summand or the sum."""

    def __init__(self, shares: Shares):
        self.shares, self.sources, self.evidence = shares, shares.sources, shares.evidence
        self._decided: dict[tuple, bool] = {}

    def sources_of(self, name: str) -> list[Source]:
        """What can be taken for a replicated point or for a sum's summands, the strongest claim first."""
        at, _, point = name.rpartition(".")
        found = self.sources.of(name)
        if role := _ROLE_OF.get(point):
            summand = point.endswith("partial")
            found += [source for source in self.sources.of(f"{at}.{role}") if self._is_summand(source, role) == summand]
            found.sort(key=self.sources.rank_of)
        return [source for source in found if name != "embed" or not self._is_masked(source)]

    def _is_summand(self, source: Source, role: str) -> bool:
        """Decided once for all layers, by most of those looked at: one layer that differs has a bug."""
        if source.pattern not in self._decided:
            votes = [self._looks_partial(same, role, at) for at in self.shares.sampled
                     for same in self.sources.of(at + role) if same.pattern == source.pattern]
            self._decided[source.pattern] = sum(votes) > len(votes) / 2
        return self._decided[source.pattern]

    def _looks_partial(self, source: Source, role: str, at: str) -> bool:
        ranks = self.sources.complete(source)
        outs = {rank: self.sources.rows(source, rank, FEW) for rank in ranks}
        if self.shares.seat(ranks[0])[1] == 1 or any(out is None for out in outs.values()):
            return False
        inputs = {rank: self._input(at, role, rank, source) for rank in ranks}
        apart = len(ranks) > 1 and not any(near(outs[a], outs[b]) for a in ranks for b in ranks if a < b)
        if len(ranks) > 1 and all(near(out, outs[ranks[0]]) for out in outs.values()):
            # Ranks that put out the same, and have the same share of the input, too: then it is no sum over shares.
            total, first = self.shares.totals[ROWS[role][2]], inputs[ranks[0]]
            return all(x is not None and x.shape[1] < total and torch.isfinite(x).all() and near(x, first)
                       for x in inputs.values())
        own = {rank: self._summand(at, role, rank, x) for rank, x in inputs.items()}
        if any(summand is None for summand in own.values()):
            return apart
        found = kinds(self.evidence, at + ROWS[role][0], outs, own)
        # Of one rank among several the sum says nothing: its output may well be the sum.
        return found == {"summand"} or apart and "sum" not in found

    def _input(self, at: str, role: str, rank: int, source: Source) -> torch.Tensor | None:
        """What a row-parallel layer was given on a rank, ``[rows, heads or columns here, …]``."""
        found = [one for one in self.shares.candidates(at + ROWS[role][1]) if rank in self.sources.complete(one.source)]
        return min(found, key=lambda one: one.source.name != source.name).read(rank, FEW) if found else None

    def _summand(self, at: str, role: str, rank: int, x: torch.Tensor | None) -> torch.Tensor | None:
        partial, before, group = ROWS[role]
        indices = self.shares.layouts[group].indices[rank]
        if x is None or indices is None or x.shape[1] != len(indices):
            return None
        kept = [i for i, index in enumerate(indices) if index != PADDING]
        columns = columns_of([indices[i] for i in kept], self.shares.dim(before))
        return self.evidence.of(at + partial, x[:, kept].flatten(1), features=columns, bias=0.0)

    @cache  # noqa: B019  (one Sums lives as long as one placement)
    def _is_masked(self, source: Source) -> bool:
        """Whether an embedding's output has only the rows of the rank's own share of the vocabulary."""
        ranks, true = self.sources.complete(source), self.evidence.weight(EMBEDDING)[self.sources.sampled_ids]
        outs = [self.sources.rows(source, rank, FEW) for rank in ranks]
        if self.shares.seat(ranks[0])[1] == 1 or any(out is None or out.shape != true.shape for out in outs):
            return False
        rows = [pair for out in outs for pair in zip(out, true)]
        return not all(row.any() for row, _ in rows) and all(not row.any() or near(row, true) for row, true in rows)

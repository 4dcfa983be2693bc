"""What each rank holds, by the sizes of its tensors: its share by the plan, all of it, or an equal share with padding.

Nothing is inferred from values: an engine that deals heads out in another way is judged as if it followed the plan.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import combinations
from typing import NamedTuple

import torch

from tplab.align.check.expected import Expected
from tplab.align.check.match import GROUP_OF, GROUPS, PARTS, Indices, near, real_items, span, usual_shares
from tplab.align.check.names import FUSED
from tplab.align.check.sources import FEW, SHAPE, Source, Sources
from tplab.align.points import layout
from tplab.align.recording import Contradiction
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import EMBEDDING
from tplab.shard import ShardPlan

_FUSED_OF = {part: fused for fused, parts in PARTS.items() for part in parts}
ROWS = {"o": ("o_partial", "attn", "q"), "down": ("mlp_partial", "mlp_act", "mlp")}  # role → summand, input, dimension
_ROLES_OF = {**dict.fromkeys(("o_proj", "o_partial"), ("o",)), "mlp_partial": ("down",),
             **dict.fromkeys(("mlp", "moe_partial"), ("down", "experts"))}


class Candidate(NamedTuple):
    """A source that may be a point, a function that reads a rank's tensor of it (``look`` as in
    :mod:`tplab.align.check.sources`), and how it is read, in words."""

    source: Source
    read: Callable[[int, str], torch.Tensor | None]
    words: str = ""


class Layout(NamedTuple):
    """Per rank the items of one dimension that it holds; None where its size fits nothing."""

    indices: tuple[Indices | None, ...]
    sentence: str = ""


class Shares:
    """What each rank holds of each dimension: ``layouts`` of ``q``, ``k``, ``v``, ``mlp`` and ``vocab``."""

    def __init__(self, sources: Sources, ckpt: Checkpoint, plan: ShardPlan):
        self.sources, self.config, self.expected, config = sources, ckpt.config, Expected(ckpt, sources), ckpt.config
        self.totals = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads,
                       "mlp": config.intermediate_size, "vocab": config.vocab_size}
        self.planned = {which: [tuple(getattr(shard, group.plan)) for shard in plan.ranks]
                        for which, group in GROUPS.items()}
        self._summands: dict[tuple, bool] = {}

    def in_stage(self, rank: int) -> tuple[int, int]:
        """A rank's number within its pipeline stage, and the size of the stage."""
        stage = next(stage for stage in self.sources.stages if rank in stage)
        return stage.index(rank), len(stage)

    def dim(self, point: str) -> int:
        """The columns of one item of a point: of a head, or 1."""
        return self.config.head_dim if GROUP_OF[point] in ("q", "k", "v") else 1

    def share(self, which: str, rank: int, count: int) -> Indices | None:
        """The items that a rank holds which has so many."""
        total = self.totals[which]
        usual = [self.planned[which][rank], tuple(range(total)), *usual_shares(total, count, *self.in_stage(rank))[:1]]
        return next((share for share in usual if len(share) == count), None)

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The decision for each dimension, by the first point of it that was recorded."""
        found = {}
        for which, group in GROUPS.items():
            counts: dict[int, int] = {}
            for name in (name for name in self.sources.points() if name.rpartition(".")[2] in group.points):
                for source, read, _ in self.candidates(name):
                    counts = {rank: x.shape[1] for rank in self.sources.complete(source)
                              if (x := read(rank, SHAPE)) is not None} | counts
                if len(counts) == len(self.sources.ranks):
                    break
            shares = [self.share(which, rank, counts[rank]) if rank in counts else self.planned[which][rank]
                      for rank in range(self.sources.world_size)]
            wrong = [f"rank {rank} has {count}" for rank, count in counts.items() if shares[rank] is None]
            if wrong:
                self.sources.contradictions.append(Contradiction(
                    f"{group.words}: {', '.join(wrong)}; {self.totals[which]} are dealt out as "
                    f"{', '.join(str(len(share)) for share in self.planned[which])}", about=group.behind))
            found[which] = Layout(tuple(shares), f"{group.words} by their number (" + "; ".join(
                f"rank {rank}: {span(share)}" for rank, share in enumerate(shares) if share is not None) + ")")
        return found

    # What can be taken for a point.

    def candidates(self, name: str) -> Iterator[Candidate]:
        """What can be taken for a point, the strongest claim first."""
        at, _, point = name.rpartition(".")
        if point not in GROUP_OF:
            yield from self._whole_or_summands(name)
            return
        found = [(source, None) for source in self.sources.of(name)]
        if fused := _FUSED_OF.get(point):
            found += [(source, fused) for source in self.sources.of(f"{at}.{fused}")]
        for source, fused in sorted(found, key=lambda one: FUSED if one[1] else one[0].strength):
            read = partial(self.read, source, name, fused)
            if name == "logits" or all(read(rank, SHAPE) is not None for rank in self.sources.complete(source)):
                yield Candidate(source, read, f"cut as [{'|'.join(PARTS[fused])}] by size; " if fused else "")

    def read(self, source: Source, name: str, fused: str | None, rank: int, look: str) -> torch.Tensor | None:
        """A source's tensor on a rank, as a point's; ``fused``: what it is a part of."""
        point = name.rpartition(".")[2]
        if name == "logits":
            return (self.sources.logits(source, rank, look) or (None, None))[1]
        if fused is None and GROUP_OF[point] != "mlp":
            return next(iter(self.sources.heads(source, rank, look).values()), None)
        rows = self.sources.rows(source, rank, look)
        if rows is None or fused is None:
            return rows
        cut = self.by_size(fused, rows.shape[1], rank)
        part = cut and rows[:, cut[point]]
        return part if cut is None or GROUP_OF[point] == "mlp" else part.unflatten(1, (-1, self.config.head_dim))

    def by_size(self, fused: str, width: int, rank: int) -> dict[str, slice] | None:
        """The cut of ``[q|k|v]`` by the plan's rule, or of all heads; gate and up are equal halves."""
        groups = [GROUP_OF[part] for part in PARTS[fused]]
        sizes = [[width // 2] * 2] if fused == "gate_up" else [
            [len(self.planned[group][rank]) * self.config.head_dim for group in groups],
            [self.totals[group] * self.config.head_dim for group in groups]]
        for cut in sizes:
            if sum(cut) == width:
                ends = [sum(cut[:i + 1]) for i in range(len(cut))]
                return {part: slice(end - size, end) for part, size, end in zip(PARTS[fused], cut, ends)}
        return None

    # Sums over the ranks.

    def _whole_or_summands(self, name: str) -> Iterator[Candidate]:
        """What can be taken for a replicated point or for a sum's summands, the strongest claim first."""
        at, _, point = name.rpartition(".")
        found, summands = self.sources.of(name), layout(name) == "partial"
        for role in _ROLES_OF.get(point, ()):
            found += [source for source in self.sources.of(f"{at}.{role}")
                      if self._is_summand(source, role, at) is summands]
        for source in sorted(found, key=self.sources.rank_of):
            if name != "embed" or not self._is_masked(source):
                yield Candidate(source, partial(self.sources.rows, source),
                                "one summand on each rank" if summands else "whole on every rank")

    def _is_summand(self, source: Source, role: str, at: str) -> bool:
        """Whether the ranks' outputs differ: decided once for all layers. (Of one rank they are the same.)"""
        if (key := (source.pattern, role)) not in self._summands:
            ranks = self.sources.complete(source)
            outs = [self.sources.rows(source, rank, FEW) for rank in ranks]
            whole = role != "experts" and any(held is not None and len(real_items(held)[0]) == self.totals[ROWS[role][2]]
                                              for held in self.layouts[ROWS[role][2]].indices)
            self._summands[key] = not whole and self.in_stage(ranks[0])[1] > 1 and None not in [
                out if out is None else 1 for out in outs] and len(ranks) > 1 and not any(
                near(a, b) for a, b in combinations(outs, 2))
        return self._summands[key]

    def _is_masked(self, source: Source) -> bool:
        """Whether an embedding's output has only the rows of the rank's own share of the vocabulary."""
        ranks, true = self.sources.complete(source), self.expected.weight(EMBEDDING)[self.sources.sampled_ids]
        outs = [self.sources.rows(source, rank, FEW) for rank in ranks]
        if self.in_stage(ranks[0])[1] == 1 or any(out is None or out.shape != true.shape for out in outs):
            return False
        rows = [pair for out in outs for pair in zip(out, true)]
        return not all(row.any() for row, _ in rows) and all(not row.any() or near(row, true) for row, true in rows)

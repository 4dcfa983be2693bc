"""What each rank holds, by the sizes of its tensors: its share by the plan, all of it, or one share behind the other.

Nothing is inferred from values: an engine that deals heads out in another way is judged as if it followed the plan.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

import torch

from tplab.align.check.match import GROUP_OF, GROUPS, PADDING, PARTS, Indices
from tplab.align.check.names import FUSED
from tplab.align.check.sources import FEW, SHAPE, Source, Sources
from tplab.align.points import SUMS, as_index, columns_of, layout, short_name
from tplab.align.recording import Contradiction, PlacementError
from tplab.checkpoint import Checkpoint
from tplab.checks import span
from tplab.shard import ShardPlan

LAYOUTS = {  # what check(layout=…) can be told
    "pairs": "the numbers in each head of q and k lie in pairs, as in Meta's own files",
    "groups": "a fused q|k|v lies KV head by KV head: its queries, its key, its value"}
_FUSED_OF = {part: fused for fused, parts in PARTS.items() for part in parts}
_PAIRED = ("q", "k", "q_norm", "k_norm", "q_rope", "k_rope")
ROWS = {"o": ("o_partial", "attn", "q"), "down": ("mlp_partial", "mlp_act", "mlp")}  # role → summand, input, dimension


class Candidate(NamedTuple):
    """A source that may be a point, a function that reads a rank's tensor of it (``look`` as in
    :mod:`tplab.align.check.sources`), and how it is read, in words."""

    source: Source
    read: Callable[[int, str], torch.Tensor | None]
    words: str = ""


class Shares:
    """What each rank holds of each dimension: ``layouts`` of ``q``, ``k``, ``v``, ``mlp`` and ``vocab``.

    ``summands`` says of row-parallel layers' outputs, by pattern and role, whether they are summands or sums.
    """

    def __init__(self, sources: Sources, ckpt: Checkpoint, plan: ShardPlan, layouts: tuple[str, ...] = ()):
        if unknown := [word for word in layouts if word not in LAYOUTS]:
            raise PlacementError(f"there is no layout {unknown[0]!r}; layouts are " + ", ".join(
                f"{word} ({what})" for word, what in LAYOUTS.items()))
        self.sources, self.config, self.told_layouts, config = sources, ckpt.config, layouts, ckpt.config
        self.totals = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads,
                       "mlp": config.intermediate_size, "vocab": config.vocab_size}
        self.planned = {dimension: [tuple(getattr(shard, group.plan)) for shard in plan.ranks]
                        for dimension, group in GROUPS.items()}
        self.summands: dict[tuple, bool] = {}

    def stage(self, rank: int) -> list[int]:
        """The ranks of a rank's pipeline stage."""
        return next(stage for stage in self.sources.stages if rank in stage)

    def dim(self, point: str) -> int:
        """The columns of one item of a point: of a head, or 1."""
        return self.config.head_dim if GROUP_OF[point] in ("q", "k", "v") else 1

    def usual(self, dimension: str, counts: dict[int, int], queries: list[Indices | None] | None = None
              ) -> Iterator[dict[int, Indices]]:
        """The items of each rank, of which it has so many (``{rank: count}``), by each usual rule: by the plan; the KV
        heads that its query heads read; all of them; one share behind the other, the last ones padded."""
        total = self.totals[dimension]
        yield {rank: tuple(self.planned[dimension][rank]) for rank in counts}
        if queries is not None:
            yield {rank: tuple(self._read_by(queries[rank])) for rank in counts}
        yield {rank: tuple(range(total)) for rank in counts}
        behind = {}
        for rank, count in counts.items():
            stage = self.stage(rank)
            first = sum(counts.get(other, count) for other in stage[:stage.index(rank)])
            items = range(first, min(first + count, total))
            if items or dimension not in "qkv":  # no rank is without a head
                behind[rank] = (*items, *[PADDING] * (count - len(items)))
        yield behind

    def _read_by(self, queries: Indices | None) -> list[int]:
        """The KV heads that query heads read."""
        group = self.config.num_heads // self.config.num_kv_heads
        return sorted({head // group for head in queries or () if head != PADDING})

    def share(self, dimension: str, counts: dict[int, int], queries: list[Indices | None] | None = None
              ) -> dict[int, Indices]:
        """The items of each rank: by the first usual rule that fits all ranks, else rank by rank; a rank whose size
        fits none is left out."""
        fitting = [{rank: items for rank, items in shares.items() if len(items) == counts[rank]}
                   for shares in self.usual(dimension, counts, queries)]
        whole = next((shares for shares in fitting if len(shares) == len(counts)), {})
        return whole or {rank: items for shares in reversed(fitting) for rank, items in shares.items()}

    @cached_property
    def layouts(self) -> dict[str, list[Indices | None]]:
        """For each dimension the items that each rank holds, by the first point of it that was recorded; None where its
        size fits nothing."""
        layouts, contradictions = {}, self.sources.contradictions
        for dimension, group in GROUPS.items():
            counts: dict[int, int] = {}
            for name in (name for name in self.sources.points() if short_name(name) in group.points):
                for source, read, _ in self.candidates(name):
                    counts = {rank: x.shape[1] for rank in self.sources.complete(source)
                              if (x := read(rank, SHAPE)) is not None} | counts
                if len(counts) == len(self.sources.ranks):
                    break
            shares = self.share(dimension, dict(sorted(counts.items())), layouts["q"] if dimension in "kv" else None)
            layouts[dimension] = [shares.get(rank) if rank in counts else self.planned[dimension][rank]
                                  for rank in range(self.sources.world_size)]
            wrong = [f"rank {rank} has {count}" for rank, count in counts.items() if rank not in shares]
            if wrong:
                contradictions.append(Contradiction(
                    f"{group.words}: {', '.join(wrong)}; {self.totals[dimension]} are dealt out as "
                    f"{', '.join(str(len(share)) for share in self.planned[dimension])}"))
            elif counts and dimension != "vocab" and (flaw := self._flaw(dimension, shares, layouts["q"])):
                dealt = "; ".join(f"rank {rank}: {span(items)}" for rank, items in sorted(shares.items()))
                contradictions.append(Contradiction(f"{group.words} are dealt out wrongly ({dealt}): {flaw}",
                                                    about=group.behind))
        return layouts

    def _flaw(self, dimension: str, shares: dict[int, Indices], queries: list[Indices | None]) -> str:
        """Query heads or MLP columns that are on no rank, or KV heads that a rank does not hold and its query heads
        read; ``""`` if there are none."""
        for stage in self.sources.stages:
            held = {item for rank in stage for item in shares.get(rank, range(self.totals[dimension]))}
            if dimension in ("q", "mlp") and (lost := sorted({*range(self.totals[dimension])} - held)):
                return f"{span(lost)} on no rank"
            for rank in stage if dimension in "kv" else ():
                if len(queries[rank] or ()) == self.totals["q"]:
                    continue  # gathered, for a norm over all heads
                read = self._read_by(queries[rank])
                if rank in shares and not {*read} <= {*shares[rank]}:
                    return f"rank {rank} holds {span(shares[rank])}, but its query heads read {span(read)}"
        return ""

    # What can be taken for a point.

    def candidates(self, name: str) -> Iterator[Candidate]:
        """What can be taken for a point, the strongest claim first."""
        at, _, point = name.rpartition(".")
        if point not in GROUP_OF:
            yield from self._whole_or_summands(name)
            return
        claimed = [(source, None) for source in self.sources.of(name)]
        if fused := _FUSED_OF.get(point):
            claimed += [(source, fused) for source in self.sources.of(f"{at}.{fused}")]
        for source, fused in sorted(claimed, key=lambda claim: FUSED if claim[1] else claim[0].strength):
            read = partial(self.read, source, name, fused)
            if name == "logits" or all(read(rank, SHAPE) is not None for rank in self.sources.complete(source)):
                yield Candidate(source, read, "cut as " + "|".join(PARTS[fused]) if fused else "dealt out by size")

    def read(self, source: Source, name: str, fused: str | None, rank: int, look: str) -> torch.Tensor | None:
        """A source's tensor on a rank, as a point's; ``fused``: what it is a part of."""
        point, dim = short_name(name), self.config.head_dim
        if name == "logits":
            return (self.sources.logits(source, rank, look) or (None, None))[1]
        if fused is None and GROUP_OF[point] != "mlp":
            tensor = self.sources.heads(source, rank, look)
        else:
            tensor = self.sources.rows(source, rank, look)
            if tensor is not None and fused is not None:
                cut = self.by_size(fused, tensor.shape[1], rank)
                tensor = cut and tensor[:, as_index(cut[point])]
                tensor = tensor if tensor is None or fused == "gate_up" else tensor.unflatten(1, (-1, dim))
        if tensor is not None and point in _PAIRED and "pairs" in self.told_layouts:
            return tensor.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return tensor

    def by_size(self, fused: str, width: int, rank: int) -> dict[str, range | list[int]] | None:
        """The columns of each part: ``[q|k|v]`` by the plan's rule, of all heads or of an equal share; gate and up in
        equal halves."""
        if fused == "gate_up":
            return {"gate": range(width // 2), "up": range(width // 2, width)} if width % 2 == 0 else None
        dim = self.config.head_dim
        planned, size = [len(self.planned[group][rank]) for group in "qk"], len(self.stage(rank))
        equal = self.totals["q"] // size, max(1, self.totals["k"] // size)  # the remainder on no rank
        for q, kv in (planned, (self.totals["q"], self.totals["k"]), equal):
            if (q + 2 * kv) * dim == width:
                heads, size = range(q + 2 * kv), q // kv + 2
                if "groups" in self.told_layouts and q % kv == 0:
                    items = {"q": [h for h in heads if h % size < size - 2], "k": heads[size - 2::size],
                             "v": heads[size - 1::size]}
                else:
                    items = {"q": heads[:q], "k": heads[q:q + kv], "v": heads[q + kv:]}
                return {part: columns_of(part_heads, dim) for part, part_heads in items.items()}
        return None

    # Sums over the ranks.

    def _whole_or_summands(self, name: str) -> Iterator[Candidate]:
        """What can be taken for a replicated point or for a sum's summands, the strongest claim first."""
        at, _, point = name.rpartition(".")
        claimed, summands = self.sources.of(name), layout(name) == "partial"
        for role, names in SUMS.items():
            claimed += [source for source in self.sources.of(f"{at}.{role}") if point in names
                      and self.summands.get((source.pattern, role), False) is summands]
        for source in sorted(claimed, key=self.sources.rank_of):
            if name != "embed" or source.kind == "in" or not self._is_masked(source):
                yield Candidate(source, partial(self.sources.rows, source),
                                "one summand on each rank" if summands else "whole on every rank")

    def _is_masked(self, source: Source) -> bool:
        """Whether an embedding's output lacks the rows of other ranks' shares of the vocabulary: they are zero."""
        ranks = self.sources.complete(source)
        outs = [self.sources.rows(source, rank, FEW) for rank in ranks]
        if len(self.stage(ranks[0])) == 1 or None in [out if out is None else 1 for out in outs]:
            return False
        not_zero = torch.stack([out.any(1) for out in outs])  # [ranks, rows]
        return not not_zero.all() and bool((not_zero.sum(0) <= 1).all())

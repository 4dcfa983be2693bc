"""What each rank holds of each dimension: the labels of a few layers' tensors, one decision for each dimension."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import islice
from typing import NamedTuple

import torch

from tplab.align.check.evidence import Evidence
from tplab.align.check.fused import Fused, Split
from tplab.align.check.match import (
    GROUP_OF,
    GROUPS,
    PADDING,
    PARTS,
    Indices,
    Layout,
    decide,
    match,
    not_a_partition,
    not_serving,
    order_in_heads,
    usual_shares,
)
from tplab.align.check.names import FUSED
from tplab.align.check.sources import FEW, SHAPE, Source, Sources
from tplab.align.operations import as_index
from tplab.align.recording import Contradiction
from tplab.checkpoint import Checkpoint
from tplab.shard import ShardPlan

_FUSED_OF = {part: fused for fused, parts in PARTS.items() for part in parts}
Labels = dict[int, Indices | None]  # by rank


class Candidate(NamedTuple):
    """What can be taken for a point: a source, what reads a rank's tensor of it (``look`` as in
    :mod:`tplab.align.check.sources`), in words how."""

    source: Source
    read: Callable[[int, str], torch.Tensor | None]
    words: str = ""


class Shares:
    """Decides what each rank holds of each dimension: ``layouts`` of ``q``, ``k``, ``v``, ``mlp`` and ``vocab``.

    ``totals`` says how many heads, columns and rows there are, ``planned`` which of them the plan gives each rank;
    ``as_it_stands``: the numbers of a head are taken to be in Hugging Face's order.
    """

    def __init__(self, sources: Sources, ckpt: Checkpoint, plan: ShardPlan, as_it_stands: bool = False):
        self.as_it_stands = as_it_stands
        self.sources, self.config, self.evidence = sources, ckpt.config, Evidence(ckpt, sources)
        self.stages, config = sources.stages, ckpt.config
        self.totals = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads,
                       "mlp": config.intermediate_size, "vocab": config.vocab_size}
        self.planned = {which: [tuple(getattr(shard, group.plan)) for shard in plan.ranks]
                        for which, group in GROUPS.items()}
        self._by_weight: dict[str, Labels] = {}

    @cached_property
    def sampled(self) -> list[str]:
        """The layers that are asked: the first, the middle and the last of those that each stage recorded."""
        found = (sorted(self.sources.layers_of(*stage)) for stage in self.stages)
        asked = {layers[at] for layers in found for at in (0, len(layers) // 2, -1) if layers}
        return [f"layers.{layer}." for layer in sorted(asked)]

    def seat(self, rank: int) -> tuple[int, int]:
        """A rank's place among those of its pipeline stage, and how many these are."""
        stage = next(stage for stage in self.stages if rank in stage)
        return stage.index(rank), len(stage)

    def dim(self, point: str) -> int:
        """How many columns an item of a point has: a head's, or one."""
        return self.config.head_dim if GROUP_OF[point] in ("q", "k", "v") else 1

    def polled(self, ask: Callable[[str], Labels], layers: list[str] | None = None) -> list[Indices | None]:
        """What most layers say, rank by rank; who says nothing has no vote."""
        said = [ask(at) for at in (self.sampled if layers is None else layers)]
        counted = (Counter(one[rank] for one in said if one.get(rank)) for rank in range(self.sources.world_size))
        return [votes.most_common(1)[0][0] if votes else None for votes in counted]

    # The order of the numbers in a head.

    @cached_property
    def orders(self) -> dict[str, list[int]]:
        """Where a head's numbers stand in another order than Hugging Face's, the same for q and k: ``"q"``, ``"k"``,
        ``"q_rope"``, ``"k_rope"`` → where in the engine's head each of Hugging Face's numbers stands.

        Such an order is a layout (rows of q and k permuted for a rotation in pairs), unless :func:`check` finds that
        what is made of it is right as it stands.
        """
        found: dict[str, list[int]] = {}
        for at in () if self.as_it_stands else self.sampled[:1]:
            for more in ("", "_rope"):  # where one has a bug, the other says it; a rotation keeps the order
                orders = [self._order(at, part + more, found.get(part)) for part in "qk"]
                seen = [order for order in orders if order] or [found[part] for part in "q" if more and part in found]
                if seen and all(order == seen[0] for order in seen):
                    found |= dict.fromkeys((f"q{more}", f"k{more}"), seen[0])
        return {point: order for point, order in found.items() if order != sorted(order)}

    def _order(self, at: str, point: str, before: list[int] | None) -> list[int] | None:
        """The order of one point's heads on the first rank that has it; ``before``: that of the point it is made from.
        """
        for source, read, _ in islice(self._as_they_stand(at + point), 1):
            rank = self.sources.complete(source)[0]
            full = self.evidence.own(at + point, source, rank)
            if point.endswith("rope"):
                made_of = f"{at}{point[0]}{'_norm' * self.config.qk_norm}"
                inner = next((one.read(rank, FEW) for one in self._as_they_stand(made_of)
                              if rank in self.sources.complete(one.source)), None)
                full = None if inner is None else self.evidence.turned(inner if before is None else inner[..., before])
            return None if full is None else order_in_heads(read(rank, FEW), full)
        return None

    # What can be taken for a point of heads or columns.

    def candidates(self, name: str) -> Iterator[Candidate]:
        """The strongest claim first; numbers in Hugging Face's order."""
        point = name.rpartition(".")[2]
        order = self.orders.get(point.removesuffix("_norm")) if point[0] in "qk" else None
        for one in self._as_they_stand(name):
            yield one if order is None else Candidate(
                one.source, lambda rank, look, read=one.read: read(rank, look)[..., order],
                f"{one.words}the numbers of a head in an order of their own, as what follows knows; ")

    def _as_they_stand(self, name: str) -> Iterator[Candidate]:
        at, _, point = name.rpartition(".")
        found = [(source, None) for source in self.sources.of(name)]
        if fused := _FUSED_OF.get(point):
            found += [(source, self.splits[fused]) for source in self.sources.of(f"{at}.{fused}")]
        for source, split in sorted(found, key=lambda one: FUSED if one[1] else one[0].strength):
            read = partial(self.read, source, name, split)
            if all(read(rank, SHAPE) is not None for rank in self.sources.complete(source)):
                yield Candidate(source, read, split.sentence if split else "")

    def read(self, source: Source, name: str, split: Split | None, rank: int, look: str) -> torch.Tensor | None:
        """A source's tensor on a rank, as a point's; ``split``: where it is fused."""
        point = name.rpartition(".")[2]
        columns = GROUP_OF[point] == "mlp"
        if not columns and split is None:
            return self._way(name, list(self.sources.heads(source, rank, look).values()))
        rows = self.sources.rows(source, rank, look)
        if rows is None or split is None:
            return rows
        if split.parts[rank] is None or rows.shape[1] != split.widths[rank]:
            return None
        part = rows[:, as_index(split.parts[rank][point])]
        return part if columns else part.unflatten(1, (-1, self.config.head_dim))

    def _way(self, name: str, ways: list[torch.Tensor]) -> torch.Tensor | None:
        """The most usual way to read heads; where a tensor has as many tokens as heads, the one that fits."""
        if len(ways) > 1 and not ways[0].is_meta and not torch.equal(*ways[:2]) and (
                full := self.evidence.reference(name)) is not None:
            def off(way: torch.Tensor) -> float:
                heads, true = (x.double().transpose(0, 1).flatten(1) for x in (way[:len(full)], full))
                return torch.cdist(heads, true).min(1).values.max().item()
            return min(ways, key=off)
        return ways[0] if ways else None

    @cached_property
    def splits(self) -> dict[str, Split]:
        """How fused outputs are cut."""
        return {name: Fused(self, name).split() for name in PARTS}

    # Votes.

    def vote(self, which: str, local: torch.Tensor, full: torch.Tensor, rank: int) -> Indices | None:
        """A rank's labels of one dimension; the usual shares are asked first."""
        total, count = self.totals[which], local.shape[1]
        shares = [self.planned[which][rank], *usual_shares(total, count, *self.seat(rank))]
        if which != "vocab":
            return match(local, full, shares)
        for share in shares:  # what stands in columns of padding is no matter
            kept = [at for at, index in enumerate(share) if index != PADDING]
            if len(share) == count and match(local[:, kept], full, [tuple(share[at] for at in kept)], search=False):
                return share
        return None

    def vote_by_weight(self, which: str, rank: int, local: torch.Tensor, full: torch.Tensor) -> None:
        """What a recorded weight says about a dimension, for :attr:`layouts` to ask where no activation does."""
        nothing = [None] * self.sources.world_size
        counts, found = self._by_weight.setdefault(which, (nothing, nothing[:]))
        counts[rank], found[rank] = local.shape[1], self.vote(which, local, full, rank)

    def _votes(self, which: str, points: tuple[str, ...]) -> tuple[list[int | None], list[Indices | None]]:
        """How many each rank holds, and which the values say: by the ranks' own inputs, else by Hugging Face's trace.
        """
        counts: list[int | None] = [None] * self.sources.world_size

        def ask(expected: Callable, at: str) -> Labels:
            found: Labels = {}
            for point in points:
                for source, read, _ in islice(self.candidates(at + point), 1):
                    for rank in self.sources.complete(source):
                        tensor = read(rank, FEW)
                        counts[rank] = counts[rank] or tensor.shape[1]
                        if not found.get(rank) and (full := expected(at + point, source, rank)) is not None:
                            found[rank] = self.vote(which, tensor, full, rank)
            return found
        found = self.polled(partial(ask, self.evidence.own))
        if any(count and not share for count, share in zip(counts, found)):
            guessed = self.polled(partial(ask, self.evidence.reference), self.sampled[:1])
            found = [own or other for own, other in zip(found, guessed)]
        return counts, found

    def _vocabulary(self) -> tuple[list[int | None], list[Indices | None]]:
        counts, found = [None] * self.sources.world_size, [None] * self.sources.world_size
        for source in self.sources.of("logits")[:1]:
            for rank in self.sources.complete(source):
                if (logits := self.sources.logits(source, rank, FEW)) is not None:
                    places, tensor = logits
                    x = self._head_input(source, places, rank)
                    full = self.evidence.logits(places) if x is None else self.evidence.of("logits", x)
                    counts[rank], found[rank] = tensor.shape[1], self.vote("vocab", tensor, full, rank)
        return counts, found

    def _head_input(self, logits: Source, places: list, rank: int) -> torch.Tensor | None:
        for source in self.sources.before(logits, "norm", rank):
            if (rows := self.sources.logits(source, rank)) is not None:
                row_of = {place: row for row, place in enumerate(rows[0])}
                if all(place in row_of for place in places) and rows[1].shape[1] == self.config.hidden_size:
                    return rows[1][[row_of[place] for place in places]]
        return None

    # Decisions.

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The decision for each dimension."""
        counts, found = {}, {}
        for which, group in GROUPS.items():
            counts[which], found[which] = self._vocabulary() if which == "vocab" else self._votes(which, group.points)
            if not any(counts[which]) and which in self._by_weight:
                counts[which], found[which] = self._by_weight[which]
        ups = self._votes("mlp", ("up",))[1]
        found["mlp"] = [None if up and up != gate else gate for gate, up in zip(found["mlp"], ups)]
        for which in "kv":  # every head several times, as attention without groups wants them
            for rank, count in enumerate(counts[which]):
                if count is not None and count == counts["q"][rank] != len(self.planned[which][rank]):
                    seen = [head for head in found[which][rank] or () if head != PADDING]
                    if not seen or len(set(seen)) < len(seen):
                        counts[which][rank], found[which][rank] = len(self.planned[which][rank]), None
        parts = [self._decided(stage, counts, found) for stage in self.stages]
        return {which: self._joined(group, [part[which] for part in parts]) for which, group in GROUPS.items()}

    def _joined(self, group, parts: list[Layout]) -> Layout:
        """The stages' decisions about one dimension."""
        indices = {rank: share for stage, part in zip(self.stages, parts) for rank, share in zip(stage, part.indices)}
        self.sources.contradictions += [Contradiction(part.contradiction, about=group.behind) for part in parts
                                        if part.contradiction]
        return Layout(tuple(map(indices.get, range(self.sources.world_size))),
                      "; ".join(dict.fromkeys(part.sentence for part in parts if part.sentence)))

    def _decided(self, stage: list[int], counts: dict, found: dict) -> dict[str, Layout]:
        """The decisions for the ranks of one pipeline stage, which share what there is among them."""
        counts, found, planned = ({which: [of[which][rank] for rank in stage] for which in of}
                                  for of in (counts, found, self.planned))
        group, done = self.config.num_heads // self.config.num_kv_heads, {}

        def add(which: str, flaw: Callable, starts: list[int] | None = None) -> None:
            done[which] = decide(GROUPS[which].words, counts[which], planned[which], found[which], self.totals[which],
                                 flaw, starts, stage) if any(counts[which]) else Layout(tuple(planned[which]))

        def flaw_of_q(q) -> str:
            unserved = [not_serving(kv, q, group, stage) for kv in (found["k"], planned["k"]) if None not in kv]
            return not_a_partition(q, self.totals["q"]) or min(unserved, key=len)

        def flaw_of_k(k) -> str:
            return not_serving(k, done["q"].indices, group, stage)
        add("q", flaw_of_q)
        starts = [heads[0] // group if heads else 0 for heads in done["q"].indices]
        add("k", flaw_of_k, starts)
        add("v", lambda v: flaw_of_k(v) or ("" if tuple(v) == done["k"].indices else
                                            "the keys are dealt out otherwise"), starts)
        for which in ("mlp", "vocab"):
            add(which, partial(not_a_partition, total=self.totals[which]))
        return done

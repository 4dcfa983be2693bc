"""The layouts of one recording: votes of a few layers, one decision for each dimension."""

from collections.abc import Iterator
from functools import cached_property, partial
from itertools import islice
from typing import NamedTuple

import torch

from tplab.align.check import layouts
from tplab.align.check.evidence import Evidence, Reference
from tplab.align.check.fused import Split, columns_in, heads_in, split
from tplab.align.check.layouts import Indices, Layout
from tplab.align.check.names import FUSED
from tplab.align.check.sources import FEW, WHOLE, Source, Sources
from tplab.align.operations import as_index
from tplab.checkpoint import Checkpoint
from tplab.shard import ShardPlan

_WHAT = {"q": "query heads", "k": "key heads", "v": "value heads", "mlp": "MLP columns", "vocab": "vocabulary rows"}
_MEMBERS = {"q": ("q", "q_norm", "q_rope", "attn"), "k": ("k", "k_norm", "k_rope"), "v": ("v",),
            "mlp": ("gate", "up", "mlp_act")}
_FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
GROUPS = {point: which for which, points in _MEMBERS.items() for point in points} | {"logits": "vocab"}


class Held(NamedTuple):
    """A source's tensors, rank by rank: ``[places, heads, head_dim]`` or ``[places, columns]``."""

    source: Source
    tensors: dict[int, torch.Tensor]
    sentence: str = ""


class Shares:
    """Decides what each rank holds of each dimension: ``layouts`` of ``q``, ``k``, ``v``, ``mlp`` and ``vocab``.

    ``totals`` says how many heads, columns and rows there are; ``contradictions`` what no layout explains.
    """

    def __init__(self, sources: Sources, ckpt: Checkpoint, plan: ShardPlan):
        self.sources, self.ckpt, self.config = sources, ckpt, ckpt.config
        self.size, config = sources.world_size, ckpt.config
        self.evidence, self.reference = Evidence(ckpt), Reference(ckpt, sources)
        self.totals = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads,
                       "mlp": config.intermediate_size, "vocab": config.vocab_size}
        dimension = {"q": "q_heads", "k": "kv_heads", "v": "kv_heads", "mlp": "mlp", "vocab": "vocab"}
        self.planned = {which: [tuple(getattr(shard, name)) for shard in plan.ranks]
                        for which, name in dimension.items()}
        self.contradictions: list[str] = []
        self._by_weight: dict[str, tuple[list, list]] = {}

    @cached_property
    def sampled(self) -> list[str]:
        """The layers that are asked: the first, the middle and the last of those that were recorded."""
        layers = self.sources.layers()
        asked = {layers[at] for at in (0, len(layers) // 2, -1)} if layers else ()
        return [f"layers.{layer}." for layer in sorted(asked)]

    # What a source holds.

    def held(self, name: str, look: str = WHOLE) -> Iterator[Held]:
        """All that can be taken for a point of heads or columns, the strongest claim first."""
        at, _, point = name.rpartition(".")
        found = [(source.strength, partial(self._of, source, name, look)) for source in self.sources.of(name)]
        if fused := _FUSED.get(point):
            found += [(FUSED, partial(self._part, source, fused, point, look))
                      for source in self.sources.of(f"{at}.{fused}")]
        return (held for _, read in sorted(found, key=lambda pair: pair[0]) if (held := read()))

    def _of(self, source: Source, name: str, look: str) -> Held | None:
        ranks = self.sources.complete(source)
        if GROUPS[name.rpartition(".")[2]] == "mlp":
            tensors = {rank: self.sources.rows(source, rank, look) for rank in ranks}
        else:
            tensors = {rank: self._way(name, self.sources.heads(source, rank, look)) for rank in ranks}
        return None if any(tensor is None for tensor in tensors.values()) else Held(source, tensors)

    def _way(self, name: str, ways: dict[str, torch.Tensor]) -> torch.Tensor | None:
        """The most usual way to read heads; where a tensor has as many tokens as heads, the one that fits."""
        if len(ways) > 1 and not next(iter(ways.values())).is_meta and not torch.equal(*list(ways.values())[:2]):
            full = self.reference.point(name)
            if full is not None:
                def distance(way: str) -> float:
                    pair = ways[way][:len(full)], full
                    heads, true = (tensor.double().transpose(0, 1).flatten(1) for tensor in pair)
                    return torch.cdist(heads, true).min(1).values.max().item()

                return ways[min(ways, key=distance)]
        return next(iter(ways.values()), None)

    def _part(self, source: Source, fused: str, point: str, look: str) -> Held | None:
        split = self.splits[fused]
        tensors = {}
        for rank in self.sources.complete(source):
            rows = self.sources.rows(source, rank, look)
            if rows is None or split.parts[rank] is None or rows.shape[1] != split.widths[rank]:
                return None
            part = rows[:, as_index(split.parts[rank][point])]
            tensors[rank] = part if fused == "gate_up" else part.unflatten(1, (-1, self.config.head_dim))
        return Held(source, tensors, split.sentence)

    def own_input(self, source: Source, name: str, rank: int) -> torch.Tensor | None:
        """The sampled rows of what went into the module that a source is the output of; else of the point ``name``."""
        inputs = self.sources.of(name)
        for found in sorted(inputs, key=lambda s: (s.name != source.name, inputs.index(s))):
            if rank in self.sources.complete(found) and (rows := self.sources.rows(found, rank, FEW)) is not None:
                return rows
        return None

    # Votes.

    def vote(self, which: str, local: torch.Tensor, full: torch.Tensor, rank: int) -> Indices | None:
        shares = [self.planned[which][rank], *layouts.candidates(self.totals[which], local.shape[1], rank, self.size)]
        return layouts.fit(local, full, shares, search=which != "vocab")

    def vote_by_weight(self, which: str, rank: int, local: torch.Tensor, full: torch.Tensor) -> None:
        """What a recorded weight says about a dimension, for :attr:`layouts` to ask where no activation does."""
        counts, found = self._by_weight.setdefault(which, ([None] * self.size, [None] * self.size))
        counts[rank], found[rank] = local.shape[1], self.vote(which, local, full, rank)

    def _votes(self, which: str, points: tuple[str, ...]) -> tuple[list[int | None], list[Indices | None]]:
        """How many each rank holds, and which the values say."""
        counts, votes, guesses = [None] * self.size, [], []
        for at in self.sampled:
            vote, guess = [None] * self.size, [None] * self.size
            for point in points:
                for held in islice(self.held(at + point, FEW), 1):
                    for rank, tensor in held.tensors.items():
                        counts[rank] = counts[rank] or tensor.shape[1]
                        if vote[rank] is None and (full := self._expected(at, point, held.source, rank)) is not None:
                            vote[rank] = self.vote(which, tensor, full, rank)
                        elif vote[rank] is None and guess[rank] is None and at == self.sampled[0] and (
                                full := self.reference.point(at + point)) is not None:
                            guess[rank] = self.vote(which, tensor, full, rank)
            votes.append(vote)
            guesses.append(guess)
        found = layouts.agreed(votes)
        return counts, [own if own is not None else other for own, other in zip(found, layouts.agreed(guesses))]

    def _expected(self, at: str, point: str, source: Source, rank: int) -> torch.Tensor | None:
        """``[rows, all items, …]`` of a point from the rank's own input; None if that does not say it."""
        if point not in ("q", "k", "v", "gate", "up", "mlp_act"):
            return None
        before = "input_norm" if point in "qkv" else "post_norm"
        x = self.own_input(source, at + before, rank)
        if x is None:
            return None
        layer = int(at.split(".")[1])
        return (self.evidence.heads if point in "qkv" else self.evidence.projection)(layer, point, x)

    # Decisions.

    @cached_property
    def splits(self) -> dict[str, Split]:
        """How fused outputs are cut."""
        found = {fused.name: split(self, fused) for fused in (heads_in(self), columns_in(self))}
        self.contradictions += [split.contradiction for split in found.values() if split.contradiction]
        return found

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The decision for each dimension."""
        config, planned = self.config, self.planned
        group = config.num_heads // config.num_kv_heads
        counts, found = {}, {}
        for which in ("q", "k", "v"):
            counts[which], found[which] = self._votes(which, _MEMBERS[which])
        counts["mlp"], columns = self._votes("mlp", ("gate", "mlp_act"))
        ups = self._votes("mlp", ("up",))[1]
        found["mlp"] = [None if up is not None and up != gate else gate for gate, up in zip(columns, ups)]
        counts["vocab"], found["vocab"] = self._vocabulary()
        for which in self._by_weight:
            if not any(counts[which]):
                counts[which], found[which] = self._by_weight[which]
        for which in ("k", "v"):  # every head several times, as attention without groups wants them
            for rank, count in enumerate(counts[which]):
                if count is not None and count == counts["q"][rank] != len(planned[which][rank]):
                    seen = [head for head in found[which][rank] or () if head != layouts.PADDING]
                    if not seen or len(set(seen)) < len(seen):
                        counts[which][rank], found[which][rank] = len(planned[which][rank]), None

        def flaw_of_q(q) -> str:
            unserved = [layouts.not_serving(kv, q, group) for kv in (found["k"], planned["k"]) if None not in kv]
            return layouts.not_a_partition(q, config.num_heads) or min(unserved, key=len)

        done = {"q": self._decide("q", counts, found, flaw_of_q)}
        starts = [heads[0] // group if heads else 0 for heads in done["q"].indices]
        flaw_of_k = partial(layouts.not_serving, q=done["q"].indices, group=group)
        done["k"] = self._decide("k", counts, found, flaw_of_k, starts)
        done["v"] = self._decide("v", counts, found, lambda v: flaw_of_k(v) or (
            "" if tuple(v) == done["k"].indices else "the keys are dealt out otherwise"), starts)
        for which in ("mlp", "vocab"):
            done[which] = self._decide(which, counts, found,
                                       partial(layouts.not_a_partition, total=self.totals[which]))
        self.contradictions += [decision.contradiction for decision in done.values() if decision.contradiction]
        return done

    def _decide(self, which: str, counts: dict, found: dict, flaw, starts: list[int] | None = None) -> Layout:
        if not any(counts[which]):
            return Layout(tuple(self.planned[which]), "")
        return layouts.decide(_WHAT[which], counts[which], self.planned[which], found[which], self.totals[which], flaw,
                              starts)

    def _vocabulary(self) -> tuple[list[int | None], list[Indices | None]]:
        counts, found = [None] * self.size, [None] * self.size
        for source in self.sources.of("logits")[:1]:
            for rank in self.sources.complete(source):
                if (logits := self.sources.logits(source, rank, FEW)) is None:
                    continue
                places, tensor = logits
                counts[rank] = tensor.shape[1]
                x = self._head_input(source, places, rank)
                full = self.reference.logits(places) if x is None else self.evidence.logits(x)
                if full is not None:
                    found[rank] = self.vote("vocab", tensor, full, rank)
        return counts, found

    def _head_input(self, logits: Source, places: list, rank: int) -> torch.Tensor | None:
        inputs = self.sources.of("norm")
        for source in sorted(inputs, key=lambda s: (s.name != logits.name, inputs.index(s))):
            if rank in self.sources.complete(source) and (rows := self.sources.logits(source, rank)) is not None:
                row_of = {place: row for row, place in enumerate(rows[0])}
                if all(place in row_of for place in places) and rows[1].shape[1] == self.config.hidden_size:
                    return rows[1][[row_of[place] for place in places]]
        return None


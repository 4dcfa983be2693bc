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
from tplab.align.check.sources import FEW, SAMPLE, WHOLE, Source, Sources
from tplab.align.operations import as_index
from tplab.align.recording import Contradiction
from tplab.checkpoint import Checkpoint
from tplab.shard import ShardPlan

_WHAT = {"q": "query heads", "k": "key heads", "v": "value heads", "mlp": "MLP columns", "vocab": "vocabulary rows"}
_MEMBERS = {"q": ("q", "q_norm", "q_rope", "attn"), "k": ("k", "k_norm", "k_rope"), "v": ("v",),
            "mlp": ("gate", "up", "mlp_act")}
_FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
# where a bug can stand that deals out wrongly
_BEHIND = dict.fromkeys(("q", "k", "v", "qkv"), ("q", "k", "v")) | dict.fromkeys(
    ("mlp", "gate_up"), ("gate", "up", "mlp_act")) | {"vocab": ("logits",)}
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
        self.stages, config = sources.stages, ckpt.config
        self.evidence, self.reference = Evidence(ckpt), Reference(ckpt, sources)
        self.totals = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads,
                       "mlp": config.intermediate_size, "vocab": config.vocab_size}
        dimension = {"q": "q_heads", "k": "kv_heads", "v": "kv_heads", "mlp": "mlp", "vocab": "vocab"}
        self.planned = {which: [tuple(getattr(shard, name)) for shard in plan.ranks]
                        for which, name in dimension.items()}
        self.contradictions: list[Contradiction] = []
        self._by_weight: dict[str, tuple[list, list]] = {}

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

    # The order of the numbers in a head.

    @cached_property
    def orders(self) -> dict[str, torch.Tensor]:
        """Where a head's numbers stand in another order than Hugging Face's, the same for q and k: ``"q"``, ``"k"``,
        ``"q_rope"``, ``"k_rope"`` → where in the engine's head each of Hugging Face's numbers stands.

        Such an order is a layout (rows of q and k permuted for a rotation in pairs) if what is made of it is right.
        """
        found: dict[str, torch.Tensor] = {}
        for at in self.sampled[:1]:
            before = [self._order(at, part) for part in "qk"]
            if before[0] is not None and before[1] is not None and torch.equal(*before):
                found |= dict(zip("qk", before))
            behind = [self._order(at, f"{part}_rope", found.get(part)) for part in "qk"]
            seen = [any(self._raw(f"{at}{part}_rope", FEW)) for part in "qk"]
            if behind[0] is not None and behind[1] is not None and torch.equal(*behind):
                found |= {"q_rope": behind[0], "k_rope": behind[1]}
            elif found and any(seen):
                return {}  # the rotation does not know of the order: that is a bug
            for held in islice(self._raw(f"{at}attn", FEW), 1) if found else ():
                full = self.reference.point(f"{at}attn")
                if full is None or any(self.vote("q", x, full, rank) is None for rank, x in held.tensors.items()):
                    return {}
        return {point: order for point, order in found.items() if not torch.equal(order, order.sort().values)}

    def _order(self, at: str, point: str, before: torch.Tensor | None = None) -> torch.Tensor | None:
        """The order of one point's heads on the first rank that has it; ``before``: that of the point it is made from.
        """
        part, layer = point[0], int(at.split(".")[1])
        for held in islice(self._raw(at + point, FEW), 1):
            rank, local = next(iter(held.tensors.items()))
            if point == part:
                x = self.own_input(held.source, f"{at}input_norm", rank)
                full = None if x is None else self.evidence.of(layer, part, x)
            else:
                made_of = f"{at}{part}_norm" if self.config.qk_norm else at + part
                full = next((inner.tensors[rank] for inner in self._raw(made_of, FEW) if rank in inner.tensors), None)
                if full is not None:
                    full = self.evidence.rope(full if before is None else full[..., before],
                                              [position for _, position in self.sources.places[:SAMPLE]])
            return None if full is None else layouts.order_in_heads(local, full)
        return None

    # What a source holds.

    def held(self, name: str, look: str = WHOLE) -> Iterator[Held]:
        """All that can be taken for a point of heads or columns, the strongest claim first; numbers in Hugging Face's
        order."""
        point = name.rpartition(".")[2]
        order = self.orders.get(point.removesuffix("_norm")) if point[0] in "qk" else None
        for held in self._raw(name, look):
            yield held if order is None else held._replace(
                tensors={rank: tensor[..., order] for rank, tensor in held.tensors.items()},
                sentence=f"{held.sentence}the numbers of a head in an order of their own, as what follows knows; ")

    def _raw(self, name: str, look: str) -> Iterator[Held]:
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
        shares = [self.planned[which][rank], *layouts.candidates(self.totals[which], local.shape[1], *self.seat(rank))]
        if which != "vocab":
            return layouts.fit(local, full, shares)
        for share in shares:  # what stands in columns of padding is no matter
            kept = [at for at, index in enumerate(share) if index != layouts.PADDING]
            real = tuple(share[at] for at in kept)
            if len(share) == local.shape[1] and layouts.fit(local[:, kept], full, [real], search=False):
                return share
        return None

    def vote_by_weight(self, which: str, rank: int, local: torch.Tensor, full: torch.Tensor) -> None:
        """What a recorded weight says about a dimension, for :attr:`layouts` to ask where no activation does."""
        nothing = [None] * self.sources.world_size
        counts, found = self._by_weight.setdefault(which, (nothing, nothing[:]))
        counts[rank], found[rank] = local.shape[1], self.vote(which, local, full, rank)

    def _votes(self, which: str, points: tuple[str, ...]) -> tuple[list[int | None], list[Indices | None]]:
        """How many each rank holds, and which the values say."""
        counts, votes, guesses = [None] * self.sources.world_size, [], []
        for at in self.sampled:
            vote, guess = [None] * self.sources.world_size, [None] * self.sources.world_size
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
        found, guessed = (layouts.agreed(seen) or [None] * len(counts) for seen in (votes, guesses))
        return counts, [own if own is not None else other for own, other in zip(found, guessed)]

    def _expected(self, at: str, point: str, source: Source, rank: int) -> torch.Tensor | None:
        """``[rows, all items, …]`` of a point from the rank's own input; None if that does not say it."""
        if point not in ("q", "k", "v", "gate", "up", "mlp_act"):
            return None
        before = "input_norm" if point in "qkv" else "post_norm"
        x = self.own_input(source, at + before, rank)
        if x is None:
            return None
        return self.evidence.of(int(at.split(".")[1]), point, x)

    # Decisions.

    @cached_property
    def splits(self) -> dict[str, Split]:
        """How fused outputs are cut."""
        found = {fused.name: split(self, fused) for fused in (heads_in(self), columns_in(self))}
        self.contradictions += [Contradiction(split.contradiction, about=_BEHIND[name])
                                for name, split in found.items() if split.contradiction]
        return found

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The decision for each dimension."""
        planned = self.planned
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

        parts = [self._decided(stage, counts, found) for stage in self.stages]
        whole = {}
        for which in parts[0]:
            indices: list = [None] * self.sources.world_size
            for stage, part in zip(self.stages, parts):
                for rank, own in zip(stage, part[which].indices):
                    indices[rank] = own
            sentences = dict.fromkeys(part[which].sentence for part in parts if part[which].sentence)
            whole[which] = Layout(tuple(indices), "; ".join(sentences))
            self.contradictions += [Contradiction(part[which].contradiction, about=_BEHIND[which]) for part in parts
                                    if part[which].contradiction]
        return whole

    def _decided(self, stage: list[int], counts: dict, found: dict) -> dict[str, Layout]:
        """The decisions for the ranks of one pipeline stage, which share what there is among them."""
        counts, found, planned = ({which: [of[which][rank] for rank in stage] for which in of}
                                  for of in (counts, found, self.planned))
        group = self.config.num_heads // self.config.num_kv_heads

        def decide(which: str, flaw, starts: list[int] | None = None) -> Layout:
            if not any(counts[which]):
                return Layout(tuple(planned[which]), "")
            return layouts.decide(_WHAT[which], counts[which], planned[which], found[which], self.totals[which], flaw,
                                  starts, stage)

        def flaw_of_q(q) -> str:
            unserved = [layouts.not_serving(kv, q, group, stage) for kv in (found["k"], planned["k"]) if None not in kv]
            return layouts.not_a_partition(q, self.config.num_heads) or min(unserved, key=len)

        done = {"q": decide("q", flaw_of_q)}
        starts = [heads[0] // group if heads else 0 for heads in done["q"].indices]
        flaw_of_k = partial(layouts.not_serving, q=done["q"].indices, group=group, ranks=stage)
        done["k"] = decide("k", flaw_of_k, starts)
        done["v"] = decide("v", lambda v: flaw_of_k(v) or (
            "" if tuple(v) == done["k"].indices else "the keys are dealt out otherwise"), starts)
        for which in ("mlp", "vocab"):
            done[which] = decide(which, partial(layouts.not_a_partition, total=self.totals[which]))
        return done

    def _vocabulary(self) -> tuple[list[int | None], list[Indices | None]]:
        counts, found = [None] * self.sources.world_size, [None] * self.sources.world_size
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


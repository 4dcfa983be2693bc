"""What each rank holds: of each dimension the labels of a few layers' tensors and one decision; of an output that is a
sum over the ranks, its summand or the sum."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from itertools import combinations, islice
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
    near,
    not_a_partition,
    not_serving,
    order_in_heads,
    usual_shares,
)
from tplab.align.check.names import FUSED, place_of
from tplab.align.check.sources import FEW, SHAPE, Source, Sources
from tplab.align.operations import as_index, columns_of
from tplab.align.points import POINTS, layer_of, made_from
from tplab.align.recording import Contradiction
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import EMBEDDING
from tplab.shard import ShardPlan

_FUSED_OF = {part: fused for fused, parts in PARTS.items() for part in parts}
ROWS = {"o": ("o_partial", "attn", "q"), "down": ("mlp_partial", "mlp_act", "mlp")}  # role → summand, input, dimension
_ROLES_OF = {**dict.fromkeys(("o_proj", "o_partial"), ("o",)), "mlp_partial": ("down",),
             **dict.fromkeys(("mlp", "moe_partial"), ("down", "experts"))}
Labels = dict[int, Indices | None]  # by rank


def kinds(evidence: Evidence, name: str, outs: dict[int, torch.Tensor], own: dict[int, torch.Tensor]) -> set[str]:
    """Whether each rank's output is its ``own`` ``"summand"`` or the ``"sum"`` of all, with the bias or without; ``""``
    if neither."""
    at, _, point = name.rpartition(".")
    bias, total = evidence.weight(f"model.{at}.{POINTS[point].module}.bias"), sum(own.values())
    added = [0.0] if bias is None else [0.0, bias, bias / len(own)]
    return {next((what for what, x in (("summand", own[rank]), ("sum", total))
                  if any(near(out, x + more) for more in added)), "") for rank, out in outs.items()}


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
        self._by_weight: dict[str, tuple[list, list]] = {}
        self._summands: dict[tuple, bool | None] = {}

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
                made_of = at + made_from(at + point, self.config)[0]
                inner = next((one.read(rank, FEW) for one in self._as_they_stand(made_of)
                              if rank in self.sources.complete(one.source)), None)
                full = None if inner is None else self.evidence.turned(
                    at, inner if before is None else inner[..., before])
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
            if name == "logits" or all(read(rank, SHAPE) is not None for rank in self.sources.complete(source)):
                yield Candidate(source, read, split.sentence if split else "")

    def read(self, source: Source, name: str, split: Split | None, rank: int, look: str) -> torch.Tensor | None:
        """A source's tensor on a rank, as a point's; ``split``: where it is fused."""
        point = name.rpartition(".")[2]
        if name == "logits":
            return (self.sources.logits(source, rank, look) or (None, None))[1]
        if split is None and GROUP_OF[point] != "mlp":
            return self._way(name, list(self.sources.heads(source, rank, look).values()))
        rows = self.sources.rows(source, rank, look)
        if rows is None or split is None:
            return rows
        if split.parts[rank] is None or rows.shape[1] != split.widths[rank]:
            return None
        part = rows[:, as_index(split.parts[rank][point])]
        return part if GROUP_OF[point] == "mlp" else part.unflatten(1, (-1, self.config.head_dim))

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
                        if (tensor := read(rank, FEW)) is None:
                            continue
                        counts[rank] = counts[rank] or tensor.shape[1]
                        if not found.get(rank) and (full := expected(at + point, source, rank)) is not None:
                            found[rank] = self.vote(which, tensor, full, rank)
            return found
        layers = [""] if which == "vocab" else self.sampled
        found = self.polled(partial(ask, self.evidence.own), layers)
        if any(count and not share for count, share in zip(counts, found)):
            guessed = self.polled(partial(ask, self.evidence.reference), layers[:1])
            found = [own or other for own, other in zip(found, guessed)]
        return counts, found

    # Decisions.

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        """The decision for each dimension."""
        counts, found = {}, {}
        for which, group in GROUPS.items():
            counts[which], found[which] = self._votes(which, group.points)
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

    # Sums over the ranks.

    def sources_of(self, name: str) -> list[Source]:
        """What can be taken for a replicated point or for a sum's summands, the strongest claim first."""
        at, _, point = name.rpartition(".")
        found = self.sources.of(name)
        for role in _ROLES_OF.get(point, ()):
            summand = point.endswith("partial")
            found += [source for source in self.sources.of(f"{at}.{role}") if self._is_summand(source, role) is summand]
            found.sort(key=self.sources.rank_of)
        return [source for source in found if name != "embed" or not self._is_masked(source)]

    def _is_summand(self, source: Source, role: str) -> bool | None:
        """Decided once for all layers, by most of those looked at: one layer that differs has a bug. None for what is
        neither a summand nor the sum."""
        sparse = POINTS["moe_partial"].needs(self.config, place_of(source.name)[0] or 0)
        if (key := (source.pattern, sparse)) not in self._summands:
            looks = self._looks_like_experts if sparse and role != "o" else self._looks_partial
            votes = Counter(looks(same, role, at) for at in self.sampled if sparse == POINTS["moe_partial"].needs(
                self.config, layer_of(at)) for same in self.sources.of(at + role) if same.pattern == source.pattern)
            self._summands[key] = max((False, None, True), key=lambda vote: votes[vote])
        return self._summands[key]

    def _looks_like_experts(self, source: Source, role: str, at: str) -> bool | None:
        """Whether the ranks' outputs add up to what all experts give. What is called experts may leave out the shared
        one: then it is nothing that is known."""
        ranks, name = self.sources.complete(source), at + "moe_partial"
        outs = [self.sources.rows(source, rank, FEW) for rank in ranks]
        x = self.evidence.input_of(source, at + "post_norm", ranks[0])
        if self.seat(ranks[0])[1] == 1 or any(out is None for out in outs):
            return False
        whole = None if x is None else self.evidence.of(name, x)
        if whole is not None and near(sum(out.float() for out in outs), whole):
            return True
        if role == "down" or whole is not None and any(near(out, whole) for out in outs):
            return False
        return None if self.config.experts.shared_intermediate_size else not any(
            near(a, b) for a, b in combinations(outs, 2))

    def _looks_partial(self, source: Source, role: str, at: str) -> bool:
        ranks = self.sources.complete(source)
        outs = {rank: self.sources.rows(source, rank, FEW) for rank in ranks}
        if self.seat(ranks[0])[1] == 1 or any(out is None for out in outs.values()):
            return False
        inputs = {rank: self._input(at, role, rank, source) for rank in ranks}
        apart = len(ranks) > 1 and not any(near(outs[a], outs[b]) for a in ranks for b in ranks if a < b)
        if len(ranks) > 1 and all(near(out, outs[ranks[0]]) for out in outs.values()):
            # Ranks that put out the same, and have the same share of the input, too: then it is no sum over shares.
            total, first = self.totals[ROWS[role][2]], inputs[ranks[0]]
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
        found = [one for one in self.candidates(at + ROWS[role][1]) if rank in self.sources.complete(one.source)]
        return min(found, key=lambda one: one.source.name != source.name).read(rank, FEW) if found else None

    def _summand(self, at: str, role: str, rank: int, x: torch.Tensor | None) -> torch.Tensor | None:
        partial, before, group = ROWS[role]
        indices = self.layouts[group].indices[rank]
        if x is None or indices is None or x.shape[1] != len(indices):
            return None
        kept = [i for i, index in enumerate(indices) if index != PADDING]
        columns = columns_of([indices[i] for i in kept], self.dim(before))
        return self.evidence.of(at + partial, x[:, kept].flatten(1), features=columns, bias=0.0)

    @cache  # noqa: B019  (it lives as long as one placement)
    def _is_masked(self, source: Source) -> bool:
        """Whether an embedding's output has only the rows of the rank's own share of the vocabulary."""
        ranks, true = self.sources.complete(source), self.evidence.weight(EMBEDDING)[self.sources.sampled_ids]
        outs = [self.sources.rows(source, rank, FEW) for rank in ranks]
        if self.seat(ranks[0])[1] == 1 or any(out is None or out.shape != true.shape for out in outs):
            return False
        rows = [pair for out in outs for pair in zip(out, true)]
        return not all(row.any() for row, _ in rows) and all(not row.any() or near(row, true) for row, true in rows)

"""What each rank holds: of each dimension, by the labels of a few layers' tensors and one decision; and whether an
output is a rank's summand or the sum over the ranks."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, cached_property, partial
from itertools import combinations, islice
from typing import NamedTuple

import torch

from tplab.align.check.expected import Expected
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
    real_items,
    usual_shares,
)
from tplab.align.check.names import FUSED, split_name
from tplab.align.check.sources import FEW, SHAPE, Source, Sources
from tplab.align.points import POINTS, as_index, columns_of, layer_of, layout, made_from
from tplab.align.recording import Contradiction
from tplab.checkpoint import Checkpoint
from tplab.checkpoint.layout import EMBEDDING
from tplab.shard import ShardPlan

_FUSED_OF = {part: fused for fused, parts in PARTS.items() for part in parts}
ROWS = {"o": ("o_partial", "attn", "q"), "down": ("mlp_partial", "mlp_act", "mlp")}  # role → summand, input, dimension
_ROLES_OF = {**dict.fromkeys(("o_proj", "o_partial"), ("o",)), "mlp_partial": ("down",),
             **dict.fromkeys(("mlp", "moe_partial"), ("down", "experts"))}
Labels = dict[int, Indices | None]  # by rank


class Candidate(NamedTuple):
    """A source that may be a point, a function that reads a rank's tensor of it (``look`` as in
    :mod:`tplab.align.check.sources`), and how it is read, in words."""

    source: Source
    read: Callable[[int, str], torch.Tensor | None]
    words: str = ""


class Shares:
    """Decides what each rank holds of each dimension: ``layouts`` of ``q``, ``k``, ``v``, ``mlp`` and ``vocab``.

    ``totals``: how many heads, columns and rows there are; ``planned``: each rank's share by the plan;
    ``usual_order``: take the numbers of a head in Hugging Face's order, and the parts of fused outputs in the plan's.
    """

    def __init__(self, sources: Sources, ckpt: Checkpoint, plan: ShardPlan, usual_order: bool = False):
        self.usual_order = usual_order
        self.sources, self.config, self.expected = sources, ckpt.config, Expected(ckpt, sources)
        self.stages, config = sources.stages, ckpt.config
        self.totals = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads,
                       "mlp": config.intermediate_size, "vocab": config.vocab_size}
        self.planned = {which: [tuple(getattr(shard, group.plan)) for shard in plan.ranks]
                        for which, group in GROUPS.items()}
        self._by_weight: dict[str, tuple[list, list]] = {}
        self._summands: dict[tuple, bool | None] = {}

    @cached_property
    def sampled_layers(self) -> list[str]:
        """The layers that are looked at: the first, the middle and the last of each stage's recorded ones."""
        found = (sorted(self.sources.layers_of(*stage)) for stage in self.stages)
        asked = {layers[at] for layers in found for at in (0, len(layers) // 2, -1) if layers}
        return [f"layers.{layer}." for layer in sorted(asked)]

    def in_stage(self, rank: int) -> tuple[int, int]:
        """A rank's number within its pipeline stage, and the size of the stage."""
        stage = next(stage for stage in self.stages if rank in stage)
        return stage.index(rank), len(stage)

    def dim(self, point: str) -> int:
        """The columns of one item of a point: of a head, or 1."""
        return self.config.head_dim if GROUP_OF[point] in ("q", "k", "v") else 1

    def majority(self, ask: Callable[[str], Labels], layers: list[str] | None = None) -> list[Indices | None]:
        """The labels that most layers give, rank by rank; a layer without labels is not counted."""
        said = [ask(at) for at in (self.sampled_layers if layers is None else layers)]
        counted = (Counter(one[rank] for one in said if one.get(rank)) for rank in range(self.sources.world_size))
        return [votes.most_common(1)[0][0] if votes else None for votes in counted]

    # The order of the numbers in a head.

    @cached_property
    def orders(self) -> dict[str, list[int]]:
        """Where the numbers of a head have another order than Hugging Face's, the same for q and k: ``"q"``, ``"k"``,
        ``"q_rope"``, ``"k_rope"`` → the place of each of Hugging Face's numbers in the engine's head.

        Such an order is a layout (rows of q and k permuted for a rotation in pairs), unless :func:`check` finds that
        the points behind it are right in the usual order.
        """
        found: dict[str, list[int]] = {}
        for at in () if self.usual_order else self.sampled_layers[:1]:
            for more in ("", "_rope"):  # if q has a bug, k shows the order; a rotation keeps it
                orders = [self._order(at, part + more, found.get(part)) for part in "qk"]
                seen = [order for order in orders if order] or [found[part] for part in "q" if more and part in found]
                if seen and all(order == seen[0] for order in seen):
                    found |= dict.fromkeys((f"q{more}", f"k{more}"), seen[0])
        return {point: order for point, order in found.items() if order != sorted(order)}

    def _order(self, at: str, point: str, before: list[int] | None) -> list[int] | None:
        """The order of one point's heads on the first rank that has it; ``before``: the order of the point it is made
        from."""
        for source, read, _ in islice(self._as_they_stand(at + point), 1):
            rank = self.sources.complete(source)[0]
            full = self.expected.own(at + point, source, rank)
            if point.endswith("rope"):
                made_of = at + made_from(at + point, self.config)[0]
                inner = next((one.read(rank, FEW) for one in self._as_they_stand(made_of)
                              if rank in self.sources.complete(one.source)), None)
                full = None if inner is None else self.expected.turned(
                    at, inner if before is None else inner[..., before])
            return None if full is None else order_in_heads(read(rank, FEW), full)
        return None

    # What can be taken for a point of heads or columns.

    def candidates(self, name: str) -> Iterator[Candidate]:
        """What can be taken for a point, the strongest claim first; the numbers of a head in Hugging Face's order."""
        point = name.rpartition(".")[2]
        if point not in GROUP_OF:
            yield from self._whole_or_summands(name)
            return
        order = self.orders.get(point.removesuffix("_norm")) if point[0] in "qk" else None
        for one in self._as_they_stand(name):
            yield one if order is None else Candidate(
                one.source, lambda rank, look, read=one.read: read(rank, look)[..., order],
                f"{one.words}the numbers of a head in an order of the engine’s own; ")

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
        """The usual way to read heads; where a tensor has as many tokens as heads, the way that fits."""
        if len(ways) > 1 and not ways[0].is_meta and not torch.equal(*ways[:2]) and (
                full := self.expected.reference(name)) is not None:
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
        """A rank's labels of one dimension; the usual shares are tried first."""
        total, count = self.totals[which], local.shape[1]
        shares = [self.planned[which][rank], *usual_shares(total, count, *self.in_stage(rank))]
        if which != "vocab":
            return match(local, full, shares)
        for share in shares:  # columns of padding may hold anything
            kept, real = real_items(share)
            if len(share) == count and match(local[:, kept], full, [real], search=False):
                return share
        return None

    def vote_by_weight(self, which: str, rank: int, local: torch.Tensor, full: torch.Tensor) -> None:
        """Keep a recorded weight's labels of a dimension: :attr:`layouts` takes them where no activation has labels."""
        nothing = [None] * self.sources.world_size
        counts, found = self._by_weight.setdefault(which, (nothing, nothing[:]))
        counts[rank], found[rank] = local.shape[1], self.vote(which, local, full, rank)

    def _votes(self, which: str, points: tuple[str, ...]) -> tuple[list[int | None], list[Indices | None]]:
        """Each rank's count of items, and their labels: by the rank's own inputs, else by Hugging Face's trace."""
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
        layers = [""] if which == "vocab" else self.sampled_layers
        found = self.majority(partial(ask, self.expected.own), layers)
        if any(count and not share for count, share in zip(counts, found)):
            guessed = self.majority(partial(ask, self.expected.reference), layers[:1])
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
        for which in "kv":  # each head several times, as attention without groups needs them
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
        """The decisions for the ranks of one pipeline stage, which share all heads, columns and rows."""
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

    def _whole_or_summands(self, name: str) -> Iterator[Candidate]:
        """What can be taken for a replicated point or for a sum's summands, the strongest claim first."""
        at, _, point = name.rpartition(".")
        found, summands = self.sources.of(name), layout(name) == "partial"
        for role in _ROLES_OF.get(point, ()):
            found += [source for source in self.sources.of(f"{at}.{role}")
                      if self._is_summand(source, role) is summands]
        for source in sorted(found, key=self.sources.rank_of):
            if name != "embed" or not self._is_masked(source):
                yield Candidate(source, partial(self.sources.rows, source),
                                "one summand on each rank" if summands else "whole on every rank")

    def _is_summand(self, source: Source, role: str) -> bool | None:
        """Decided once for all layers, by most of those looked at: one layer that differs has a bug. None if an output
        is neither a summand nor the sum."""
        has_experts = partial(POINTS["moe_partial"].needs, self.config)
        sparse = has_experts(split_name(source.name)[0] or 0)
        if (key := (source.pattern, sparse)) not in self._summands:
            adds_up = self._experts_add_up if sparse and role != "o" else self._adds_up
            layers = [at for at in self.sampled_layers if has_experts(layer_of(at)) == sparse]
            votes = Counter(adds_up(same, role, at) for at in layers for same in self.sources.of(at + role)
                            if same.pattern == source.pattern)
            self._summands[key] = max((False, None, True), key=lambda vote: votes[vote])
        return self._summands[key]

    def _experts_add_up(self, source: Source, role: str, at: str) -> bool | None:
        """Whether the ranks' outputs add up to the output of all experts. None if a module of experts leaves out the
        shared one: its output is no point."""
        ranks, name = self.sources.complete(source), at + "moe_partial"
        outs = [self.sources.rows(source, rank, FEW) for rank in ranks]
        x = self.expected.input_of(source, at + "post_norm", ranks[0])
        if self.in_stage(ranks[0])[1] == 1 or any(out is None for out in outs):
            return False
        whole = None if x is None else self.expected.of(name, x)
        if whole is not None and near(sum(out.float() for out in outs), whole):
            return True
        if role == "down" or whole is not None and any(near(out, whole) for out in outs):
            return False
        return None if self.config.experts.shared_intermediate_size else not any(
            near(a, b) for a, b in combinations(outs, 2))

    def _adds_up(self, source: Source, role: str, at: str) -> bool:
        ranks = self.sources.complete(source)
        outs = {rank: self.sources.rows(source, rank, FEW) for rank in ranks}
        dimension = ROWS[role][2]
        held, total = self.layouts[dimension].indices, self.totals[dimension]
        whole = any(held[rank] and len(real_items(held[rank])[0]) == total for rank in ranks)
        if whole or self.in_stage(ranks[0])[1] == 1 or any(out is None for out in outs.values()):
            return False
        own = {rank: self.summand(at, role, self._input(at, role, rank, source), held[rank]) for rank in ranks}
        known = None not in own.values()
        found = self.summand_or_sum(at + ROWS[role][0], outs, own) if known else set()
        apart = len(ranks) > 1 and not any(near(a, b) for a, b in combinations(outs.values(), 2))
        return "sum" not in found and (apart or "summand" in found)

    def summand_or_sum(self, name: str, outs: dict[int, torch.Tensor], own: dict[int, torch.Tensor]) -> set[str]:
        """Whether each rank's output is its ``own`` ``"summand"`` or the ``"sum"`` of all, with or without the bias;
        ``""`` if it is neither."""
        at, _, point = name.rpartition(".")
        bias, total = self.expected.weight(f"model.{at}.{POINTS[point].module}.bias"), sum(own.values())
        added = [0.0] if bias is None else [0.0, bias, bias / len(own)]
        return {next((what for what, x in (("summand", own[rank]), ("sum", total))
                      if any(near(out, x + more) for more in added)), "") for rank, out in outs.items()}

    def _input(self, at: str, role: str, rank: int, source: Source) -> torch.Tensor | None:
        """What a row-parallel layer was given on a rank, ``[rows, heads or columns here, …]``."""
        found = [one for one in self.candidates(at + ROWS[role][1]) if rank in self.sources.complete(one.source)]
        return min(found, key=lambda one: one.source.name != source.name).read(rank, FEW) if found else None

    def summand(self, at: str, role: str, x: torch.Tensor | None, indices: Indices | None) -> torch.Tensor | None:
        """What a row-parallel layer makes of ``x``, the heads or columns ``indices`` of its input; without a bias."""
        partial, before, _ = ROWS[role]
        if x is None or indices is None or x.flatten(1).shape[1] != len(indices) * self.dim(before):
            return None
        kept, real = real_items(indices)
        x = x.reshape(len(x), len(indices), -1)[:, kept].flatten(1)
        return self.expected.of(at + partial, x, features=columns_of(real, self.dim(before)), bias=0.0)

    @cache  # noqa: B019  (it lives as long as one placement)
    def _is_masked(self, source: Source) -> bool:
        """Whether an embedding's output has only the rows of the rank's own share of the vocabulary."""
        ranks, true = self.sources.complete(source), self.expected.weight(EMBEDDING)[self.sources.sampled_ids]
        outs = [self.sources.rows(source, rank, FEW) for rank in ranks]
        if self.in_stage(ranks[0])[1] == 1 or any(out is None or out.shape != true.shape for out in outs):
            return False
        rows = [pair for out in outs for pair in zip(out, true)]
        return not all(row.any() for row, _ in rows) and all(not row.any() or near(row, true) for row, true in rows)

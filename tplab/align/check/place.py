"""``place``: a recorded engine's tensors as the lab's trace points."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from tplab.align.check.evidence import TABLES
from tplab.align.check.evident import learn
from tplab.align.check.match import GROUP_OF, PADDING, Layout, near, span
from tplab.align.check.names import pattern_of, place_of
from tplab.align.check.shares import Shares
from tplab.align.check.sources import FEW, SAMPLE, SHAPE, WHOLE, Source, Sources
from tplab.align.check.sums import Sums
from tplab.align.check.weights import parameters_of
from tplab.align.gather import whole_point
from tplab.align.points import layout, point_names
from tplab.align.recording import Contradiction, PlacementError, Recording, Shard
from tplab.checkpoint import Checkpoint
from tplab.shard import ShardPlan

KEPT = 60  # points whose tensors are kept in memory: those of some three layers


def place(recorded, ckpt: Checkpoint, names: dict[str, str] | None = None, *, as_it_stands: bool = False,
          **reading) -> Recording:
    """Find out what was recorded: which tensor is which point, which token each row, what each rank holds of it.

    Args:
        recorded: what :func:`tplab.align.check.folder.read_recorded` returns.
        names: ``{pattern: point}`` for what the conventions do not know, as
            :func:`tplab.align.check.overrides.check_names` describes.
        as_it_stands: as :class:`tplab.align.check.shares.Shares` takes it.
        reading: what is taken for granted, as :class:`tplab.align.check.rows.Texts` takes it.

    Raises:
        PlacementError: nothing was recorded, of another checkpoint, or without token ids; ``names`` are wrong.
        ShardPlanError: this model cannot be dealt out over that many ranks.
    """
    sources = Sources(recorded, ckpt.config, names, **reading)
    plan = staged(ckpt.config, sources.stages)
    shares = Shares(sources, ckpt, plan, as_it_stands)
    learnt = learn(sources, shares)
    parameters, unknown = parameters_of(recorded, shares)
    found = _Placing(sources, shares, learnt).recording()
    found.plan, found.doubts = plan, list(dict.fromkeys(sources.texts.doubts))
    found.unjudged, found.reordered = sources.texts.unjudged, bool(shares.orders)
    found.holders = {layer: stage for stage in sources.stages for layer in sources.layers_of(*stage)}
    found.parameters, found.unplaced = parameters, found.unplaced + [
        f"{name}: no tensor of the checkpoint that the conventions know" for name in unknown]
    return found


def staged(config, stages: list[list[int]]) -> ShardPlan:
    """What each rank holds, where those of one pipeline stage share its layers."""
    if len(stages) == 1:
        return ShardPlan.from_config(config, len(stages[0]))
    plans = {tuple(stage): ShardPlan.from_config(config, len(stage)) for stage in stages}
    shards = {rank: replace(own, rank=rank) for stage, plan in plans.items() for rank, own in zip(stage, plan.ranks)}
    return replace(next(iter(plans.values())), tensor_parallel_size=len(shards),
                   ranks=tuple(shards[rank] for rank in sorted(shards)))


class _Points(Mapping):
    """Name → shards, read from the folder when they are asked for; the last few are kept."""

    def __init__(self, world_size: int):
        self.world_size, self.builders, self._recent = world_size, {}, OrderedDict()

    def __getitem__(self, name: str) -> list[Shard | None]:
        if name not in self._recent:
            shards = self.builders[name]()
            self._recent[name] = _merged([shards.get(rank) for rank in range(self.world_size)])
            if len(self._recent) > KEPT:
                self._recent.popitem(last=False)
        self._recent.move_to_end(name)
        return self._recent[name]

    def __contains__(self, name: str) -> bool:
        return name in self.builders  # nothing is read to know that

    def __iter__(self) -> Iterator[str]:
        return iter(self.builders)

    def __len__(self) -> int:
        return len(self.builders)


def _merged(shards: list[Shard | None]) -> list[Shard | None]:
    """Replicated shards of the same bits are one: laid beside each other and judged once."""
    found = []
    for shard in shards:
        twins = (other for other in found if shard and other and shard.kind == other.kind == "replicated"
                 and torch.equal(shard.tensor, other.tensor))
        found.append(next(twins, shard))
    return found


class _Placing:
    def __init__(self, sources: Sources, shares: Shares, learnt: dict[str, str]):
        self.learnt = learnt
        self.sources, self.shares, self.sums, self.config = sources, shares, Sums(shares), shares.config
        self.points = _Points(sources.world_size)
        self.dtypes: Counter = Counter()
        self.assumed: dict[str, str] = {}
        self.warnings: list[str] = []
        self.lost: list[int] = []  # layers that nobody ran
        self.unplaced: dict[tuple[str, str], list[int]] = {}  # what and why, without the layer → the layers

    def recording(self) -> Recording:
        sources, tables = self.sources, []
        logit_places = sources.places
        self._find_lost_layers()
        self._check_padding()
        for name in point_names(self.config.num_layers, self.config.qk_norm, gate_up=True):
            if (source := self._place(name)) and name == "logits":
                logit_places, _ = sources.logits(source, sources.complete(source)[0], SHAPE)
                self._check_joined(source, logit_places, self.points.builders[name]())
        for source in sources.unclaimed():
            parts = source.name.lower().split(".")
            adapter = "base_layer" in parts or any(part.startswith("lora_") for part in parts)
            self._leave_out(source, "part of an adapted layer" if adapter else TABLES if
                            self.shares.evidence.are_tables(source) else "no point that the conventions know")
        unplaced = []
        for (what, why), layers in self.unplaced.items():
            where = f" (layer{'s' * (len(layers) > 1)} {span(sorted(layers))})" if layers else ""
            (tables if why == TABLES else unplaced).append(what + f": {why}" * (why != TABLES) + where)
        return Recording(
            world_size=sources.world_size, ids=sources.texts.ids, places=sources.places, num_keys=sources.num_keys,
            logit_places=logit_places, points=self.points,
            dtype=self.dtypes.most_common(1)[0][0] if self.dtypes else torch.float32, declared=sources.declared,
            origins=sources.origins, assumed=self.assumed, unplaced=unplaced, warnings=self.warnings,
            notes=sources.notes + [f"{TABLES}: {'; '.join(tables)}"] * bool(tables),
            contradictions=sources.contradictions + self.shares.contradictions,
            lost={f"layers.{layer}.output" for layer in self.lost})

    def _place(self, name: str) -> Source | None:
        """Keep the first candidate for a point that has its rows and columns."""
        for source, sentence, read in self._candidates(name):
            if None not in self._shards(name, read, SHAPE).values():
                self.points.builders[name] = partial(self._shards, name, read, WHOLE)
                self.dtypes[source.dtype] += 1
                how = self.learnt.get(source.pattern) or self.learnt.get(source.pattern[0])
                self.assumed[name] = f"from {source}{f' ({how})' if how else ''}; {sentence}"
                return source
            self._leave_out(source, f"rows or columns other than {name.rpartition('.')[2]}'s")
        return None

    def _candidates(self, name: str) -> Iterator[tuple[Source, str, Callable[[str], dict[int, torch.Tensor | None]]]]:
        """What can be taken for a point, the most plausible first: a source, in words who holds what of it, and what
        reads its tensors, rank by rank."""
        kind = layout(name)
        if name == "logits":
            for source in self.sources.of(name):
                yield source, self._group(name).sentence, partial(self._read, self.sources.logits, source)
        elif kind in ("replicated", "partial"):
            words = "whole on every rank" if kind == "replicated" else "one summand on each rank"
            for source in self.sums.sources_of(name):
                yield source, words, partial(self._read, self.sources.rows, source)
        else:
            for at, held in enumerate(self.shares.held(name, SHAPE)):
                yield held.source, held.sentence + self._group(name).sentence, partial(self._held, name, at)

    def _read(self, read: Callable, source: Source, look: str) -> dict[int, torch.Tensor | None]:
        found = {rank: read(source, rank, look) for rank in self.sources.complete(source)}
        return {rank: one[1] if isinstance(one, tuple) else one for rank, one in found.items()}

    def _held(self, name: str, at: int, look: str) -> dict[int, torch.Tensor]:
        return next(islice(self.shares.held(name, look), at, None)).tensors

    def _group(self, name: str) -> Layout:
        return self.shares.layouts[GROUP_OF[name.rpartition(".")[2]]]

    def _shards(self, name: str, read: Callable, look: str) -> dict[int, Shard | None]:
        return {rank: None if tensor is None else self._shard(tensor, name, rank)
                for rank, tensor in read(look).items()}

    def _shard(self, tensor: torch.Tensor, name: str, rank: int) -> Shard | None:
        """A rank's tensor as its part of a point; None if it has other columns."""
        kind, count = layout(name), tensor.shape[1]
        if kind in ("replicated", "partial"):
            return Shard(tensor, kind) if count == self.config.hidden_size else None
        indices, total = self._group(name).indices[rank], self.shares.totals[GROUP_OF[name.rpartition(".")[2]]]
        if indices is None or count != len(indices):
            q = self.shares.layouts["q"].indices[rank]
            if count == total:
                indices = tuple(range(total))
            elif kind == "kv_heads" and q is not None and len(q) == count:  # every query head has its own copy
                group = self.config.num_heads // self.config.num_kv_heads
                first = {head // group: at for at, head in reversed(list(enumerate(q)))}
                indices = tuple(sorted(first))
                tensor = tensor[:, [first[head] for head in indices]]
            else:
                return None
        if PADDING in indices:
            kept = [at for at, index in enumerate(indices) if index != PADDING]
            tensor, indices = tensor[:, kept], tuple(indices[at] for at in kept)
        return Shard(tensor, kind, indices)

    def _check_padding(self) -> None:
        """Where nothing recorded has just the vocabulary, whoever draws a token sees the padding, too."""
        sources, above = self.sources.of("logits"), []
        for source in sources:
            (_, padding), (_, own) = (self.sources.logits(source, self.sources.complete(source)[0], padding=behind) or (
                [], torch.empty(0, 0)) for behind in (True, False))
            if not padding.numel():
                return
            above.append(padding.amax(1) - own.amax(1))
        if not sources:
            return
        more = f"{sources[0]} has {next(iter(sources[0].entries.values())).shape[-1] - self.config.vocab_size} columns"
        more += " of padding"
        if drawn := int((above[0] > 0).sum()):
            self.shares.contradictions.append(Contradiction(
                f"{more}, and in {drawn} of {len(above[0])} rows the largest number stands there: token ids that there "
                "are not", "vocab_padding"))
        else:
            self.warnings.append(f"{more}; what draws tokens must not see them")

    def _check_joined(self, kept: Source, places: list[tuple[int, int]], shards: dict[int, Shard]) -> None:
        """Where the model's own output holds the numbers of its head, they must stand in the vocabulary's order."""
        row_of, size = {place: row for row, place in enumerate(places)}, self.config.vocab_size
        others = [(source, rank) for source in self.sources.of("logits") if source is not kept
                  for rank in self.sources.complete(source)] if self.sources.world_size > 1 else []
        for source, rank in others:
            there, joined = self.sources.logits(source, rank) or ([], torch.empty(0, 0))
            rows = [(row_of[place], row) for row, place in enumerate(there) if place in row_of][:SAMPLE]
            few = [replace(shard, tensor=shard.tensor[[here for here, _ in rows]]) for shard in shards.values()]
            if joined.shape[1] < size or not rows:
                continue
            whole, _, held = whole_point("logits", few[::-1])  # of several that hold a token, the last
            if held != list(range(size)):
                return
            joined = joined[[row for _, row in rows], :size]
            ours, theirs = (x.double().T.contiguous() for x in (whole, joined))
            differs = (theirs != ours) & ~(theirs.isnan() & ours.isnan())
            token_of = {bytes(column.numpy().data): token for token, column in enumerate(ours)}
            found = [token_of.get(bytes(column.numpy().data)) for column in theirs]
            if differs.any() and None not in found:
                wrong = int(differs.any(1).nonzero()[0])
                self.shares.contradictions.append(Contradiction(
                    f"{source} on rank {rank} holds the numbers of {kept} in another order: those of token "
                    f"{found[wrong]} stand where those of token {wrong} belong", "head_rows"))
                return

    def _leave_out(self, source: Source, why: str) -> None:
        layer, _ = place_of(source.name)
        first, dot, _ = source.path.partition(".")
        alike = replace(source, name=pattern_of(source.name), path=first + dot + "*" * bool(dot))
        layers = self.unplaced.setdefault((str(alike), why), [])
        if layer is not None and layer not in layers:
            layers.append(layer)

    def _find_lost_layers(self) -> None:
        """Layers that nobody ran: nothing of them was recorded, and the layer behind was given what the one before them
        put out."""
        recorded = [-1, *sorted(self.sources.layers_of(*self.sources.ranks)), self.config.num_layers]
        for before, behind in zip(recorded, recorded[1:]):
            ends = [self._first(f"layers.{layer}.output" if layer >= 0 else "embed") for layer in (before, behind - 1)]
            if behind - before > 1 and None not in ends and near(*ends):
                lost = list(range(before + 1, behind))
                self.lost += lost
                source = f"layer {before}" if before >= 0 else "the embedding"
                target = f"layer {behind}" if behind < self.config.num_layers else "the last norm"
                self.shares.contradictions.append(Contradiction(
                    f"layer{'s' * (len(lost) > 1)} {span(lost)} ran on no rank: {target} was given what {source} put "
                    "out", "layer_skipped"))

    def _first(self, name: str) -> torch.Tensor | None:
        """A replicated point's first rows on the first rank that has it."""
        return next((rows for source in self.sums.sources_of(name) for rank in self.sources.complete(source)[:1]
                     if (rows := self.sources.rows(source, rank, FEW)) is not None), None)


__all__ = ["PlacementError", "place"]

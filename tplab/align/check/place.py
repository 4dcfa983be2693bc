"""``place``: a recorded engine's tensors as the lab's trace points."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice

import torch

from tplab.align.check.evidence import TABLES, Tables
from tplab.align.check.evident import learn
from tplab.align.check.layouts import PADDING, Layout, near, span
from tplab.align.check.names import pattern_of, place_of
from tplab.align.check.shares import GROUPS, Shares
from tplab.align.check.sources import FEW, SAMPLE, SHAPE, WHOLE, Source, Sources
from tplab.align.check.sums import Sums
from tplab.align.check.weights import parameters_of
from tplab.align.gather import whole_point
from tplab.align.points import layout, point_names
from tplab.align.recording import Contradiction, PlacementError, Recording, Shard
from tplab.checkpoint import Checkpoint
from tplab.shard import ShardPlan

KEPT = 60  # points whose tensors are kept in memory: those of some three layers


def place(recorded, ckpt: Checkpoint, names: dict[str, str] | None = None, **reading) -> Recording:
    """Find out what was recorded: which tensor is which point, which token each row, what each rank holds of it.

    Args:
        recorded: what :func:`tplab.align.check.folder.read_recorded` returns.
        names: ``{pattern: point}`` for what the conventions do not know, as
            :func:`tplab.align.check.overrides.check_names` describes.
        reading: what is taken for granted, as :class:`tplab.align.check.rows.Texts` takes it.

    Raises:
        PlacementError: nothing was recorded, of another checkpoint, or without token ids; ``names`` are wrong.
        ShardPlanError: this model cannot be dealt out over that many ranks.
    """
    sources = Sources(recorded, ckpt.config, names, **reading)
    plan = staged(ckpt.config, sources.stages)
    shares = Shares(sources, ckpt, plan)
    learnt = learn(sources, shares)
    parameters, unknown = parameters_of(recorded, shares)
    found = _Placing(sources, shares, learnt).recording()
    found.plan, found.doubts = plan, list(dict.fromkeys(sources.texts.doubts))
    found.unjudged = sources.texts.unjudged
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
        logit_places = self.sources.places
        self._find_lost_layers()
        self._check_padding()
        for name in point_names(self.config.num_layers, self.config.qk_norm):
            at, _, point = name.rpartition(".")
            if point == "mlp_act":
                for half in ("gate", "up"):
                    self._dealt(f"{at}.{half}", half)
            if name == "logits":
                logit_places = self._logits()
            elif layout(name) == "replicated":
                self._hidden(name, "replicated")
            elif layout(name) == "partial":
                self._hidden(name, "partial")
            else:
                self._dealt(name, point)
        self._name_unclaimed()
        sources = self.sources
        tables = [self._listed(what, layers) for (what, why), layers in self.unplaced.items() if why == TABLES]
        return Recording(
            world_size=sources.world_size, ids=sources.texts.ids, places=sources.places, num_keys=sources.num_keys,
            logit_places=logit_places, points=self.points,
            dtype=self.dtypes.most_common(1)[0][0] if self.dtypes else torch.float32, declared=sources.declared,
            assumed=self.assumed, unplaced=[self._listed(f"{what}: {why}", layers) for (what, why), layers
                                             in self.unplaced.items() if why != TABLES],
            notes=sources.notes + [f"{TABLES}: {'; '.join(tables)}"] * bool(tables),
            warnings=self.warnings, contradictions=sources.contradictions + self.shares.contradictions,
            lost={f"layers.{layer}.output" for layer in self.lost})

    def _keep(self, name: str, source: Source, sentence: str, build: Callable[[], dict[int, Shard]]) -> None:
        self.points.builders[name] = build
        self.dtypes[source.dtype] += 1
        how = self.learnt.get(source.pattern) or self.learnt.get(source.pattern[0])
        self.assumed[name] = f"from {source}{f' ({how})' if how else ''}; {sentence}"

    def _rows(self, source: Source, look: str, kind: str) -> dict[int, Shard] | None:
        tensors = {rank: self.sources.rows(source, rank, look) for rank in self.sources.complete(source)}
        whole = all(tensor is not None and tensor.shape[1] == self.config.hidden_size for tensor in tensors.values())
        return {rank: Shard(tensor, kind) for rank, tensor in tensors.items()} if whole else None

    def _hidden(self, name: str, kind: str) -> None:
        """A point of the hidden size: the same on every rank, or a summand on each."""
        for source in self.sums.sources_of(name):
            if self._rows(source, SHAPE, kind):
                sentence = "whole on every rank" if kind == "replicated" else "one summand on each rank"
                return self._keep(name, source, sentence, partial(self._rows, source, WHOLE, kind))
            self._leave_out(source, f"rows or columns other than {name.rpartition('.')[2]}'s")

    def _dealt(self, name: str, point: str) -> None:
        """A point of heads or columns."""
        group = self.shares.layouts[GROUPS[point]]
        for at, found in enumerate(self.shares.held(name, SHAPE)):
            shards = {rank: self._shard(tensor, layout(name), group, rank, point)
                      for rank, tensor in found.tensors.items()}
            if None not in shards.values():
                return self._keep(name, found.source, found.sentence + group.sentence, partial(
                    self._shards, name, at, group))
            rank = next(rank for rank, shard in shards.items() if shard is None)
            self._leave_out(found.source, f"{found.tensors[rank].shape[1]} of {layout(name)} on rank {rank}, where its "
                            f"layout has {len(group.indices[rank] or ())}")

    def _shards(self, name: str, at: int, group: Layout) -> dict[int, Shard]:
        held = next(islice(self.shares.held(name), at, None))
        return {rank: self._shard(tensor, layout(name), group, rank, name.rpartition(".")[2])
                for rank, tensor in held.tensors.items()}

    def _shard(self, tensor: torch.Tensor, kind: str, group: Layout, rank: int, point: str) -> Shard | None:
        indices, total = group.indices[rank], self.shares.totals[GROUPS[point]]
        if indices is None or tensor.shape[1] != len(indices):
            if tensor.shape[1] == total:
                indices = tuple(range(total))
            elif kind == "kv_heads" and (repeated := self._repeated(tensor.shape[1], rank)):
                first = {head: at for at, head in reversed(list(enumerate(repeated)))}
                indices = tuple(sorted(first))
                tensor = tensor[:, [first[head] for head in indices]]
            else:
                return None
        if PADDING in indices:
            kept = [at for at, index in enumerate(indices) if index != PADDING]
            tensor, indices = tensor[:, kept], tuple(indices[at] for at in kept)
        return Shard(tensor, kind, indices)

    def _repeated(self, count: int, rank: int) -> list[int] | None:
        """The KV head of each of ``count`` heads, where every query head of a rank has its own copy."""
        q = self.shares.layouts["q"].indices[rank]
        group = self.config.num_heads // self.config.num_kv_heads
        return [head // group for head in q] if q is not None and len(q) == count else None

    def _logits(self) -> list[tuple[int, int]]:
        group = self.shares.layouts["vocab"]

        def shards(source: Source) -> dict[int, Shard]:
            found = {rank: self.sources.logits(source, rank) for rank in self.sources.complete(source)}
            return {rank: self._shard(tensor, "vocab", group, rank, "logits") for rank, (_, tensor) in found.items()}

        for source in self.sources.of("logits"):
            found = {rank: self.sources.logits(source, rank, SHAPE) for rank in self.sources.complete(source)}
            if all(value is not None and group.indices[rank] is not None and value[1].shape[1] == len(
                    group.indices[rank]) for rank, value in found.items()):
                self._keep("logits", source, group.sentence, partial(shards, source))
                places = next(iter(found.values()))[0]
                self._check_joined(source, places, shards(source))
                return places
            self._leave_out(source, "rows or columns other than the logits'")
        return self.sources.places

    def _check_padding(self) -> None:
        """Where nothing recorded has just the vocabulary, whoever draws a token sees the padding, too."""
        wide = {source: self.sources.beyond(source, self.sources.complete(source)[0])
                for source in self.sources.of("logits") if self.sources.complete(source)}
        if not wide or None in (above := list(wide.values())):
            return
        source = next(iter(wide))
        more = f"{next(iter(source.entries.values())).shape[-1] - self.config.vocab_size} columns of padding"
        if drawn := int((above[0] > 0).sum()):
            self.shares.contradictions.append(Contradiction(
                f"{source} has {more}, and in {drawn} of {len(above[0])} rows the largest number stands there: token "
                "ids that there are not", "vocab_padding"))
        else:
            self.warnings.append(f"{source} has {more}; what draws tokens must not see them")

    def _check_joined(self, kept: Source, places: list[tuple[int, int]], shards: dict[int, Shard]) -> None:
        """Where the model's own output holds the numbers of its head, they must stand in the vocabulary's order."""
        if self.sources.world_size == 1:
            return  # there is nothing to join
        row_of = {place: row for row, place in enumerate(places)}
        for source in self.sources.of("logits"):
            for rank in self.sources.complete(source) if source is not kept else ():
                there, joined = self.sources.logits(source, rank) or ([], torch.empty(0, 0))
                rows = [(row_of[place], row) for row, place in enumerate(there) if place in row_of][:SAMPLE]
                if joined.shape[1] < self.config.vocab_size or not rows:
                    continue
                here, there = map(list, zip(*rows))
                few = [replace(shard, tensor=shard.tensor[here]) for shard in shards.values()]
                whole, _, held = whole_point("logits", few[::-1])  # of several that hold a token, the last
                if held != list(range(self.config.vocab_size)):
                    return
                joined = joined[there, :len(held)].double().T.contiguous()
                ours = whole.double().T.contiguous()
                differs = (joined != ours) & ~(joined.isnan() & ours.isnan())
                wrong = differs.any(1).nonzero().flatten().tolist()
                if not wrong:
                    continue
                token_of = {bytes(column.numpy().data): token for token, column in enumerate(ours)}
                found = [token_of.get(bytes(column.numpy().data)) for column in joined]
                if None not in found:
                    self.shares.contradictions.append(Contradiction(
                        f"{source} on rank {rank} holds the numbers of {kept} in another order: those of token "
                        f"{found[wrong[0]]} stand where those of token {wrong[0]} belong", "head_rows"))
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

    def _name_unclaimed(self) -> None:
        tables = Tables(self.sources, self.config)
        for source in self.sources.unclaimed():
            parts = source.name.lower().split(".")
            adapter = "base_layer" in parts or any(part.startswith("lora_") for part in parts)
            self._leave_out(source, "part of an adapted layer" if adapter else TABLES if tables.known(source) else
                            "no point that the conventions know")

    @staticmethod
    def _listed(what: str, layers: list[int]) -> str:
        return what if not layers else f"{what} (layer{'s' * (len(layers) > 1)} {span(sorted(layers))})"


__all__ = ["PlacementError", "place"]

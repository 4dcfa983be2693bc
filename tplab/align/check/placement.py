"""``find_points``: a recorded engine's tensors as the lab's trace points."""

from collections import Counter, UserDict
from dataclasses import replace
from functools import lru_cache, partial

import torch

from tplab.align.check.by_value import place_by_value
from tplab.align.check.expected import TABLES
from tplab.align.check.match import GROUP_OF, near, real_items
from tplab.align.check.names import pattern_of, role_in, split_name
from tplab.align.check.notes import listed
from tplab.align.check.shares import Shares
from tplab.align.check.sources import FEW, SAMPLE, SHAPE, WHOLE, Source, Sources
from tplab.align.check.weights import parameters_of
from tplab.align.gather import whole_point
from tplab.align.points import layout, point_names
from tplab.align.recording import Contradiction, Recording, Shard
from tplab.checkpoint import Checkpoint
from tplab.shard import ShardPlan

KEPT = 60  # points whose tensors are kept in memory: those of some three layers


def find_points(recorded, ckpt: Checkpoint, names: dict[str, str] | None = None, *, usual_order: bool = False,
          enable_expert_parallel: bool = False, **reading) -> Recording:
    """Find the point of each recorded tensor, the token of each row, and each rank's share.

    Args:
        recorded: what :func:`tplab.align.check.folder.read_recorded` returns.
        names: ``{pattern: point}`` for unknown names; see :mod:`tplab.align.check.overrides`.
        usual_order: as for :class:`tplab.align.check.shares.Shares`.
        enable_expert_parallel: whole experts are dealt out.
        reading: as for :class:`tplab.align.check.rows.Texts`.

    Raises:
        PlacementError: nothing was recorded, of another checkpoint, or without token ids; ``names`` are wrong.
        ShardPlanError: this model cannot be dealt out over that many ranks.
    """
    sources = Sources(recorded, ckpt.config, names, **reading)
    plan = staged(ckpt.config, sources.stages, enable_expert_parallel)
    shares = Shares(sources, ckpt, plan, usual_order)
    by_value = place_by_value(sources, shares)
    parameters, unknown = parameters_of(recorded, shares)
    found = _Placement(sources, shares, by_value).recording()
    found.plan, found.parameters = plan, parameters
    found.reordered = bool(shares.orders) or any(split.reordered for split in shares.splits.values())
    found.holders = {layer: stage for stage in sources.stages for layer in sources.layers_of(*stage)}
    found.unplaced += [f"{name}: no tensor of the checkpoint that the conventions know" for name in unknown]
    return found


def staged(config, stages: list[list[int]], enable_expert_parallel: bool = False) -> ShardPlan:
    """The plan of pipeline stages: the ranks of one stage share its layers."""
    plans = [ShardPlan.from_config(config, len(stage), enable_expert_parallel=enable_expert_parallel)
             for stage in stages]
    shards = {rank: replace(own, rank=rank) for stage, plan in zip(stages, plans) for rank, own in zip(
        stage, plan.ranks)}
    return plans[0] if len(plans) == 1 else replace(
        plans[0], tensor_parallel_size=len(shards), ranks=tuple(shards[rank] for rank in sorted(shards)))


class _Points(UserDict):
    """Name → shards; :attr:`data` has a function that reads them. A point is read on demand, and a few are kept."""

    def __init__(self, world_size: int):
        super().__init__()

        def read(name: str) -> list[Shard | None]:
            found, shards = [], self.data[name]()
            for shard in map(shards.get, range(world_size)):
                # Replicated shards of the same bits are one object: compared and judged once.
                found.append(next((other for other in found if shard and other and shard.kind == other.kind
                                   == "replicated" and torch.equal(shard.tensor, other.tensor)), shard))
            return found
        self.read = lru_cache(KEPT)(read)

    def __getitem__(self, name: str) -> list[Shard | None]:
        return self.read(name)


class _Placement:
    def __init__(self, sources: Sources, shares: Shares, by_value: dict[str, str]):
        self.sources, self.shares, self.config = sources, shares, shares.config
        self.by_value, self.points, self.assumed = by_value, _Points(sources.world_size), {}
        self.dtypes: Counter = Counter()
        self.unplaced: dict[tuple[str, str], set[int]] = {}  # what and why, without the layer → the layers

    def recording(self) -> Recording:
        sources, texts, logit_places = self.sources, self.sources.texts, self.sources.places
        lost = self._find_lost_layers()
        self._check_padding()
        for name in point_names(self.config, gate_up=True):
            if (source := self._place(name)) and name == "logits":
                logit_places, _ = sources.logits(source, sources.complete(source)[0], SHAPE)
                self._check_joined(source, logit_places)
        self._check_adapters()
        for source in sources.unclaimed():
            parts = source.name.lower().split(".")
            if role_in(self.sources.config, *split_name(source.name)) == "":
                continue  # inside of experts
            adapter = "base_layer" in parts or any(part.startswith("lora_") for part in parts)
            self._leave_out(source, "part of an adapted layer" if adapter else TABLES if
                            self.shares.expected.are_tables(source) else "no point that the conventions know")
        tables, unplaced = [], []
        for (what, why), layers in self.unplaced.items():
            where = f" ({listed('layer', sorted(layers))})" if layers else ""
            (tables if why == TABLES else unplaced).append(what + f": {why}" * (why != TABLES) + where)
        return Recording(
            world_size=sources.world_size, ids=texts.ids, places=sources.places, num_keys=sources.num_keys,
            logit_places=logit_places, points=self.points,
            dtype=self.dtypes.most_common(1)[0][0] if self.dtypes else torch.float32, declared=sources.declared,
            origins=sources.origins, assumed=self.assumed, unplaced=unplaced, warnings=sources.warnings,
            notes=sources.notes + [f"{TABLES}: {'; '.join(tables)}"] * bool(tables),
            contradictions=sources.contradictions, lost={f"layers.{layer}.output" for layer in lost},
            unjudged=texts.unjudged, doubts=list(dict.fromkeys(texts.doubts)))

    def _place(self, name: str) -> Source | None:
        """Keep the first candidate with the rows and columns of a point."""
        group = GROUP_OF.get(name.rpartition(".")[2])
        for source, read, words in self.shares.candidates(name):
            shards = partial(self._shards, name, source, read)
            if None not in shards(SHAPE).values():
                self.points[name] = partial(shards, WHOLE)
                self.dtypes[source.dtype] += 1
                how = self.by_value.get(source.pattern) or self.by_value.get(source.pattern[0])
                spread = self.shares.layouts[group].sentence if group else ""
                self.assumed[name] = f"from {source}{f' ({how})' if how else ''}; {words}{spread}"
                return source
            self._leave_out(source, f"rows or columns other than {name.rpartition('.')[2]}'s")
        return None

    def _shards(self, name: str, source: Source, read, look: str) -> dict[int, Shard | None]:
        return {rank: None if (tensor := read(rank, look)) is None else self._shard(tensor, name, rank)
                for rank in self.sources.complete(source)}

    def _shard(self, tensor: torch.Tensor, name: str, rank: int) -> Shard | None:
        """A rank's tensor as its part of a point; None if it has other columns."""
        kind, count = layout(name), tensor.shape[1]
        if kind in ("replicated", "partial"):
            right = self.config.experts.num_experts if name.endswith("router_logits") else self.config.hidden_size
            return Shard(tensor, kind) if count == right else None
        group, size = GROUP_OF[name.rpartition(".")[2]], self.config.num_heads // self.config.num_kv_heads
        labels = [self.shares.layouts[group].indices[rank], range(self.shares.totals[group])]
        if kind == "kv_heads":  # every query head may have its own copy
            labels.append([head // size for head in self.shares.layouts["q"].indices[rank] or ()])
        found = next((one for one in labels if one is not None and len(one) == count), None)
        if found is None:
            return None
        kept, indices = real_items(found)
        return Shard(tensor if len(kept) == count else tensor[:, kept], kind, indices)

    def _leave_out(self, source: Source, why: str) -> None:
        layer, _ = split_name(source.name)
        first, dot, _ = source.path.partition(".")
        alike = replace(source, name=pattern_of(source.name), path=first + dot + "*" * bool(dot))
        self.unplaced.setdefault((str(alike), why), set()).update({layer} - {None})

    # Contradictions: wrong with any values.

    def _says(self, sentence: str, fault: str) -> None:
        self.sources.contradictions.append(Contradiction(sentence, fault))

    def _check_padding(self) -> None:
        """Where every recorded tensor of logits is wider than the vocabulary, the sampler sees the padding, too."""
        sources = self.sources.of("logits")
        for source in reversed(sources):
            rank = self.sources.complete(source)[0]
            (_, own), (_, padding) = (self.sources.logits(source, rank, padding=behind) or ([], torch.empty(0, 0))
                                      for behind in (False, True))
            if not padding.numel():
                return
        if sources:
            more = f"{sources[0]} has {padding.shape[1]} columns of padding"
            if drawn := int((padding.amax(1) > own.amax(1)).sum()):
                self._says(f"{more}, and in {drawn} of {len(own)} rows the largest logit is one of them: a token id "
                           "outside of the vocabulary", "vocab_padding")
            else:
                self.sources.warnings.append(f"{more}; the sampler must not see them")

    def _check_joined(self, kept: Source, places: list[tuple[int, int]]) -> None:
        """Where the model's own output gathers the logits of its head, they must have the vocabulary's order."""
        row_of, size = {place: row for row, place in enumerate(places)}, self.config.vocab_size
        for source in self.sources.of("logits") if self.sources.world_size > 1 else ():
            for rank in self.sources.complete(source) if source is not kept else ():
                there, joined = self.sources.logits(source, rank) or ([], torch.empty(0, 0))
                rows = [(row_of[place], row) for row, place in enumerate(there) if place in row_of][:SAMPLE]
                if joined.shape[1] < size or not rows:
                    continue
                few = [replace(shard, tensor=shard.tensor[[here for here, _ in rows]])
                       for shard in self.points["logits"][::-1] if shard]
                whole, _, held = whole_point("logits", few)  # of several that hold a token, the last
                if held != list(range(size)):
                    return
                ours, theirs = (x.double().T.contiguous() for x in (whole, joined[[row for _, row in rows], :size]))
                differs = (theirs != ours) & ~(theirs.isnan() & ours.isnan())
                token_of = {bytes(column.numpy().data): token for token, column in enumerate(ours)}
                found = [token_of.get(bytes(column.numpy().data)) for column in theirs]
                if differs.any() and None not in found:
                    wrong = int(differs.any(1).nonzero()[0])
                    self._says(f"{source} on rank {rank} holds the logits of {kept} in another order: those of token "
                               f"{found[wrong]} stand in the place of token {wrong}", "head_rows")
                    return

    def _check_adapters(self) -> None:
        """Warn of adapters (LoRA) that add nothing: their weights were never loaded, or are lost."""
        bare = {source.name: source for source in self.sources.unclaimed() if source.kind == "out"}
        found: dict[tuple[str, str], list[int]] = {}
        for whole in self.sources.claimed():
            source, idle = bare.get(f"{whole.name}.base_layer"), []
            for rank in self.sources.complete(source) if source and whole.kind == "out" else ():
                a, b = (self.sources.rows(one, rank, FEW) for one in (source, whole))
                idle += [rank] * (a is not None and b is not None and torch.equal(a, b))
            if idle:
                found.setdefault((pattern_of(whole.name), listed("rank", idle)), []).append(split_name(whole.name)[0])
        self.sources.warnings += [f"the adapter of {name} adds nothing on {ranks} ({listed('layer', layers)})"
                                  for (name, ranks), layers in found.items()]

    def _find_lost_layers(self) -> list[int]:
        """Layers that ran on no rank: no tensor of them was recorded, and the next layer's input is the output of the
        layer before them."""
        recorded, found = [-1, *sorted(self.sources.layers_of(*self.sources.ranks)), self.config.num_layers], []
        for before, behind in zip(recorded, recorded[1:]):
            ends = [self._first(f"layers.{layer}.output" if layer >= 0 else "embed") for layer in (before, behind - 1)]
            if behind - before > 1 and None not in ends and near(*ends):
                lost = list(range(before + 1, behind))
                found += lost
                source = f"layer {before}" if before >= 0 else "the embedding"
                target = f"layer {behind}" if behind < self.config.num_layers else "the last norm"
                self._says(f"{listed('layer', lost)} ran on no rank: the input of {target} is the output of {source}",
                           "layer_skipped")
        return found

    def _first(self, name: str) -> torch.Tensor | None:
        """A replicated point's first rows on the first rank that has it."""
        return next((rows for source, read, _ in self.shares.candidates(name)
                     for rank in self.sources.complete(source)[:1] if (rows := read(rank, FEW)) is not None), None)

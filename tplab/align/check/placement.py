"""``find_points``: a recorded engine's tensors as the lab's trace points."""

import re
from collections import Counter, UserDict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch

from tplab.align.check.match import GROUP_OF, real_items
from tplab.align.check.names import TABLES, pattern_of, role_in, role_of, split_name
from tplab.align.check.notes import listed
from tplab.align.check.outputs import adapted_modules, check_copies, check_joined, check_padding, find_lost_layers
from tplab.align.check.shares import Shares
from tplab.align.check.sources import FEW, SHAPE, WHOLE, Source, Sources
from tplab.align.check.weights import parameters_of
from tplab.align.points import SUMS, layout, point_names, short_name
from tplab.align.recording import Recording, Shard
from tplab.align.replay import Replay
from tplab.checkpoint import Checkpoint
from tplab.shard import ShardPlan

NEAR = 0.02  # of a row's length: more than bfloat16 rounds, far less than a rank's share of a sum
KEPT = 60  # points whose tensors are kept in memory: those of some three layers


def find_points(recorded, ckpt: Checkpoint, names: dict[str, str] | None = None, layouts: Sequence[str] = ()
                ) -> Recording:
    """Find the point of each recorded tensor, the token of each row, and each rank's share.

    Args:
        recorded: what :func:`tplab.align.check.folder.read_recorded` returns.
        names: ``{pattern: point}`` for unknown names; see :mod:`tplab.align.check.overrides`.
        layouts: of :data:`tplab.align.check.shares.LAYOUTS`.

    Raises:
        PlacementError: nothing was recorded, of another checkpoint, or without token ids; ``names`` or ``layouts`` are
            wrong.
        ShardPlanError: this model cannot be dealt out over that many ranks.
    """
    sources = Sources(recorded, ckpt.config, names)
    shares = Shares(sources, ckpt, staged(ckpt.config, sources.stages), tuple(layouts))
    placement = _Placement(sources, shares)
    plan = placement.settle_sums(ckpt)
    parameters, unknown = parameters_of(recorded, shares, ckpt)
    recording = placement.recording()
    recording.plan, recording.parameters = plan, parameters
    check_copies(recording)
    recording.unplaced += [f"{name}: no tensor of the checkpoint that the conventions know" for name in unknown]
    return recording


def staged(config, stages: list[list[int]], enable_expert_parallel: bool = False) -> ShardPlan:
    """The plan of pipeline stages: the ranks of one stage share its layers."""
    plans = [ShardPlan.from_config(config, len(stage), enable_expert_parallel=enable_expert_parallel)
             for stage in stages]
    shards = {rank: replace(shard, rank=rank) for stage, plan in zip(stages, plans) for rank, shard in zip(
        stage, plan.ranks)}
    return plans[0] if len(plans) == 1 else replace(
        plans[0], tensor_parallel_size=len(shards), ranks=tuple(shards[rank] for rank in sorted(shards)))


class _Points(UserDict):
    """Name → shards; :attr:`data` has a function that reads them. A point is read on demand, and a few are kept."""

    def __init__(self, world_size: int):
        super().__init__()

        def read(name: str) -> list[Shard | None]:
            shards, by_rank = [], self.data[name]()
            for shard in map(by_rank.get, range(world_size)):
                # Replicated shards of the same bits are one object: compared and judged once.
                shards.append(next((other for other in shards if shard and other and shard.kind == other.kind
                                    == "replicated" and torch.equal(shard.tensor, other.tensor)), shard))
            return shards
        self.read = lru_cache(KEPT)(read)

    def __getitem__(self, name: str) -> list[Shard | None]:
        return self.read(name)


class _Placement:
    def __init__(self, sources: Sources, shares: Shares):
        self.sources, self.shares, self.config = sources, shares, shares.config
        self.points, self.assumed = _Points(sources.world_size), {}
        self.placed: dict[str, Source] = {}
        self.unplaced: dict[tuple[str, str], set[int]] = {}  # what and why, without the layer → the layers

    def settle_sums(self, ckpt: Checkpoint) -> ShardPlan:
        """Decide of row-parallel layers' outputs whether they are summands or sums, and how experts are dealt out: a
        replay of what goes into them says to which they are nearer. One row that is the sum on every rank decides:
        the others were not summed. Returns the plan."""
        stages, points = self.sources.stages, point_names(self.config, gate_up=True)
        asked = [(role, names, source, f"layers.{i}") for i in range(self.config.num_layers)
                 for role, names in SUMS.items() for source in self.sources.of(f"layers.{i}.{role}")]
        size, experts = max(map(len, stages)), self.config.experts
        plans = [staged(self.config, stages, whole) for whole in (False, True) if not whole or (
            experts and size <= experts.num_experts and any(role == "experts" for role, *_ in asked))]
        if len(plans) > 1 and (width := self._expert_width()):
            plans = [plans[width == experts.intermediate_size]]
        if size == 1 or not asked:
            return plans[0]
        for name in points[:-1]:  # logits may have other rows
            if short_name(name) not in sum(SUMS.values(), ()):
                self._place(name)
        replays, plan = [Replay(self._recording(), ckpt, candidate) for candidate in plans], plans[0]
        for role, names, source, at in asked:
            if (source.pattern, role) in self.shares.summands:
                continue
            if role == "experts" and self._is_added_up_later(source, at):
                names = names[:1]
            far = {(n, point): self._distances(replay, source, f"{at}.{point}")
                   for n, replay in enumerate(replays) for point in names}
            summed = [key for key in far if key[1] != names[0] and far[key][1] < NEAR]
            n, point = min(summed or far, key=lambda key: far[key][0])
            if far[n, point][0] < float("inf"):  # else all is NaN here
                self.shares.summands[source.pattern, role] = point == names[0]
                if point == names[0]:  # a sum is the same however the experts are dealt out
                    plan = plans[n]
        for kept in self.points.data, self.placed, self.assumed, self.unplaced:
            kept.clear()
        return plan

    def _expert_width(self) -> int | None:
        """The columns of an expert's gate on a rank; None if experts are no modules."""
        return next((entry.shape[-1] for calls in self.sources.recorded.values() for call in calls.values()
                     for entry in call.entries if entry.kind == "out" and re.search(
                         r"experts\.\d+\.(gate_proj|w1|act|act_fn)$", entry.name)), None)

    def _is_added_up_later(self, experts: Source, at: str) -> bool:
        """Whether the output of the block around the experts is another one: then theirs is no sum over the ranks."""
        return any(not torch.equal(*(self.sources.rows(source, rank, FEW) for source in (experts, block)))
                   for block in self.sources.of(f"{at}.down") for rank in self.sources.complete(block))

    @torch.inference_mode()
    def _distances(self, replay: Replay, source: Source, name: str) -> tuple[float, float]:
        """How far a source's rows are from a point of a replay: the usual row on the average of the ranks, and the
        row that is nearest on all of them. Rows of NaN say nothing."""
        off = []
        for rank in self.sources.complete(source):
            held, right = self.sources.rows(source, rank), replay.made(name)[rank].get(name)
            if held is not None and right is not None and held.shape == right.shape:
                off.append((held - right).norm(dim=1) / right.norm(dim=1).clamp(min=1e-30))
        known = [rows[rows.isfinite()] for rows in off if rows.isfinite().any()]
        if not known:
            return float("inf"), float("inf")
        alike = len({len(rows) for rows in off}) == 1
        worst = torch.stack(off).amax(0).nan_to_num(nan=float("inf")) if alike else torch.tensor([float("inf")])
        return sum(rows.median().item() for rows in known) / len(known), worst.min().item()

    def recording(self) -> Recording:
        sources = self.sources
        lost = find_lost_layers(sources, self.shares)
        check_padding(sources)
        for name in point_names(self.config, gate_up=True):
            self._place(name)
        recording = self._recording()
        if source := self.placed.get("logits"):
            recording.logit_places, _ = sources.logits(source, sources.complete(source)[0], SHAPE)
            check_joined(sources, source, recording)
        adapters = adapted_modules(sources)
        recording.adapted = {name for name, source in self.placed.items()
                             if source.kind == "out" and source.name in adapters}
        for source in sources.unclaimed():
            parts = source.name.lower().split(".")
            role = role_in(sources.config, *split_name(source.name))
            if role == "" or role_of(*split_name(source.name)) == "rotary" or source.path.partition(".")[0] in TABLES:
                continue  # inside of experts; cos and sin
            adapter = "base_layer" in parts or any(part.startswith("lora_") for part in parts)
            self._leave_out(source, "part of an adapted layer" if adapter else "no point that the conventions know")
        recording.unplaced = [f"{what}: {why}" + (f" ({listed('layer', sorted(layers))})" if layers else "")
                              for (what, why), layers in self.unplaced.items()]
        recording.lost = {f"layers.{layer}.output" for layer in lost}
        return recording

    def _recording(self) -> Recording:
        """What is placed so far."""
        sources, dtypes = self.sources, Counter(source.dtype for source in self.placed.values())
        return Recording(
            world_size=sources.world_size, ids=sources.texts.ids, places=sources.places, num_keys=sources.num_keys,
            logit_places=sources.places, points=self.points, origins=sources.origins, assumed=self.assumed,
            dtype=dtypes.most_common(1)[0][0] if dtypes else torch.float32, warnings=sources.warnings,
            notes=sources.notes, contradictions=sources.contradictions, unjudged=sources.unjudged,
            holders={layer: stage for stage in sources.stages for layer in sources.layers_of(*stage)})

    def _place(self, name: str) -> None:
        """Keep the first candidate with the rows and columns of a point."""
        for source, read, words in self.shares.candidates(name):
            shards = partial(self._shards, name, source, read)
            if None not in shards(SHAPE).values():
                self.points[name], self.placed[name] = partial(shards, WHOLE), source
                self.assumed[name] = f"from {source}; {words}"
                return
            self._leave_out(source, f"rows or columns other than {name.rpartition('.')[2]}'s")

    def _shards(self, name: str, source: Source, read, look: str) -> dict[int, Shard | None]:
        return {rank: None if (tensor := read(rank, look)) is None else self._shard(tensor, name, rank)
                for rank in self.sources.complete(source)}

    def _shard(self, tensor: torch.Tensor, name: str, rank: int) -> Shard | None:
        """A rank's tensor as its part of a point; None if it has other columns."""
        kind, count = layout(name), tensor.shape[1]
        if kind in ("replicated", "partial"):
            right = self.config.experts.num_experts if name.endswith("router_logits") else self.config.hidden_size
            return Shard(tensor, kind) if count == right else None
        group, size = GROUP_OF[short_name(name)], self.config.num_heads // self.config.num_kv_heads
        labels = [self.shares.layouts[group][rank], range(self.shares.totals[group])]
        if kind == "kv_heads":  # every query head may have its own copy
            labels.append([head // size for head in self.shares.layouts["q"][rank] or ()])
        fitting = next((items for items in labels if items is not None and len(items) == count), None)
        if fitting is None:
            return None
        kept, indices = real_items(fitting)
        return Shard(tensor if len(kept) == count else tensor[:, kept], kind, indices)

    def _leave_out(self, source: Source, why: str) -> None:
        layer, _ = split_name(source.name)
        first, dot, _ = source.path.partition(".")
        alike = replace(source, name=pattern_of(source.name), path=first + dot + "*" * bool(dot))
        self.unplaced.setdefault((str(alike), why), set()).update({layer} - {None})

"""``Replay``: the lab's own engine, layer by layer, on what another run computed.

The engine runs on logical ranks. At every trace point that was recorded, it goes on with the recorded tensor in the
place of its own: so each of its tensors is what the module makes of the run's own inputs. Clean, it says what every
point should be; with a bug in it, what the point would be with this bug.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tplab.align.calls import Blocks, Calls
from tplab.align.floors import SHORT
from tplab.align.gather import whole_point
from tplab.align.points import as_index, inputs, layer_of, layout
from tplab.align.recording import Recording
from tplab.align.reference import hf_model, hf_trace
from tplab.cache import PagedKVCache
from tplab.checkpoint import Checkpoint
from tplab.engine import runner
from tplab.model import NoCache, TensorParallelCausalLM, load_model
from tplab.model.trace import point
from tplab.model.trace import recording as traced
from tplab.patch import Patch, applied
from tplab.ranks import logical_ranks, op_log
from tplab.ranks import rank as this_rank
from tplab.shard import ShardPlan

Made = dict[int, dict[str, torch.Tensor]]  # rank → point → what the engine makes of the run's inputs, [rows, …]
REDUCES = "all_reduces"  # beside the points: whether each all-reduce was awaited later, [all-reduces] boolean

# Last names of functions that work while a model is built. A patch of any other is in force in a model that was loaded
# without it.
_LOADING = ("__init__", "load", "tie_weights", "column_shard", "row_shard", "merged_shard", "widened", "by_parameter",
            "no_rotation", "rotate", "make_norm")


class Replay:
    """Replays of one recording. Weights have the values of the run's dtype; ``exact`` is the dtype of the computation:
    float64, for runs in bfloat16 and float16 float32."""

    def __init__(self, recording: Recording, ckpt: Checkpoint, plan: ShardPlan):
        self.recording, self.ckpt, self.plan, self.config = recording, ckpt, plan, ckpt.config
        self.exact = torch.float32 if recording.dtype in SHORT else torch.float64
        self.ranks, self.calls = range(recording.world_size), Calls(recording)
        self.ids = torch.tensor([recording.ids[s][p] for s, p in recording.places])
        self.logit_rows = [recording.row_of[place] for place in recording.logit_places]
        # Of each call, the rows of `logits` that it computes.
        self._drawn = [[n for n, row in enumerate(self.logit_rows) if row in rows]
                       for rows in map(set, self.calls.rows)]
        # Rows of replays come call by call: these indices bring them back to the recording's order.
        self._back, self._back_drawn = (
            torch.tensor([row for call in calls for row in call], dtype=torch.long).argsort()
            for calls in (self.calls.rows, self._drawn))
        self._traces: dict[tuple[int, torch.dtype], dict[str, torch.Tensor]] = {}
        self._clean: dict[tuple, Made] = {}
        self._models: dict[tuple, TensorParallelCausalLM] = {}
        self._held: dict[tuple, dict[str, list[torch.Tensor]]] = {}

    # The run's own values, as the plan deals them out.

    def held(self, name: str, rank: int) -> torch.Tensor | None:
        """What a rank recorded at a point, its share by the plan, ``[rows, …]``; None if it recorded nothing there."""
        shards = self.recording.points.get(name) or [None]
        shard = shards[rank] if rank < len(shards) else None
        if shard is None and layout(name) == "replicated":
            shard = next(filter(None, shards), None)
        if shard is None or shard.kind in ("replicated", "partial"):
            return None if shard is None else shard.tensor
        wanted = getattr(self.plan.ranks[rank], layout(name))
        if tuple(shard.indices) == tuple(wanted):
            return shard.tensor
        whole, known = shard.tensor, shard.indices
        if not set(wanted) <= set(known):
            whole, _, known = whole_point(name, shards)
        where = {index: at for at, index in enumerate(known)}
        return whole[:, as_index([where[i] for i in wanted])] if set(wanted) <= where.keys() else None

    def _held_by_call(self, rank: int, layer: int | None, dtype: torch.dtype) -> dict[str, list[torch.Tensor]]:
        """Of each point of a layer that a rank recorded, its rows in each call."""
        key = rank, layer, dtype
        if key not in self._held:
            points = {n: x.to(dtype) for n in self.recording.points if layer_of(n) == layer
                      and (x := self.held(n, rank)) is not None}
            self._held[key] = {n: [x[rows] for rows in (self._drawn if n == "logits" else self.calls.rows)]
                               for n, x in points.items()}
        return self._held[key]

    def into(self, name: str, rank: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A rank's value at a point that goes into a layer: recorded, or by a clean replay of what is before it, in
        ``dtype`` as well: so the rounding of all that was not recorded adds up."""
        tensor = self.held(name, rank)
        if tensor is not None:
            return tensor
        made = self.made(name, dtype)
        return made[rank if rank in made else min(made)][name]

    def stage(self, name: str) -> list[int]:
        """The ranks that compute a point together: all, or those of a pipeline's stage."""
        layer, holders = layer_of(name), self.recording.holders
        if layer is None:
            layer = 0 if name == "embed" else self.config.num_layers - 1
        return holders.get(layer) or next(iter(holders.values()), [*self.ranks])

    # Replays.

    def made(self, name: str, dtype: torch.dtype | None = None) -> Made:
        """All points of the layer of a point (or of the ends of the model), as the clean engine makes them of the run's
        own inputs. Those of a layer and of the one before it are kept."""
        layer, dtype = layer_of(name), dtype or self.exact
        key = layer, dtype, name == "embed", tuple(self.stage(name))
        if key not in self._clean:
            self._clean = {k: made for k, made in self._clean.items() if k[0] in (layer, layer and layer - 1)}
            self._clean[key] = self._replay(name, (), dtype, self.calls.right, "embed" if name == "embed" else None)
        return self._clean[key]

    def broken(self, name: str, patches: Sequence[Patch]) -> Made:
        """The point ``name`` with patches, with the block tables of the run. Broken code may raise anything."""
        return self._replay(name, tuple(patches), self.exact, self.calls.recorded, name)

    def misread(self, name: str, sequence: int, position: int, slot: int) -> Made:
        """The point ``name`` of the clean engine where later calls read ``slot`` in the place of one key's."""
        return self._replay(name, (), self.exact, self.calls.with_row(sequence, position, slot), name)

    def _replay(self, name: str, patches: tuple[Patch, ...], dtype: torch.dtype, blocks: Blocks,
                until: str | None) -> Made:
        layer, stage = layer_of(name), self.stage(name)
        enter = f"layers.{self.config.num_layers - 1}.output"
        if layer is not None:
            (enter,) = inputs(f"layers.{layer}.input_norm", self.config)
        entering = {rank: self.into(enter, rank, dtype) for rank in stage} if until != "embed" else {}
        if layer is not None and blocks.filled:
            for s in {s for s, p in self.calls.absent if p < self.recording.known[s]}:  # before all ranks ask at once
                self._trace(s, self._filling(dtype))
        for kept in (self._models, self._held):  # what belongs to other layers
            for key in [key for key in kept if key[1] != layer]:
                del kept[key]
        with torch.inference_mode(), applied(*patches, clean=True):
            made = logical_ranks(len(stage), self._on_rank, stage, layer, dtype, entering, blocks, until,
                                 any(patch.target.rpartition(".")[2] in _LOADING for patch in patches), timeout=30.0)
        return dict(zip(stage, made))

    def _model(self, rank: int, stage: list[int], layer: int | None, dtype: torch.dtype, anew: bool
               ) -> TensorParallelCausalLM:
        """A rank's layer, or its ends of the model; loaded ``anew`` with the patches that are in force."""
        key = rank, layer, dtype
        if anew or key not in self._models:
            plan = replace(self.plan, tensor_parallel_size=len(stage), ranks=tuple(
                replace(self.plan.ranks[each], rank=at) for at, each in enumerate(stage)))
            model = load_model(self.ckpt, plan, self.recording.dtype, -1 if layer is None else layer)
            (model if layer is None else model.layers[layer]).to(dtype)
            if anew:
                return model
            self._models[key] = model
        return self._models[key]

    def _on_rank(self, stage: list[int], layer: int | None, dtype: torch.dtype, entering: dict[int, torch.Tensor],
                 blocks: Blocks, until: str | None, anew: bool) -> dict[str, torch.Tensor]:
        rank = stage[this_rank()]
        model = self._model(rank, stage, layer, dtype, anew)
        cache = None
        if layer is not None and not self.recording.plain:
            cache = PagedKVCache(self.config.num_layers, blocks.num_blocks, blocks.block_size,
                                 len(model.shard.kv_heads), self.plan.head_dim, dtype)
            if blocks.filled:
                self._fill(cache, layer, rank, dtype)
        parts: dict[str, list[torch.Tensor]] = {}
        for call, (rows, segments) in enumerate(zip(self.calls.rows, blocks.segments)):
            drawn = self._drawn[call]
            held = {n: calls[call] for n, calls in self._held_by_call(rank, layer, dtype).items()}
            with traced(held, until) as points:
                if layer is None:
                    point("embed", model.embed(self.ids[rows]))
                    normed = point("norm", model.norm(entering[rank][rows].to(dtype)))
                    model.compute_logits(normed[[rows.index(self.logit_rows[n]) for n in drawn]])
                else:
                    positions = torch.tensor([p for segment in segments for p in runner.token_positions(segment)])
                    context = NoCache([s.count for s in segments]) if cache is None else cache.context(segments)
                    hidden, kind = entering[rank][rows].to(dtype), model.rope_layer_types[layer]
                    tables = model.rotary(hidden, positions, context.lengths, *kind)
                    model.layers[layer](hidden, *tables, context)
            for name, x in points.items():
                parts.setdefault(name, []).append(x)
        made = {name: torch.cat(each)[self._back_drawn if name == "logits" else self._back]
                for name, each in parts.items()}
        return made | {REDUCES: torch.tensor([record.started for record in op_log() if record.op == "all_reduce"])}

    def _fill(self, cache: PagedKVCache, layer: int, rank: int, dtype: torch.dtype) -> None:
        """Write the keys and values that no recorded call computed: Hugging Face's, in the run's dtype or as exact as
        they can be; NaN where the token is unknown."""
        heads, dtype = as_index(self.plan.ranks[rank].kv_heads), self._filling(dtype)
        for slot, (s, position) in enumerate(self.calls.absent, len(self.ids)):
            for name, slots in ("k_rope", cache.k_slots), ("v", cache.v_slots):
                slots[layer][slot] = self._trace(s, dtype)[f"layers.{layer}.{name}"][position, heads] if (
                    position < self.recording.known[s]) else torch.nan

    def _filling(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of Hugging Face's run for a replay in ``dtype``."""
        return torch.promote_types(self.recording.dtype, torch.float32 if dtype == self.exact else dtype)

    def _trace(self, s: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Hugging Face's points of a sequence's known tokens."""
        if (s, dtype) not in self._traces:
            ids = self.recording.ids[s][:self.recording.known[s]]
            self._traces[s, dtype] = hf_trace(hf_model(self.ckpt, dtype), ids)
        return self._traces[s, dtype]

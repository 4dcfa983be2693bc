"""``Replay``: the lab's own engine, layer by layer, on what another run computed.

The engine runs on logical ranks. At every trace point that was recorded, it goes on with the recorded tensor in the
place of its own: so each of its tensors is what the module makes of the run's own inputs. Clean, it says what every
point should be; with a fault of the museum in it, what the point would be with this bug.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import torch

from tplab.align.floors import SHORT
from tplab.align.gather import whole_point
from tplab.align.points import as_index, inputs, layer_of, layout
from tplab.align.recording import Recording
from tplab.align.reference import hf_model, hf_trace
from tplab.cache import PagedKVCache, Segment
from tplab.checkpoint import Checkpoint
from tplab.engine import runner
from tplab.model import NoCache, load_model
from tplab.model.trace import point
from tplab.model.trace import recording as traced
from tplab.patch import applied
from tplab.ranks import logical_ranks, op_log, rank
from tplab.shard import ShardPlan

Made = list[dict[str, torch.Tensor]]  # rank → point → what the engine makes of the run's inputs, [rows, …]


class Replay:
    """Of one recording. Weights are those of the run's dtype; ``exact`` is the dtype in which it computes."""

    def __init__(self, recording: Recording, ckpt: Checkpoint, plan: ShardPlan):
        self.recording, self.ckpt, self.plan, self.config = recording, ckpt, plan, ckpt.config
        self.exact = torch.float32 if recording.dtype in SHORT else torch.float64
        self.ranks, self.last = range(recording.world_size), self.config.num_layers
        rows = {place: row for row, place in enumerate(recording.places)}
        self.ids = torch.tensor([recording.ids[s][p] for s, p in recording.places])
        self.logit_rows = [rows[place] for place in recording.logit_places]
        whole = {s: len(text) for s, text in enumerate(recording.ids)}
        self.plain = len(rows) == sum(whole.values()) and all(
            keys == whole[s] for (s, _), keys in zip(recording.places, recording.num_keys))
        calls = sorted(range(len(rows)), key=lambda row: recording.origins[row])
        self.calls = [list(own) for _, own in groupby(calls, lambda row: recording.origins[row][0])]
        self.lost: list[tuple[int, int]] = []
        self.slots = [self._slots(s, rows) for s in whole]
        # How many of a text's tokens are known: those from a -1 on have no reference, and their keys say nothing.
        self.known = {s: text.index(-1) if -1 in text else len(text) for s, text in enumerate(recording.ids)}
        pairs = [(call, s) for (call, _), (s, _) in zip(recording.origins, recording.places)]
        # How long each sequence's prompt was; some RoPE types depend on it.
        self.prompts = [max((keys for keys, (call, other) in zip(recording.num_keys, pairs)
                             if other == s and pairs.count((call, s)) > 1), default=1) for s in whole]
        self.hf: dict[tuple, dict[str, torch.Tensor]] = {}  # (sequence, dtype) → Hugging Face's points
        # Clean, each key is where it belongs; with a bug in it, the engine has the blocks that the run had.
        told = [recording.segments[recording.origins[own[0]][0]] if recording.segments else [] for own in self.calls]
        self.right = [self._segments(own) for own in self.calls], 1, len(self.ids) + len(self.lost) + 1
        self.told = (told, recording.block_size, 1 + max(max(s.block_ids) for of in told for s in of)) if all(
            sum(s.count for s in of) == len(own) for of, own in zip(told, self.calls)) else self.right
        self.kept: dict[tuple, Made] = {}

    def _slots(self, number: int, rows: dict) -> list[int]:
        """Where each key of a sequence stands: the slot of its row, or of a text's with the same beginning. Behind the
        rows' are those of keys that no recorded call computed: they are Hugging Face's, or NaN if the token is unknown.
        """
        texts, found = self.recording.ids, []
        end = max((p for s, p in rows if s == number), default=-1) + 1
        for position in range(end):
            alike = (s for s, text in enumerate(texts) if text[:position + 1] == texts[number][:position + 1])
            row = next((rows[s, position] for s in (number, *alike) if (s, position) in rows), None)
            if row is None:
                row = len(self.ids) + len(self.lost)
                self.lost.append((number, position))
            found.append(row)
        return found

    def _fill(self, cache: PagedKVCache, layer: int, of: int, dtype: torch.dtype) -> None:
        """Write the keys and values that no recorded call computed: in the run's dtype, or as exact as it can be."""
        heads, dtype = as_index(self.plan.ranks[of].kv_heads), torch.promote_types(
            self.recording.dtype, torch.float32 if dtype == self.exact else dtype)
        for slot, (number, position) in enumerate(self.lost, len(self.ids)):
            for name, slots in ("k_rope", cache.k_slots), ("v", cache.v_slots):
                slots[layer][slot] = self._trace(number, dtype)[f"layers.{layer}.{name}"][position, heads] if (
                    position < self.known[number]) else torch.nan

    def _trace(self, number: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Hugging Face's points of a text's known tokens."""
        if (number, dtype) not in self.hf:
            ids = self.recording.ids[number][:self.known[number]]
            self.hf[number, dtype] = hf_trace(hf_model(self.ckpt, dtype), ids)
        return self.hf[number, dtype]

    def _segments(self, rows: list[int]) -> list[Segment]:
        """The sequences of a call."""
        found: list[Segment] = []
        for row in rows:
            (s, position), before = self.recording.places[row], found[-1] if found else None
            if before and before.block_ids is self.slots[s] and position == before.start + before.count:
                found[-1] = before._replace(count=before.count + 1)
            else:
                found.append(Segment(position, 1, self.slots[s], self.prompts[s]))
        return found

    # The run's own values, as the plan deals them out.

    def held(self, name: str, of: int) -> torch.Tensor | None:
        """What a rank recorded at a point, its share by the plan; None if it recorded nothing there."""
        shards = self.recording.points.get(name) or [None]
        own = shards[of] if of < len(shards) else None
        if own is None or own.kind in ("replicated", "partial"):
            if own is None and layout(name) == "replicated":
                own = next(filter(None, shards), None)
            return None if own is None else own.tensor
        wanted = getattr(self.plan.ranks[of], layout(name))
        if tuple(own.indices) == tuple(wanted):
            return own.tensor
        whole, _, known = whole_point(name, shards)
        where = {index: at for at, index in enumerate(known)}
        return whole[:, as_index([where[i] for i in wanted])] if set(wanted) <= where.keys() else None

    def into(self, name: str, of: int) -> torch.Tensor:
        """A rank's value at a point that goes into a layer: recorded, or by a clean replay of the layer before."""
        found = self.held(name, of)
        return self.made(name)[of][name] if found is None else found

    # Replays.

    def stage(self, name: str) -> list[int]:
        """The ranks that compute a point together: those of its layer's pipeline stage."""
        layer, holders = layer_of(name), self.recording.holders
        if layer is None:
            layer = 0 if name == "embed" else self.last - 1
        return holders.get(layer) or next(iter(holders.values()), [*self.ranks])

    def key(self, name: str, patches: Sequence = (), dtype: torch.dtype | None = None) -> tuple:
        """Under which :attr:`kept` has what :meth:`made` returns."""
        return layer_of(name), dtype or self.exact, tuple(patches), self.stage(name)[0]

    def made(self, name: str, patches: Sequence = (), dtype: torch.dtype | None = None) -> Made:
        """All points of a point's layer (or of the ends of the model), as the engine with these patches makes them of
        the run's own inputs; for a rank of another stage, which can have replicated ones, those of the first of this
        stage. Only those of one layer are kept."""
        key, stage = self.key(name, patches, dtype), self.stage(name)
        if key not in self.kept:
            layer, dtype = key[:2]
            self.kept = {k: x for k, x in self.kept.items() if k[0] in (layer, layer and layer - 1)}
            before = inputs(f"layers.{layer}.input_norm", self.config) if layer is not None else [
                f"layers.{self.last - 1}.output"]
            goes_in = {r: {n: self.into(n, r) for n in before} for r in stage}
            with torch.inference_mode(), applied(*patches, clean=True):
                made = logical_ranks(len(stage), self._on_rank, stage, layer, dtype, goes_in,
                                     *(self.told if patches else self.right), timeout=30.0)
            self.kept[key] = [made[stage.index(r)] if r in stage else made[0] for r in self.ranks]
        return self.kept[key]

    def _on_rank(self, stage: list[int], layer: int | None, dtype: torch.dtype, goes_in: dict[int, dict],
                 parts: list[list[Segment]], block_size: int, blocks: int) -> dict[str, torch.Tensor]:
        of = stage[rank()]
        plan = replace(self.plan, tensor_parallel_size=len(stage), ranks=tuple(
            replace(self.plan.ranks[r], rank=i) for i, r in enumerate(stage)))
        model = load_model(self.ckpt, plan, self.recording.dtype, -1 if layer is None else layer).to(dtype)
        given = {n: x.to(dtype) for n in self.recording.points if layer_of(n) == layer
                 and (x := self.held(n, of)) is not None}
        (before, stream), = goes_in[of].items()
        cache = None if self.plain else PagedKVCache(
            self.last, blocks, block_size, len(model.shard.kv_heads), self.plan.head_dim, dtype)
        if cache is not None and layer is not None and parts is self.right[0]:
            self._fill(cache, layer, of, dtype)
        found: dict[str, list[torch.Tensor]] = {}
        for rows, segments in zip(self.calls, parts):
            positions = torch.tensor([p for s in segments for p in runner.token_positions(s)])
            context = NoCache([s.count for s in segments]) if cache is None else cache.context(segments)
            drawn = [n for n, row in enumerate(self.logit_rows) if row in set(rows)]
            own = {n: x[drawn if n == "logits" else rows] for n, x in given.items()}
            with traced(own) as points:
                hidden = stream[rows].to(dtype)
                if layer is None:
                    point("embed", model.embed(self.ids[rows]))
                    normed = point("norm", model.norm(hidden))
                    model.compute_logits(normed[[rows.index(self.logit_rows[n]) for n in drawn]])
                else:
                    kind = model.rope_layer_types[layer]
                    model.layers[layer](hidden, *model.rotary(hidden, positions, context.lengths, *kind), context)
            for name, x in points.items():
                found.setdefault(name, []).append(x)
        back = torch.tensor([row for rows in self.calls for row in rows]).argsort()
        drawn = torch.tensor([n for rows in self.calls for n, row in enumerate(self.logit_rows) if row in set(rows)],
                             dtype=torch.long).argsort()
        found["reduces"] = [torch.tensor([record.started for record in op_log() if record.op == "all_reduce"])]
        return {name: torch.cat(parts)[drawn if name == "logits" else back if name != "reduces" else slice(None)]
                for name, parts in found.items()}

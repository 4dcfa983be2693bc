"""The recorded tensors that may be a trace point, with their rows in order."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from tplab.align.check.match import span
from tplab.align.check.names import BY_VALUE, OVERRIDE, claims, pattern_of, role_in, role_of, split_name
from tplab.align.check.notes import call_notes, listed
from tplab.align.check.overrides import check_names
from tplab.align.check.rows import Texts, as_heads, as_rows, call_inputs
from tplab.align.points import existing
from tplab.align.recording import Contradiction, PlacementError

SAMPLE = 16  # the first rows, by which layouts are found
WHOLE, FEW, SHAPE = "whole", "few", "shape"  # how much of a tensor is read: all rows, the first SAMPLE, none


@dataclass(eq=False)
class Source:
    """One recorded tensor that may be a point: its entries, by rank and call."""

    name: str
    kind: str
    path: str
    strength: int
    order: int
    entries: dict[tuple[int, int], object] = field(default_factory=dict)

    def __str__(self) -> str:
        what = {"in": "’s input", "out": "’s output", "tensor": ""}[self.kind]
        return (self.name or "the model") + what + (f" {self.path}" if self.path not in ("", "0") else "")

    @property
    def dtype(self) -> torch.dtype:
        """In which it was recorded."""
        return next(iter(self.entries.values())).dtype

    @property
    def pattern(self) -> tuple[str, str, str]:
        """The same for all layers."""
        return pattern_of(self.name), self.kind, self.path


class Sources:
    """All recorded tensors, by the points for which they were claimed.

    Attributes:
        recorded: the calls by rank and number, of the ranks that recorded something.
        used, calls: the numbers and the rows of the calls that are judged.
        texts: the sequences.
        stages: the ranks that share their layers, by pipeline stage.
        places, num_keys, declared, origins, notes, contradictions, warnings: as in
            :class:`tplab.align.recording.Recording`.
    """

    def __init__(self, recorded, config, names, **reading):
        self.config, self.world_size = config, recorded.world_size
        self.notes, self.contradictions, self.warnings = list(recorded.notes), [], []
        self.recorded = {rank: {call.index: call for call in known.calls}
                         for rank, known in enumerate(recorded.ranks) if known is not None}
        self.ranks, calls = [*self.recorded], [*self.recorded.values()]
        if not self.ranks:
            raise PlacementError(f"{recorded.folder} holds no recording of any of its {recorded.world_size} ranks")
        if missing := [rank for rank in range(self.world_size) if rank not in self.recorded]:
            self.notes.append(f"{listed('rank', missing)} of {self.world_size} recorded nothing")
        began = [index for index in sorted(set().union(*calls)) if all(index in of and any(
            entry.dtype.is_floating_point for entry in of[index].entries) for of in calls)]
        done = [index for index in began if all(of[index].status == "done" for of in calls)]
        whole = [index for index in done if all(of[index].left_out == of[done[0]].left_out for of in calls)]
        self.used = whole or began[:1]
        if short := [index for index in done if index not in whole]:
            self.notes.append(f"calls {span(short)} were not judged: they lack tensors that call {done[0]} has")
        self.notes += call_notes(recorded.ranks[rank] for rank in self.ranks)
        entries = [entry for of in calls for index in self.used for entry in of[index].entries]
        if {entry.name.rpartition(".")[2] for entry in entries} & {"post_self_attn_layernorm", "post_mlp_layernorm"}:
            # The engine names norms by their places, as the lab's engine does.
            self.config = replace(config, norms=tuple((place, place) for place, _ in config.norms))
        self._names = check_names(names, {entry.name for of in calls for call in of.values() for entry in call.entries})
        self.texts = Texts(**reading)
        self._read_calls()
        self.stages = self._find_stages()
        self._check_rows()
        self._order_rows()
        if self.calls and not self.places:
            raise PlacementError("every token is padding (a negative id or position): there is no row to judge" if any(
                call.size for call in self.calls) else "no recorded call has a token")
        self._check_sizes(entries)
        self.claim()
        self._check_parallel()

    def _read_calls(self) -> None:
        self.calls = []
        for index in sorted(set().union(*self.recorded.values())):
            seen = {rank: call_inputs(calls[index]) for rank, calls in self.recorded.items() if index in calls}
            ids, said, masks = ({rank: one[which] for rank, one in seen.items() if one[which] is not None}
                                for which in range(3))
            if not ids:
                if index in self.used:
                    raise PlacementError(f"call {index} has no token ids: rec.inputs(input_ids, positions) gives them")
                continue
            for what, given in (("token ids", ids), ("positions", said)):
                self.contradictions += [Contradiction(
                    f"call {index}: rank {rank} was given other {what} than rank {min(given)}: {_short(own)}, not "
                    f"{_short(given[min(given)])}", "inputs_differ") for rank, own in given.items()
                    if not torch.equal(own, given[min(given)])]
            if (ids[min(ids)] >= self.config.vocab_size).any():
                raise PlacementError(f"call {index}: token id {int(ids[min(ids)].max())} is not in the checkpoint's "
                                     f"vocabulary: 0 to {self.config.vocab_size - 1}")
            call = self.texts.add_call(index, ids[min(ids)], said[min(said)] if said else None,
                                       self.recorded[min(ids)][index].sequences, masks[min(masks)] if masks else None)
            if index in self.used:
                self.calls.append(call)
        self.texts.settle()
        self.notes += self.texts.notes
        if self.texts.trust_positions:
            self.notes += [f"positions taken for right: {doubt}" for doubt in self.texts.doubts]
        again = {call: tokens for call, of in self.texts.again.items()
                 if (tokens := sum(n for text, n in of.items() if text not in self.texts.unseen_start))}
        if again:
            cached = "" if self.texts.trust_positions else ": nothing was read from a cache"
            self.notes.append(f"calls {span(list(again))} computed {sum(again.values())} tokens of earlier calls once "
                              f"more{cached}")

    def _check_parallel(self) -> None:
        """Refuse data and context parallelism: ranks with whole layers, and other tokens from the first call on."""
        first = {rank: call_inputs(calls[self.used[0]]) for rank, calls in self.recorded.items()} if self.used else {}
        ids = {rank: ids for rank, (ids, _, _) in first.items() if ids is not None}
        other = next((rank for rank in ids if not torch.equal(ids[rank], ids[min(ids)])), None)
        if other is None or sorted(ids[other].flatten().tolist()) == sorted(ids[min(ids)].flatten().tolist()):
            return
        totals = {"q": self.config.q_size, "mlp_act": self.config.intermediate_size}
        if any(entry.shape[-1] == totals.get(point.rpartition(".")[2]) for point, sources in self._points.items()
               for source in sources.values() for (rank, _), entry in source.entries.items() if rank == other):
            positions = first[other][1]
            how = "data" if positions is None or not positions.flatten()[0] else "context"
            raise PlacementError(f"{how} parallelism: rank {other} holds whole layers and has other tokens than rank "
                                 f"{min(ids)} from the first call on; check compares ranks with the same tokens: "
                                 "record one rank alone, with rank=0 and world_size=1, on a whole text")

    def _order_rows(self) -> None:
        last: dict[tuple[int, int], tuple[tuple[int, int], int, int]] = {}  # place → where, keys, the position given
        for number, call in enumerate(self.calls):
            declared = call.declared or [position for _, position in call.places]
            last = call.without_cut(last) | {place: ((number, row), keys, said) for row, place, keys, said in zip(
                call.rows, call.places, call.keys, declared)}
        texts, starts = self.texts, [sum(call.size for call in self.calls[:n]) for n in range(len(self.calls))]
        last = {place: found for place, found in last.items() if place[0] not in texts.unseen_start
                and place[1] < len(texts.ids[place[0]])}
        self.places = sorted(last)
        self.origins, self.num_keys, said = ([last[place][i] for place in self.places] for i in range(3))
        self._index = torch.tensor([starts[number] + row for number, row in self.origins], dtype=torch.long)
        self._in_order = torch.equal(self._index, torch.arange(len(self._index)))
        self.declared = said if said != [position for _, position in self.places] else None

    @property
    def sampled_ids(self) -> list[int]:
        """The token ids of the sampled rows."""
        return [self.texts.ids[number][position] for number, position in self.places[:SAMPLE]]

    def claim(self, roles: dict[str, str] | None = None, points: dict[tuple[str, str, str], str] | None = None) -> None:
        """Collect the claims for every tensor, by its name, and by the ``roles`` and ``points`` found by value."""
        claimed, ignored = set(), set()
        self._points: dict[str, dict[tuple, Source]] = {}
        self._unclaimed: dict[tuple, Source] = {}

        def collect(sources: dict[tuple, Source], strength: int, entry, *where: int) -> None:
            key = strength, entry.name, entry.kind, entry.path, entry.nth
            source = sources.setdefault(key, Source(entry.name, entry.kind, entry.path, strength, entry.order))
            source.entries[where] = entry
        for rank, calls in self.recorded.items():
            for index in self.used:
                found = calls[index].entries
                shared = shared_modules(found, self.config.num_layers)
                for claim in claims(found, self.config, self._names, shared, roles or {}, points or {}):
                    if not claim.point:  # names= says that it is no point
                        ignored.add(id(claim.entry))
                    if id(claim.entry) not in ignored:
                        claimed.add(id(claim.entry))
                        collect(self._points.setdefault(existing(claim.point, self.config), {}), claim.strength,
                                claim.entry, rank, index)
                for entry in found:
                    if not (id(entry) in claimed or id(entry) in ignored) and entry.dtype.is_floating_point:
                        collect(self._unclaimed, BY_VALUE, entry, rank, index)

    def claimed(self) -> list[Source]:
        """The tensors that may be a point, each once."""
        return list({(s.name, s.kind, s.path): s for of in self._points.values() for s in of.values()}.values())

    def unclaimed(self) -> list[Source]:
        """Tensors without a claim that ``names=`` does not leave out."""
        return [source for source in self._unclaimed.values() if self.complete(source)]

    def _check_sizes(self, entries: list) -> None:
        another, config = "it was recorded with another checkpoint", self.config
        for entry in entries:
            layer, rest = split_name(entry.name)
            if (layer or 0) >= config.num_layers:
                raise PlacementError(f"the recording has a layer {layer}, but the checkpoint's layers are 0 to "
                                     f"{config.num_layers - 1}: {another}")
            role = role_in(config, layer, rest)
            if role in ("input_norm", "post_norm", "norm", "embed") and entry.kind == "out" and (
                    entry.path in ("", "0") and entry.shape[-1:] not in ((), (config.hidden_size,))):
                raise PlacementError(f"{entry.name} gives {entry.shape[-1]} columns, but the checkpoint's hidden size "
                                     f"is {config.hidden_size}: {another}")

    def _check_rows(self) -> None:
        for call in self.calls:
            entries = [entry for calls in self.recorded.values() for entry in calls[call.index].entries]
            rows = Counter(math.prod(entry.shape[:-1]) for entry in entries if entry.dtype.is_floating_point
                           and entry.shape[-1:] == (self.config.hidden_size,))
            if not rows or rows.keys() & {call.size, len(call.ends)}:
                continue
            usual = rows.most_common(1)[0][0]
            ids = self.recorded[self.ranks[0]][call.index].input_ids
            given = (entry.tensor().flatten() for entry in entries if math.prod(entry.shape) == usual > call.size
                     and not (entry.dtype.is_floating_point or entry.dtype.is_complex))
            if ids is None or usual % call.tokens or not any(
                    torch.equal(tensor[:call.size].long(), ids.flatten()) for tensor in given):
                raise PlacementError(f"call {call.index} has {call.size} token ids, but its tensors have {usual} rows; "
                                     "give rec.inputs(input_ids, positions) the ids of the call that follows")
            call.pad(usual)

    def layers_of(self, *ranks: int) -> set[int]:
        """The layers of these ranks' recorded tensors."""
        return {layer for rank in ranks if rank in self.recorded for index in self.used
                for entry in self.recorded[rank][index].entries if (layer := split_name(entry.name)[0]) is not None}

    def _find_stages(self) -> list[list[int]]:
        """The ranks of each pipeline stage; all ranks where there is one stage."""
        held = {rank: self.layers_of(rank) for rank in self.ranks}
        stages: list[list[int]] = []
        for rank in sorted(held, key=lambda rank: (-len(held[rank]), rank)):  # a rank that stopped early has fewer
            own = next((stage for stage in stages if held[rank] <= held[stage[0]]), None)
            own.append(rank) if own and (held[rank] or len(stages) == 1) else stages.append([rank])
        if len(stages) < 2:
            return [list(range(self.world_size))]
        runs = Counter(layer for stage in stages for layer in held[stage[0]])
        if twice := sorted(layer for layer, times in runs.items() if times > 1):
            self.contradictions.append(Contradiction(
                f"{listed('layer', twice)} of the model run in more than one stage of the pipeline", "layer_repeated"))
        return sorted(map(sorted, stages)) + [[rank] for rank in range(self.world_size) if rank not in held]

    # Sources, and their tensors.

    def of(self, point: str) -> list[Source]:
        """The claims for a point, in the order of :meth:`rank_of`."""
        found = self._points.get(existing(point, self.config), {}).values()
        return sorted((s for s in found if self.complete(s)), key=self.rank_of)

    def rank_of(self, source: Source) -> tuple:
        """The order of claims: overrides, then those that all ranks have, then the strongest, then the earliest."""
        missing = len(self.ranks) - len(self.complete(source))
        return source.strength != OVERRIDE, missing, source.strength, source.order

    def before(self, source: Source, point: str, rank: int) -> list[Source]:
        """A rank's sources of the point that goes into a source's module, the module's own input first."""
        return sorted((s for s in self.of(point) if rank in self.complete(s)), key=lambda s: s.name != source.name)

    def complete(self, source: Source) -> list[int]:
        """The ranks that recorded a source in every call."""
        return [rank for rank in self.ranks if all((rank, call) in source.entries for call in self.used)]

    def _tensors(self, source: Source, rank: int, look: str) -> Iterator[tuple[torch.Tensor, object]]:
        for call in self.calls:
            one = source.entries[rank, call.index]
            yield torch.empty(one.shape, dtype=one.dtype, device="meta") if look == SHAPE else one.tensor(), call

    def rows(self, source: Source, rank: int, look: str = WHOLE) -> torch.Tensor | None:
        """``[places, columns]`` of one rank; None if it has other rows."""
        found = [as_rows(tensor, call) for tensor, call in self._tensors(source, rank, look)]
        if any(tensor is None or len(tensor) != call.size for tensor, call in zip(found, self.calls)):
            return None
        return self._ordered(found, look)

    def heads(self, source: Source, rank: int, look: str = WHOLE) -> dict[str, torch.Tensor]:
        """The same as ``[places, heads, head_dim]``, in each way that fits all calls."""
        found = [as_heads(tensor, call, self.config.head_dim) for tensor, call in self._tensors(source, rank, look)]
        ways = {way: self._ordered([ways[way] for ways in found], look) for way in (found[0] if found else ())
                if all(way in ways for ways in found)}
        return {way: tensor for way, tensor in ways.items() if tensor is not None}

    def _ordered(self, tensors: list[torch.Tensor], look: str) -> torch.Tensor | None:
        if len({tensor.shape[1:] for tensor in tensors}) != 1:
            return None
        if look == SHAPE:
            return tensors[0].new_empty(len(self.places), *tensors[0].shape[1:])
        if look == FEW:
            return torch.stack([tensors[call][row] for call, row in self.origins[:SAMPLE]])
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return whole[:len(self._index)] if self._in_order else whole[self._index]

    def logits(self, source: Source, rank: int, look: str = WHOLE, padding: bool = False
               ) -> tuple[list[tuple[int, int]], torch.Tensor] | None:
        """The places of the rows of one rank's logits (all rows, or the last row of each text in its call), and the
        logits; with ``padding``, the columns behind the vocabulary instead."""
        found = [as_rows(tensor, call) for tensor, call in self._tensors(source, rank, look)]
        columns = slice(self.config.vocab_size, None) if padding else slice(self.config.vocab_size)
        if not found or any(tensor is None for tensor in found):
            return None
        if all(len(tensor) == call.size for tensor, call in zip(found, self.calls)):
            ordered = self._ordered(found, look)
            return None if ordered is None else (self.places[:len(ordered)], ordered[:, columns])
        last, known = {}, set(self.places)
        for tensor, call in zip(found, self.calls):
            where = {row: place for row, place in zip(call.rows, call.places) if place in known}
            rows = range(call.size) if len(tensor) == call.size else call.ends
            last = call.without_cut(last) | {where[row]: tensor[i] for i, row in enumerate(rows) if row in where}
        if len({len(row) for row in last.values()}) != 1:
            return None
        places = sorted(last)[:SAMPLE if look == FEW else None]
        return places, torch.stack([last[place] for place in places])[:, columns]


def shared_modules(entries, layers: int) -> dict[str, int]:
    """Modules that exist once and run in every layer (vLLM's rotary embedding) → how often each layer runs them."""
    runs = Counter()
    for entry in entries:
        if entry.kind != "tensor":
            runs[entry.name] = max(runs[entry.name], entry.nth + 1)
    found, places = {}, {split_name(name) for name in runs}
    for name, times in runs.items():
        layer, rest = split_name(name)
        inner = role_of(0, rest.rpartition(".")[2]) in ("rotary", "act", "core", "kv_cache")
        alone = layer is None or layer == 0 and layers > 1 and (1, rest) not in places
        if inner and alone and times % layers == 0 and (times > 1 or layer is None):
            found[name] = times // layers
    return found


def _short(ids: torch.Tensor) -> str:
    listed = ids.reshape(-1).tolist()
    return str(listed if len(listed) <= 8 else [*listed[:7], "…"]).replace("'…'", "…")

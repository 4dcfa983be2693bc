"""The recorded tensors that may be a trace point, with their rows in order."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from tplab.align.check.folder import NOTHING_RAN
from tplab.align.check.match import PARTS
from tplab.align.check.names import OVERRIDE, claims, pattern_of, shared_modules, split_name
from tplab.align.check.notes import call_notes, listed, once
from tplab.align.check.overrides import check_names, overridden
from tplab.align.check.refusals import check_one_model, check_parallel, check_rows, check_sizes, find_stages
from tplab.align.check.rows import Texts, as_heads, as_rows, call_inputs
from tplab.align.points import existing, short_name
from tplab.align.recording import Contradiction, PlacementError
from tplab.checks import span

SAMPLE = 16  # the first rows, by which equal tensors are known
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
        places, num_keys, origins, notes, contradictions, warnings, unjudged: as in
            :class:`tplab.align.recording.Recording`.
    """

    def __init__(self, recorded, config, names):
        self.config, self.world_size = config, recorded.world_size
        self.notes, self.contradictions, self.warnings, self.unjudged = [], [], [], []
        self.recorded = {rank: {call.index: call for call in known.calls}
                         for rank, known in enumerate(recorded.ranks) if known is not None}
        self.ranks = [*self.recorded]
        if not self.ranks:
            raise PlacementError(f"{recorded.folder} holds no recording of any of its {recorded.world_size} ranks")
        if missing := [rank for rank in range(self.world_size) if rank not in self.recorded]:
            self.warnings.append(f"{listed('rank', missing)} of {self.world_size} recorded nothing: only what other "
                                 "ranks got of it was seen")
        all_calls = [call for calls in self.recorded.values() for call in calls.values()]
        self._names = check_names(names, {entry.name for call in all_calls for entry in call.entries})
        self._leave_out()
        by_rank = [*self.recorded.values()]
        check_one_model(entry for calls in by_rank for call in calls.values() for entry in call.entries)
        began = [index for index in sorted(set().union(*by_rank)) if all(index in calls and any(
            entry.dtype.is_floating_point for entry in calls[index].entries) for calls in by_rank)]
        done = [index for index in began if all(calls[index].status == "done" for calls in by_rank)]
        whole = [index for index in done if all(calls[index].left_out == calls[done[0]].left_out for calls in by_rank)]
        self.used = whole or began[:1]
        if short := [index for index in done if index not in whole]:
            self.notes.append(f"calls {span(short)} were not judged: they lack tensors that call {done[0]} has")
        self.notes += call_notes(recorded.ranks[rank] for rank in self.ranks)
        entries = [entry for calls in by_rank for index in self.used for entry in calls[index].entries]
        if {entry.name.rpartition(".")[2] for entry in entries} & {"post_self_attn_layernorm", "post_mlp_layernorm"}:
            # The engine names norms by their places, as the lab's engine does.
            self.config = replace(config, norms=tuple((place, place) for place, _ in config.norms))
        self.texts = Texts()
        self._read_calls()
        self.stages = find_stages(self)
        check_sizes(entries, self.config)
        check_rows(self)
        self._order_rows()
        if self.calls and not self.places and not self.texts.questions:
            raise PlacementError("every token is padding (a negative id or position): there is no row to judge" if any(
                call.size for call in self.calls) else "no recorded call has a token")
        self._claim()
        widths = {"q": config.q_size, "mlp_act": config.intermediate_size}
        check_parallel(self, any(entry.shape[-1] == widths.get(short_name(point))
                                 for point, sources in self._points.items() for source in sources.values()
                                 for entry in source.entries.values()))

    def _leave_out(self) -> None:
        """Forget the tensors that ``names=`` leaves out, and calls that have no others: of another model."""
        for rank, calls in self.recorded.items() if "" in self._names.values() else ():
            kept = {call.index: replace(call, entries=tuple(
                entry for entry in call.entries if overridden(entry, self._names) != "")) for call in calls.values()}
            self.recorded[rank] = {i: call for i, call in kept.items() if call.entries or not calls[i].entries}

    def _read_calls(self) -> None:
        self.calls, idle, before = [], [], None
        for index in sorted(set().union(*self.recorded.values())):
            by_rank = {rank: calls[index] for rank, calls in self.recorded.items() if index in calls}
            seen = {rank: call_inputs(call) for rank, call in by_rank.items()}
            ids, positions, masks = ({rank: inputs[n] for rank, inputs in seen.items() if inputs[n] is not None}
                                     for n in range(3))
            if not ids:
                if index in self.used:
                    raise PlacementError(f"call {index} has no token ids: rec.inputs(input_ids, positions) gives them")
                continue
            for what, tensors in (("token ids", ids), ("positions", positions)):
                self.contradictions += [Contradiction(
                    f"call {index}: rank {rank} was given other {what} than rank {min(tensors)}: {_short(tensor)}, not "
                    f"{_short(tensors[min(tensors)])}", "inputs_differ") for rank, tensor in tensors.items()
                    if not torch.equal(tensor, tensors[min(tensors)])]
            first = by_rank[min(ids)]
            tokens = torch.tensor([*ids[min(ids)].flatten().tolist(), *sum((first.texts or {}).values(), [])])
            if (tokens >= self.config.vocab_size).any():
                raise PlacementError(f"call {index}: token id {int(tokens.max())} is not in the checkpoint's "
                                     f"vocabulary: 0 to {self.config.vocab_size - 1}")
            if first.input_ids is None and before and torch.equal(before[0], ids[min(ids)]):
                call = replace(before[1], index=index, cut={})  # the model ran once more on what was told
            else:
                call = self.texts.add_call(index, ids[min(ids)], positions[min(positions)] if positions else None,
                                           first.sequences, masks[min(masks)] if masks else None, first.texts)
            before = (ids[min(ids)], call) if first.input_ids is not None else before
            if index in self.used:
                self.calls.append(call)
            # A call in which nothing runs may tell the beginning of a text.
            tells = len(call.rows) > len(call.ends) and all((number, 0) in call.places for number, _ in call.places)
            if not tells or any(recorded.entries for recorded in by_rank.values()):
                idle += [(rank, index) for rank, recorded in by_rank.items() if NOTHING_RAN in recorded.left_out]
        self.unjudged += [*once((*where, NOTHING_RAN) for where in idle), *self.texts.questions]

    def _order_rows(self) -> None:
        last: dict[tuple[int, int], tuple[tuple[int, int], int]] = {}  # place → where it was computed, its keys
        for number, call in enumerate(self.calls):
            last = call.without_cut(last) | {place: ((number, row), keys)
                                             for row, place, keys in zip(call.rows, call.places, call.keys)}
        texts, starts = self.texts, [sum(call.size for call in self.calls[:n]) for n in range(len(self.calls))]
        self.places = sorted(place for place in last if place[0] not in texts.padding
                             and place[1] < len(texts.ids[place[0]]))
        if texts.padding:
            self.notes.append("sequences that have one token, at position 0 of decode steps, were taken for padding")
        self.origins, self.num_keys = ([last[place][i] for place in self.places] for i in range(2))
        self._index = torch.tensor([starts[number] + row for number, row in self.origins], dtype=torch.long)
        self._in_order = torch.equal(self._index, torch.arange(len(self._index)))

    def _claim(self) -> None:
        """Collect the claims for every tensor, by its name."""
        self._points: dict[str, dict[tuple, Source]] = {}
        self._unclaimed: dict[tuple, Source] = {}

        def collect(sources: dict[tuple, Source], strength: int, entry, *where: int) -> None:
            key = strength, entry.name, entry.kind, entry.path, entry.nth
            source = sources.setdefault(key, Source(entry.name, entry.kind, entry.path, strength, entry.order))
            source.entries[where] = entry
        for rank, calls in self.recorded.items():
            for index in self.used:
                entries, claimed = calls[index].entries, set()
                for claim in claims(entries, self.config, self._names, shared_modules(calls[index], self.config)):
                    claimed.add(id(claim.entry))
                    collect(self._points.setdefault(existing(claim.point, self.config), {}), claim.strength,
                            claim.entry, rank, index)
                for entry in entries:
                    if id(entry) not in claimed and entry.dtype.is_floating_point:
                        collect(self._unclaimed, 0, entry, rank, index)

    def points(self) -> list[str]:
        """The points that some tensor may be, fused ones as their parts."""
        split = [(short_name(name), name) for name in self._points]
        return [name.removesuffix(point) + part for point, name in split for part in PARTS.get(point, (point,))]

    def claimed(self) -> list[Source]:
        """The tensors that may be a point, each once."""
        return list({(s.name, s.kind, s.path): s for group in self._points.values() for s in group.values()}.values())

    def unclaimed(self) -> list[Source]:
        """Tensors without a claim."""
        return [source for source in self._unclaimed.values() if self.complete(source)]

    def layers_of(self, *ranks: int) -> set[int]:
        """The layers of these ranks' recorded tensors."""
        return {layer for rank in ranks if rank in self.recorded for index in self.used
                for entry in self.recorded[rank][index].entries if (layer := split_name(entry.name)[0]) is not None}

    # Sources, and their tensors.

    def of(self, point: str) -> list[Source]:
        """The claims for a point, in the order of :meth:`rank_of`."""
        claimed = self._points.get(existing(point, self.config), {}).values()
        return sorted((s for s in claimed if self.complete(s)), key=self.rank_of)

    def rank_of(self, source: Source) -> tuple:
        """The order of claims: overrides, then those that all ranks have, then the strongest, then the earliest."""
        missing = len(self.ranks) - len(self.complete(source))
        return source.strength != OVERRIDE, missing, source.strength, source.order

    def complete(self, source: Source) -> list[int]:
        """The ranks that recorded a source in every call."""
        return [rank for rank in self.ranks if all((rank, call) in source.entries for call in self.used)]

    def _tensors(self, source: Source, rank: int, look: str) -> Iterator[tuple[torch.Tensor, object]]:
        for call in self.calls:
            entry = source.entries[rank, call.index]
            yield torch.empty(entry.shape, dtype=entry.dtype, device="meta") if look == SHAPE else entry.tensor(), call

    def rows(self, source: Source, rank: int, look: str = WHOLE) -> torch.Tensor | None:
        """``[places, columns]`` of one rank; None if it has other rows."""
        tensors = [as_rows(tensor, call) for tensor, call in self._tensors(source, rank, look)]
        if any(tensor is None or len(tensor) != call.size for tensor, call in zip(tensors, self.calls)):
            return None
        return self._ordered(tensors, look)

    def heads(self, source: Source, rank: int, look: str = WHOLE) -> torch.Tensor | None:
        """The same as ``[places, heads, head_dim]``."""
        tensors = [as_heads(tensor, call, self.config.head_dim) for tensor, call in self._tensors(source, rank, look)]
        return None if any(tensor is None for tensor in tensors) else self._ordered(tensors, look)

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
        tensors = [as_rows(tensor, call) for tensor, call in self._tensors(source, rank, look)]
        columns = slice(self.config.vocab_size, None) if padding else slice(self.config.vocab_size)
        if not tensors or any(tensor is None for tensor in tensors):
            return None
        if all(len(tensor) == call.size for tensor, call in zip(tensors, self.calls)):
            ordered = self._ordered(tensors, look)
            return None if ordered is None else (self.places[:len(ordered)], ordered[:, columns])
        last, known = {}, set(self.places)
        for tensor, call in zip(tensors, self.calls):
            where = {row: place for row, place in zip(call.rows, call.places) if place in known}
            rows = range(call.size) if len(tensor) == call.size else call.ends
            last = call.without_cut(last) | {where[row]: tensor[i] for i, row in enumerate(rows) if row in where}
        if len({len(row) for row in last.values()}) != 1:
            return None
        places = sorted(last)[:SAMPLE if look == FEW else None]
        return places, torch.stack([last[place] for place in places])[:, columns]


def _short(ids: torch.Tensor) -> str:
    listed = ids.reshape(-1).tolist()
    return str(listed if len(listed) <= 8 else [*listed[:7], "…"]).replace("'…'", "…")

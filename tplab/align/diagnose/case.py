"""What the diagnosis looks at: the tensors around a guilty point, and how well a guess fits."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from tplab.align.floors import SHORT, relative_floor
from tplab.align.gather import whole_point
from tplab.align.guilty import Judge
from tplab.align.points import inputs, layout, made_from
from tplab.align.recording import Shard
from tplab.align.report import AlignReport
from tplab.checks import spans


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong, as far as the numbers tell."""

    # The museum's name for it, or where the museum has no such bug, one in the same style ("norm_epsilon"); None if
    # nothing is wrong or nothing of the table fits.
    fault: str | None
    sentence: str  # the same in words, with the evidence
    point: str | None = None  # the trace point at which it was first seen; None if nothing is wrong
    numbers: dict[str, float] = field(default_factory=dict)  # the evidence by name
    lookalikes: tuple[str, ...] = ()  # other faults of the museum that leave exactly the same numbers
    points: tuple[str, ...] = ()  # all trace points that it explains
    scope: str = ""  # of which rows it holds, in words ("in decode calls only"); empty if of all
    ranks: tuple[int, ...] = ()  # on which it shows; empty if on all

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return self.point is None

    @property
    def names(self) -> tuple[str, ...]:
        """The fault and those that cannot be told from it by numbers."""
        return (self.fault, *self.lookalikes) if self.fault else ()

    @property
    def where(self) -> str:
        """All its points in words: ``"layers 0–29: q_rope, k_rope"``."""
        at = [name.rpartition(".") for name in self.points or (self.point or "",)]
        layers = sorted({int(layer.split(".")[1]) for layer, _, _ in at if layer})
        names = ", ".join(dict.fromkeys(point for _, _, point in at))
        on = f" on rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return (f"layer{'s' * (len(layers) > 1)} {', '.join(spans(layers))}: {names}" if layers else names) + on

    def __str__(self) -> str:
        return self.sentence


IN_DECODE, IN_PROMPTS = "in decode calls only", "in calls of several tokens only"


class Scope(NamedTuple):
    """Some rows of a run, in which a bug may stand alone."""

    words: str  # IN_DECODE
    rows: torch.Tensor  # [rows] boolean


def calls_of_rows(sequences: torch.Tensor, positions: torch.Tensor, num_keys: torch.Tensor
                  ) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row, at which position its call's part of the sequence began, and whether the row was decoded. A call's
    rows of a sequence have one number of keys."""
    _, call, sizes = torch.stack([sequences, num_keys]).unique(dim=1, return_inverse=True, return_counts=True)
    begins = torch.zeros_like(sizes).scatter_reduce(0, call, positions, "amin", include_self=False)[call]
    return begins, (sizes[call] == 1) & (positions > 0) & (num_keys == positions + 1)


class Case:
    """One guilty point of a run: what was computed there, and what it should be given what the engine had before it.

    ``point`` is its short name, ``layer`` the layer's: ``"layers.3"``, or ``""`` at the ends of the model. Other points
    of the layer are called by their short names. All tensors are in the precision of the judge, not of the run.
    """

    def __init__(self, report: AlignReport, name: str | None = None, judge: Judge | None = None):
        self.report, self.plan, self.checkpoint = report, report.plan, report.checkpoint
        self.config, self.recording = report.checkpoint.config, report.recording
        self.judge = judge or Judge(self.recording, self.checkpoint, self.plan)
        name = name or next(iter(report.guilty), report.first_divergence.name)
        self.first = report[name]
        self.layer, _, self.point = name.rpartition(".")
        self.ops: tuple[str, ...] = (self.point,)  # those that are to be taken for wrong
        self.on: tuple[int, ...] = ()  # the ranks on which they are; empty: all
        self.scope: torch.Tensor | None = None  # the rows in which they are to be taken for wrong; None: all
        self.compared: torch.Tensor | None = None  # the rows that are to be explained; None: all
        self.judge.enter(name)
        self.frame = self.judge.frame
        self.known: dict = {}  # what was found of all that differ in `ops`, `on`, `scope` and `compared`
        # What the rows of the tensors stand for: all tokens, unless the decode path was aligned.
        self.places = self.recording.logit_places if name == "logits" else self.recording.places
        self.sequences, self.positions = torch.tensor(self.places).T
        self.ids = self.token_ids(self.places)
        begins, decoded = calls_of_rows(*torch.tensor(self.recording.places).T, self.frame.num_keys)
        rows = self.frame.logit_rows if name == "logits" else slice(None)
        # For each row, the position at which its call's part of the sequence began; whether it was computed alone, with
        # a past behind it; how many keys its sequence had at the end of its call.
        self.begins, self.decoded, self.num_keys = begins[rows], decoded[rows], self.frame.num_keys[rows]

    def token_ids(self, places: list[tuple[int, int]]) -> torch.Tensor:
        """The token ids at these ``(prompt, position)``; ``ids`` holds those of all rows."""
        return torch.tensor([self.recording.ids[prompt][position] for prompt, position in places])

    def _full(self, name: str) -> str:
        return f"{self.layer}.{name}" if self.layer else name

    def has(self, name: str, rank: int | None = None) -> bool:
        """Whether a point of the layer was recorded, on this rank or on any."""
        shards = self.recording.points.get(self._full(name), [])
        return any(shards) if rank is None else bool(shards and shards[rank])

    def indices(self, name: str, rank: int) -> Sequence[int]:
        """The global heads, columns or vocabulary rows that a rank holds of a point."""
        return self.frame.indices(self._full(name), rank)

    def shard(self, name: str, rank: int) -> torch.Tensor:
        """What a rank had at a point, recorded or computed from what it had before."""
        return self.frame.value(self._full(name), rank)

    def shards(self, name: str) -> list[torch.Tensor]:
        """What each rank had."""
        return [self.shard(name, rank) for rank in self.frame.ranks]

    def expected(self, rank: int) -> torch.Tensor:
        """What a rank should have at this case's point, given what it had before."""
        return self.once(("expected", rank), lambda: self.frame.expected(self.first.name, rank))

    def once(self, key: tuple, make: Callable):
        """``make()``, worked out once for all cases that differ in nothing but what :meth:`with_` changes."""
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    @cached_property
    def way(self) -> tuple[str, ...]:
        """The point's own operation and those before it whose points were not recorded: any of them may be wrong."""
        ops, unseen = [self.point], [self.first.name]
        while unseen:
            for name in inputs(unseen.pop(), self.config):
                layer, _, point = name.rpartition(".")
                if layer == self.layer and point not in ops and not self.has(point):
                    ops.append(point)
                    unseen.append(name)
        return tuple(ops)

    def ours(self, name: str) -> torch.Tensor:
        """The engine's tensor, whole."""
        return self._whole(name, self.shards(name))

    def reference(self) -> torch.Tensor:
        """What this case's point should be, whole."""
        return self._whole(self.point, map(self.expected, self.frame.ranks))

    def _whole(self, name: str, of_ranks: Iterable[torch.Tensor]) -> torch.Tensor:
        how = layout(name)
        return whole_point(name, [Shard(tensor, how, () if how in ("replicated", "partial") else self.indices(
            name, rank)) for rank, tensor in enumerate(of_ranks)])[0]

    @property
    def rope(self) -> dict:
        """The parameters of the layer's RoPE."""
        return next(iter(self.config.ropes.values())) if not self.layer else self.config.ropes[
            next(iter(self.frame.rope_type(f"{self.layer}.")), None)]

    @property
    def turned(self) -> int:
        """How many numbers of a head RoPE turns, the first ones."""
        return -(-int(self.config.head_dim * self.config.partial_rotary_factor) // 2) * 2

    @property
    def times_in_tables(self) -> int:
        """How often an angle stands in a row of the model's tables."""
        return 2 * self.frame.cos_sin(f"{self.layer}.")[0].shape[-1] // self.turned

    def made_from(self, op: str) -> tuple[str, ...]:
        """The points of the layer from which another one is made, and ``"before"``."""
        return made_from(self._full(op), self.config)

    def with_(self, **changed) -> "Case":
        """The same case with some attributes changed: ``ops`` and ``on``, the operations and ranks that are to be taken
        for wrong; ``scope``, the rows in which they are; ``compared``, the rows that are to be explained."""
        other = copy.copy(self)
        once = {name: getattr(self, name) for name in ("tolerance", "wrong_ranks", "lost", "way")}
        vars(other).update(**once, **changed)
        for name in ("rows", "shown"):
            vars(other).pop(name, None)
        return other

    @cached_property
    def rows(self) -> torch.Tensor:
        """The rows that are to be explained, ``[rows]`` boolean."""
        return self.all_or(self.compared) & ~self.lost

    @cached_property
    def shown(self) -> torch.Tensor:
        """Those of them in which the operations are to be taken for wrong."""
        return self.rows & self.all_or(self.scope)

    def all_or(self, rows: torch.Tensor | None) -> torch.Tensor:
        """``rows``, or all of them."""
        return torch.ones(len(self.places), dtype=torch.bool) if rows is None else rows

    @cached_property
    def lost(self) -> torch.Tensor:
        """Which rows got NaN or infinity, ``[rows]`` boolean: what comes of it says nothing."""
        lost = torch.zeros(len(self.places), dtype=torch.bool)
        for rank in self.wrong_ranks:
            lost |= ~self.expected(rank).flatten(1).isfinite().all(1)
        return lost

    @cached_property
    def guilty_rows(self) -> torch.Tensor:
        """Which rows are wrong on any rank, ``[rows]`` boolean."""
        off = torch.zeros(len(self.places), dtype=torch.bool)
        for rank in self.wrong_ranks:
            held, should = (x.double().flatten(1) for x in (self.shard(self.point, rank), self.expected(rank)))
            scale = should.abs().amax(1).masked_fill(self.lost, 0)
            limit = self.judge.tolerance(self.first.name, rank) * scale.clamp(min=1e-4 * scale.max().item())
            off |= ~((held - should).abs().amax(1) <= limit)
        return off & ~self.lost

    @cached_property
    def calls(self) -> list[torch.Tensor]:
        """The rows of each call, in the order in which the engine had them."""
        origin, found = dict(zip(self.recording.places, self.recording.origins)), {}
        for row in sorted(range(len(self.places)), key=lambda row: origin.get(self.places[row], (0, row))):
            found.setdefault(origin.get(self.places[row], (0, row))[0], []).append(row)
        return [torch.tensor(rows) for rows in found.values()]

    @cached_property
    def beside(self) -> torch.Tensor:
        """``[rows, 2]``: for each row that was decoded, how many keys the first and the longest sequence of its call
        had; 0 for others."""
        found = torch.zeros(len(self.places), 2, dtype=torch.long)
        for rows in self.calls:
            alone = rows[self.decoded[rows]]
            if len(alone):
                keys = self.positions[alone] + 1
                found[alone] = torch.stack([keys[0], keys.max()])
        return found

    def scopes(self) -> Iterator[Scope]:
        """The kinds of rows that hold all that is wrong and not all rows: of decode calls, of the calls of several
        tokens, of first or of later chunks, of one sequence, from a position on, between two."""
        guilty, sequences, alone = self.guilty_rows, self.sequences, self.decoded
        later = (self.begins > 0) & ~alone
        first, last = (int(x) for x in self.positions[guilty].aminmax()) if guilty.any() else (0, 0)
        found = [Scope(IN_DECODE, alone), Scope(IN_PROMPTS, ~alone),
                 Scope("in later chunks only", later), Scope("in first calls only", ~later & ~alone)]
        found += [Scope(f"in sequence {s} only", sequences == s) for s in sequences[guilty].unique().tolist()]
        found += [Scope(f"from position {first} on", self.positions >= first),
                  Scope(f"at positions {first} to {last}", (self.positions >= first) & (self.positions <= last)),
                  Scope(f"in {int(guilty.sum())} of {len(guilty)} rows, the first at position {first} of sequence "
                        f"{int(sequences[guilty][0]) if guilty.any() else 0}", guilty)]
        seen: list[torch.Tensor] = []
        for scope in found:
            if not scope.rows.all() and not any(torch.equal(scope.rows, other) for other in seen):
                seen.append(scope.rows)
                yield scope

    @property
    def op(self) -> str:
        """The op that is asked about: the point's own, or one before it whose point was not recorded."""
        return self.ops[0]

    @cached_property
    def wrong_ranks(self) -> tuple[int, ...]:
        """The ranks that hold something else than they should."""
        return self.report.local[self.first.name].guilty

    @cached_property
    def tolerance(self) -> float:
        """How far from a guess, relative to its scale, rounding can put what was computed from right tensors. Less
        where what is to be explained is hardly more: a guess that leaves a quarter of it explains nothing."""
        if self.report.dtype not in SHORT:
            rounding = 3 * relative_floor(self.report.dtype, self.report.computed is not None)
        else:
            rounding = max(self.judge.tolerance(self.first.name, rank) for rank in self.frame.ranks
                           if self.has(self.point, rank))
        return min(rounding, max(self._off(rank) for rank in self.wrong_ranks) / 4) if self.wrong_ranks else rounding

    def _off(self, rank: int) -> float:
        """How far a rank is from what it should hold, relative to its scale; infinite if that is lost."""
        should = self.expected(rank)
        off = ((self.shard(self.point, rank) - should).abs().max() / should.abs().max().clamp(min=1e-30)).item()
        return off if off == off else float("inf")

    def looked_at(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of a tensor in which a mistake is looked for."""
        return tensor if self.scope is None or len(tensor) != len(self.scope) else tensor[self.scope]

    def fits(self, tensor: torch.Tensor, guess: torch.Tensor) -> bool:
        """Whether rounding explains the rest, when ``tensor`` is taken for ``guess``; never if either is not finite."""
        if tensor.shape != guess.shape or not (torch.isfinite(tensor).all() and torch.isfinite(guess).all()):
            return False
        tensor, guess = self.looked_at(tensor), self.looked_at(guess)
        gap = (tensor.double() - guess.double()).abs().max().item()
        return gap <= self.tolerance * max(guess.double().abs().max().item(), 1e-30)

    def diagnosis(self, fault: str | None, sentence: str, *lookalikes: str, **numbers: float) -> Diagnosis:
        """A diagnosis at this case's point."""
        held = [rank for rank in self.frame.ranks if self.has(self.point, rank)]
        ranks = () if set(held) <= set(self.wrong_ranks) else tuple(self.wrong_ranks)
        return Diagnosis(fault, sentence, self.first.name, numbers, lookalikes, ranks=ranks)

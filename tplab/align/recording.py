"""``Recording``: what an engine computed, point by point and rank by rank; the lab's engine or any other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from tplab.errors import TplabError
from tplab.shard import ShardPlan


class PlacementError(TplabError):
    """The recording does not fit this checkpoint; the message says what does not."""


class Contradiction(str):
    """A sentence about what is wrong with any values; with the bug's name, if it has one, and the points (short names)
    that are wrong by it, too."""

    def __new__(cls, sentence: str, fault: str | None = None, about: tuple[str, ...] = ()) -> "Contradiction":
        made = super().__new__(cls, sentence)
        made.fault, made.about = fault, about
        return made


@dataclass(frozen=True)
class Shard:
    """What one rank holds of one point."""

    tensor: torch.Tensor  # [rows, heads, head_dim] at q_heads and kv_heads points, else [rows, columns]; as recorded
    kind: str  # a layout of points.py; a rank may hold all of what is dealt out: then `indices` are all
    indices: tuple[int, ...] | range = ()  # the global heads, columns or vocabulary rows along dim 1, in their order


class Parameter(NamedTuple):
    """What one rank holds of one checkpoint tensor: ``indices`` of it along ``dim``; whole where ``dim`` is None."""

    tensor: torch.Tensor
    dim: int | None = None
    indices: tuple[int, ...] | range = ()


@dataclass
class Recording:
    """All calls of a run, their rows in the order of sequence and position; of each row the last computation."""

    world_size: int
    ids: list[list[int]]  # the whole text of each sequence; -1 for a token that nothing tells
    places: list[tuple[int, int]]  # (sequence, position) of each row of every point but the logits
    num_keys: list[int]  # per row, how many keys of its sequence existed at the end of the call that computed it
    logit_places: list[tuple[int, int]]  # the same as `places`, of the rows of the logits (perhaps last positions only)
    points: Mapping[str, list[Shard | None]]  # canonical name → a shard per rank, None for a rank without it
    dtype: torch.dtype  # in which most of the points were recorded
    origins: list[tuple[int, int]] = field(default_factory=list)  # per row, the call that computed it, its row there
    segments: list[list] = field(default_factory=list)  # per call, its sequences' block tables, where they are known
    block_size: int = 1
    assumed: dict[str, str] = field(default_factory=dict)  # point → its tensor and its layout, in words
    unplaced: list[str] = field(default_factory=list)  # tensors that are no known point, and why
    notes: list[str] = field(default_factory=list)  # what else was not seen: missing ranks, calls cut off
    contradictions: list[Contradiction] = field(default_factory=list)  # what is wrong with any values
    parameters: list[dict[str, Parameter] | None] = field(default_factory=list)  # per rank, by the checkpoint's names
    plan: ShardPlan | None = None  # what each rank holds by the plan's rule, stage by stage of a pipeline
    lost: set[str] = field(default_factory=set)  # outputs of layers that did not run, as the next layer got them
    holders: dict[int, list[int]] = field(default_factory=dict)  # the ranks that hold a layer, where not all do
    unjudged: list[str] = field(default_factory=list)  # the parts of the run that could not be judged
    adapted: set[str] = field(default_factory=set)  # points that come from a module with an adapter (LoRA)
    warnings: list[str] = field(default_factory=list)  # what a right engine may do, and what it can lead to

    def places_of(self, name: str) -> list[tuple[int, int]]:
        """The (sequence, position) of each row of a point."""
        return self.logit_places if name == "logits" else self.places

    @cached_property
    def row_of(self) -> dict[tuple[int, int], int]:
        """The row of each (sequence, position)."""
        return {place: row for row, place in enumerate(self.places)}

    @cached_property
    def call_of(self) -> dict[tuple[int, int], int]:
        """The call that computed each (sequence, position)."""
        return {place: call for place, (call, _) in zip(self.places, self.origins)}

    @cached_property
    def known(self) -> list[int]:
        """Per sequence, how many of its tokens are known: from a -1 on, nothing is."""
        return [text.index(-1) if -1 in text else len(text) for text in self.ids]

    @cached_property
    def plain(self) -> bool:
        """Whether every sequence was computed whole in one call, so that no cache was needed."""
        return len(self.places) == sum(map(len, self.ids)) and all(
            keys == len(self.ids[s]) for (s, _), keys in zip(self.places, self.num_keys))

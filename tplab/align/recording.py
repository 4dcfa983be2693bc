"""``Recording``: what an engine computed, point by point and rank by rank, whoever the engine was."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tplab.errors import TplabError
from tplab.shard import ShardPlan


class PlacementError(TplabError):
    """What was recorded cannot be laid beside this checkpoint; the message says what of it does not fit."""


class Contradiction(str):
    """A sentence about what cannot be, whatever the values are.

    Attributes:
        fault: the name of the bug; None if it has none.
        about: points (short names): a named bug at one of them is what is behind it.
    """

    fault: str | None
    about: tuple[str, ...]

    def __new__(cls, sentence: str, fault: str | None = None, about: tuple[str, ...] = ()) -> "Contradiction":
        made = super().__new__(cls, sentence)
        made.fault, made.about = fault, about
        return made


@dataclass(frozen=True)
class Shard:
    """What one rank holds of one point.

    Attributes:
        tensor: ``[rows, heads, head_dim]`` at ``q_heads`` and ``kv_heads`` points, ``[rows, columns]`` otherwise; in
            the dtype in which it was recorded.
        kind: ``"replicated"``, ``"q_heads"``, ``"kv_heads"``, ``"mlp"``, ``"vocab"`` or ``"partial"``. A point that
            is dealt out by the names in :mod:`tplab.align.points` may be held whole: then ``indices`` are all.
        indices: the global heads, columns or vocabulary rows along dim 1, in their order; ``()`` where the shard is
            replicated or a summand.
    """

    tensor: torch.Tensor
    kind: str
    indices: tuple[int, ...] | range = ()


class Parameter(NamedTuple):
    """What one rank holds of one checkpoint tensor: ``indices`` of it along ``dim``; whole where ``dim`` is None."""

    tensor: torch.Tensor
    dim: int | None = None
    indices: tuple[int, ...] | range = ()


@dataclass
class Recording:
    """All calls of a run, their rows brought into one order: by sequence, then by position.

    A row that was computed more than once counts as it was computed last.

    Attributes:
        ids: the whole text of each sequence.
        places: ``(sequence, position)`` of each row of every point but the logits; position = tokens before it.
        num_keys: for each row, how many keys of its sequence existed at the end of the call that computed it.
        origins: for each row, the call that computed it and its place among the rows there.
        logit_places: the same as ``places``, of the rows of the logits (perhaps last positions only).
        points: canonical name (:mod:`tplab.align.points`, and ``gate`` and ``up`` of each layer) → one :class:`Shard`
            per rank, None for a rank without it. A point that was not recorded is missing.
        dtype: in which most of the points were recorded.
        declared: for each row, the position that the engine gave, if any of them differs from ``places``.
        assumed: point → sentence: which tensor it was taken from, which layout was assumed.
        unplaced: tensors that are no point we know, and why.
        notes: what else could not be seen: missing ranks, calls cut off, points left out.
        contradictions: what is wrong whatever the values are: ranks that were given other token ids, heads or columns
            that no rank holds. A healthy engine has none.
        parameters: per rank, checkpoint name → :class:`Parameter`; None for a rank that recorded none.
        plan: what each rank holds by the plan's rule, stage by stage of a pipeline.
        lost: the outputs of layers that did not run, as the next layer got them.
        holders: the ranks that hold a layer, where not all do.
        doubts: where the engine's positions, taken for right, would give other texts.
        unjudged: what of the run could not be looked at.
        reordered: whether the numbers in a head of q and k were taken to stand in an order of the engine's own.
        warnings: what a right engine may do, and what can follow.
    """

    world_size: int
    ids: list[list[int]]
    places: list[tuple[int, int]]
    num_keys: list[int]
    logit_places: list[tuple[int, int]]
    points: dict[str, list[Shard | None]]
    dtype: torch.dtype
    origins: list[tuple[int, int]] = field(default_factory=list)
    declared: list[int] | None = None
    assumed: dict[str, str] = field(default_factory=dict)
    unplaced: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    contradictions: list[Contradiction] = field(default_factory=list)
    parameters: list[dict[str, Parameter] | None] = field(default_factory=list)
    plan: ShardPlan | None = None
    lost: set[str] = field(default_factory=set)
    holders: dict[int, list[int]] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)
    reordered: bool = False
    warnings: list[str] = field(default_factory=list)

"""Cuts a fused output into q, k and v, or into gate and up.

The plan's order, ``[q|k|v]`` of the rank's heads, is the rule. Where the labels show another order, it is the engine's
own, unless :func:`tplab.align.check.check.check` finds that the points behind it were made in the plan's order.
"""

from typing import NamedTuple

import torch

from tplab.align.check.match import GROUP_OF, GROUPS, PADDING, PARTS, Indices, match, usual_shares
from tplab.align.check.sources import FEW
from tplab.align.recording import Contradiction

Columns = dict[str, list[int]]  # by part


class Split(NamedTuple):
    """Per rank, the columns of a fused output that are q, k and v (gate and up), and how many it has; None for a rank
    where nothing fits. ``reordered``: whether they stand in an order of their own."""

    parts: list[Columns | None]
    widths: list[int | None]
    sentence: str
    reordered: bool


class Fused:
    """One kind of fused output: ``"qkv"`` or ``"gate_up"``. An item is a head or a column; its label counts through all
    parts, one behind the other."""

    def __init__(self, shares, name: str):
        self.shares, self.sources, self.expected, self.name = shares, shares.sources, shares.expected, name
        self.dim, self.groups = shares.dim(PARTS[name][0]), [GROUP_OF[part] for part in PARTS[name]]
        totals = [shares.totals[group] for group in self.groups]
        self.sections = {part: range(sum(totals[:i]), sum(totals[:i + 1])) for i, part in enumerate(PARTS[name])}
        self.before = "input_norm" if name == "qkv" else "post_norm"

    def labels(self, rows: torch.Tensor, x: torch.Tensor, at: str, rank: int) -> Indices | None:
        """The labels of a rank's output ``[rows, columns]`` of the input ``x``; None if it has none."""
        if rows.shape[1] % self.dim:
            return None
        whole = torch.cat([self.expected.of(at + part, x).flatten(1) for part in self.sections], 1)
        local, full = (tensor.unflatten(1, (-1, self.dim)) for tensor in (rows, whole))
        planned = [[self.shares.planned[group][rank]] for group in self.groups]
        if self.name == "gate_up":  # both parts have the same share, which may be another engine's usual one
            usual = usual_shares(self.shares.totals["mlp"], local.shape[1] // 2, *self.shares.in_stage(rank))
            planned = [own + usual for own in planned]
        return match(local, full, [tuple(i if i == PADDING else section[i] for section, part in zip(
            self.sections.values(), share) for i in part) for share in zip(*planned)])

    def part_of(self, label: int) -> str | None:
        """The part to which a label belongs."""
        return next((part for part, section in self.sections.items() if label in section), None)

    def split(self) -> Split:
        """Find the cut, rank by rank."""
        parts, widths, sentences, wrong, reordered = [], [None] * self.sources.world_size, {}, [], False

        def ask(at: str) -> dict[int, Indices | None]:
            found = {}
            for source in self.sources.of(at + self.name)[:1]:
                for rank in self.sources.complete(source):
                    if (rows := self.sources.rows(source, rank, FEW)) is not None:
                        widths[rank] = rows.shape[1]
                        x = self.expected.input_of(source, at + self.before, rank)
                        found[rank] = None if x is None else self.labels(rows, x, at, rank)
            return found
        usual_order = f"[{'|'.join(self.sections)}]"
        for rank, labels in enumerate(self.shares.majority(ask)):
            own, usual = labels and self._by_label(labels), self.by_size(widths[rank], rank)
            apart = bool(own) and sum(own.values(), []) != [*range(widths[rank])]
            by_size = usual and (not own or apart and self.shares.usual_order)
            parts.append(usual if by_size else own)
            if not parts[rank] and widths[rank] is not None:
                wrong.append(f"{widths[rank]} columns on rank {rank}")
            reordered = reordered or apart
            sentences[f"cut as {usual_order} by size on rank {rank}; " if by_size else
                      f"columns of {self.name} on rank {rank} in an order of their own; " * apart] = None
        if wrong:
            self.sources.contradictions.append(Contradiction(
                f"{self.name} has {' and '.join(wrong)}; no cut into {usual_order} fits",
                about=GROUPS[self.groups[0]].behind))
        return Split(parts, widths, "".join(sentences), reordered)

    def _by_label(self, labels: Indices) -> Columns | None:
        """The columns of each part, by the labels. Padding belongs to the part before it."""
        parts: Columns = {part: [] for part in self.sections}
        part = next(iter(parts))
        for at, label in enumerate(labels):
            part = self.part_of(label) or part
            parts[part] += range(at * self.dim, (at + 1) * self.dim)
        return parts if all(parts.values()) else None

    def by_size(self, width: int | None, rank: int) -> Columns | None:
        """The cut of ``[q|k|v]`` by the plan's rule, or of all heads; gate and up are equal halves."""
        sizes = [[(width or 0) // 2] * 2] if self.name == "gate_up" else [
            [len(self.shares.planned[group][rank]) * self.dim for group in self.groups],
            [self.shares.totals[group] * self.dim for group in self.groups]]
        for cut in sizes:
            if sum(cut) == width:
                return dict(zip(self.sections, (part.tolist() for part in torch.arange(width).split(cut))))
        return None

"""Where a fused output is cut into q, k and v, or into gate and up.

The plan's order, ``[q|k|v]`` of the rank's heads, is the rule. Where the values stand in another order, that counts if
what follows was computed right with it, or if the parts lie in turns and what follows was not made of the usual order:
then a bug is behind it. Otherwise the engine wrote one order and read another, a bug here.
"""

from typing import NamedTuple

import torch

from tplab.align.arithmetic import activation
from tplab.align.check.match import GROUP_OF, GROUPS, PADDING, PARTS, Indices, match, near, usual_shares
from tplab.align.check.sources import FEW, SAMPLE
from tplab.align.recording import Contradiction

_AROUND = {"qkv": ("input_norm", "attn"), "gate_up": ("post_norm", "mlp_act")}  # what they are made from, what of them
Columns = dict[str, list[int]]  # by part


class Split(NamedTuple):
    """Per rank, the columns of a fused output that are q, k and v (gate and up), and how many it has; None for a rank
    where nothing fits."""

    parts: list[Columns | None]
    widths: list[int | None]
    sentence: str


class Fused:
    """One kind of fused output: ``"qkv"`` or ``"gate_up"``. An item is a head, or a column; its label is its number in
    all parts laid one behind the other."""

    def __init__(self, shares, name: str):
        self.shares, self.sources, self.evidence, self.name = shares, shares.sources, shares.evidence, name
        self.dim, self.groups = shares.dim(PARTS[name][0]), [GROUP_OF[part] for part in PARTS[name]]
        totals = [shares.totals[group] for group in self.groups]
        self.sections = {part: range(sum(totals[:i]), sum(totals[:i + 1])) for i, part in enumerate(PARTS[name])}
        self.before, self.after = _AROUND[name]

    def labels(self, rows: torch.Tensor, x: torch.Tensor, at: str, rank: int) -> Indices | None:
        """Which items a rank's output ``[rows, columns]`` of the input ``x`` consists of; None if of none."""
        if rows.shape[1] % self.dim:
            return None
        whole = torch.cat([self.evidence.of(at + part, x).flatten(1) for part in self.sections], 1)
        local, full = (tensor.unflatten(1, (-1, self.dim)) for tensor in (rows, whole))
        planned = [[self.shares.planned[group][rank]] for group in self.groups]
        if self.name == "gate_up":  # alike, so also the usual shares of another engine
            usual = usual_shares(self.shares.totals["mlp"], local.shape[1] // 2, *self.shares.seat(rank))
            planned = [own + usual for own in planned]
        return match(local, full, [tuple(i if i == PADDING else section[i] for section, part in zip(
            self.sections.values(), share) for i in part) for share in zip(*planned)])

    def part_of(self, label: int) -> str | None:
        """The part in which an item is."""
        return next((part for part, section in self.sections.items() if label in section), None)

    def split(self) -> Split:
        """Find the cut, rank by rank."""
        parts, widths, sentences, wrong = [], [None] * self.sources.world_size, {}, []

        def ask(at: str) -> dict[int, Indices | None]:
            found = {}
            for source in self.sources.of(at + self.name)[:1]:
                for rank in self.sources.complete(source):
                    if (rows := self.sources.rows(source, rank, FEW)) is not None:
                        widths[rank] = rows.shape[1]
                        x = self.evidence.input_of(source, at + self.before, rank)
                        found[rank] = None if x is None else self.labels(rows, x, at, rank)
            return found
        usual_order = f"[{'|'.join(self.sections)}]"
        for rank, labels in enumerate(self.shares.polled(ask)):
            part, usual, own = labels and self._by_label(labels), self.by_size(widths[rank], rank), ""
            if part and (found := sum(part.values(), [])) != sorted(found):
                in_turns = any(columns[-1] - columns[0] >= len(columns) for columns in part.values())
                follows, made_of_usual = self._behind(rank, usual)
                own = f"columns of {self.name} on rank {rank} in an order of their own" + (
                    ", which what follows confirms; " if follows else f"; what follows was not made of {usual_order}; ")
                if not (follows or in_turns and made_of_usual is False):
                    part, own = None, ""
            if not part and usual:
                part, own = usual, f"cut as {usual_order} by size on rank {rank}; "
            if not part and widths[rank] is not None:
                wrong.append(f"{widths[rank]} columns on rank {rank}")
            sentences[own] = None
            parts.append(part)
        if wrong:
            self.sources.contradictions.append(Contradiction(
                f"{self.name} has {' and '.join(wrong)}; no cut into {usual_order} fits",
                about=GROUPS[self.groups[0]].behind))
        return Split(parts, widths, "".join(sentences))

    def _by_label(self, labels: Indices) -> Columns | None:
        """The columns of each part, each head or column known by its values. Padding belongs to the part before."""
        parts: Columns = {part: [] for part in self.sections}
        part = next(iter(parts))
        for at, label in enumerate(labels):
            part = self.part_of(label) or part
            parts[part] += range(at * self.dim, (at + 1) * self.dim)
        return parts if all(parts.values()) else None

    def by_size(self, width: int | None, rank: int) -> Columns | None:
        """The cut of ``[q|k|v]`` that the plan's rule gives, or that of all heads; of two alike, equal halves."""
        sizes = [[(width or 0) // 2] * 2] if self.name == "gate_up" else [
            [len(self.shares.planned[group][rank]) * self.dim for group in self.groups],
            [self.shares.totals[group] * self.dim for group in self.groups]]
        for cut in sizes:
            if sum(cut) == width:
                return dict(zip(self.sections, (part.tolist() for part in torch.arange(width).split(cut))))
        return None

    def _behind(self, rank: int, usual: Columns | None) -> tuple[bool, bool | None]:
        """Whether the point behind is right, so that the engine must have cut as the values say; and whether the engine
        went on with the ``usual`` columns, None if nothing tells. Of gate and up the activation tells, of q, k and v
        the attention of first tokens, which are their values whatever rotation, scale and mask are."""
        first = [row for row, (_, position) in enumerate(self.sources.places[:SAMPLE]) if position == 0]
        follows, told = False, []
        for at in self.shares.sampled:
            for source, made in zip(self.sources.of(at + self.name)[:1], self.sources.of(at + self.after)[:1]):
                if not {rank} <= {*self.sources.complete(source)} & {*self.sources.complete(made)}:
                    continue
                rows, seen = (self.sources.rows(source, rank, FEW),
                              self.shares.read(made, at + self.after, None, rank, FEW))
                if rows is None or seen is None:
                    continue
                full = (self.evidence.reference(at + self.after) if self.name == "qkv" else
                        self.evidence.own(at + self.after, source, rank))
                follows = follows or full is not None and match(seen, full) is not None
                if usual and self.name == "gate_up":
                    gate, up = (rows[:, usual[part]].float() for part in self.sections)
                    told.append(near(seen, activation(self.shares.config.hidden_act)(gate) * up))
                elif usual and first:
                    values = rows[first][:, usual["v"]].unflatten(1, (-1, self.dim))
                    told.append(match(seen[first], values) is not None)
        return follows, any(told) if told else None

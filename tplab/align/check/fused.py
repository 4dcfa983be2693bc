"""Where a fused output is cut into q, k and v, or into gate and up.

The plan's order, ``[q|k|v]`` of the rank's heads, is the rule. Where the values stand in another order, that counts if
what follows was computed right with it, or if the parts lie in turns and what follows was not made of the usual order:
then a bug is behind it. Otherwise the engine wrote one order and read another, a bug here.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from tplab.align.arithmetic import activation
from tplab.align.check.match import GROUP_OF, GROUPS, PADDING, PARTS, Indices, match, near, usual_shares
from tplab.align.check.sources import FEW, SAMPLE, Source
from tplab.align.recording import Contradiction

_AROUND = {"qkv": ("input_norm", "attn"), "gate_up": ("post_norm", "mlp_act")}  # what they are made from, what of them


class Split(NamedTuple):
    """Per rank, the columns of a fused output that are q, k and v (gate and up), and how many it has; None for a rank
    where nothing fits."""

    parts: list[dict[str, list[int]] | None]
    widths: list[int | None]
    sentence: str


class Fused:
    """One kind of fused output: ``"qkv"`` or ``"gate_up"``. An item is a head, or a column; its label is its number in
    all parts laid one behind the other."""

    def __init__(self, shares, name: str):
        self.shares, self.sources, self.evidence, self.name = shares, shares.sources, shares.evidence, name
        self.parts, self.dim = PARTS[name], shares.dim(PARTS[name][0])
        self.groups = [GROUP_OF[part] for part in self.parts]
        self.totals = [shares.totals[group] for group in self.groups]
        starts = [sum(self.totals[:i]) for i in range(len(self.totals))]
        self.sections = {part: range(start, start + total) for part, start, total in zip(
            self.parts, starts, self.totals)}
        self.before, self.after = _AROUND[name]

    def labels(self, rows: torch.Tensor, x: torch.Tensor, at: str, rank: int) -> Indices | None:
        """Which items a rank's output ``[rows, columns]`` of the input ``x`` consists of; None if of none."""
        if rows.shape[1] % self.dim:
            return None
        whole = torch.cat([self.evidence.of(at + part, x).flatten(1) for part in self.parts], 1)
        local, full = (tensor.unflatten(1, (-1, self.dim)) for tensor in (rows, whole))
        planned = [[self.shares.planned[group][rank]] for group in self.groups]
        if len(self.parts) == 2:  # alike, so also the usual shares of another engine
            count = local.shape[1] // 2
            planned = [own + usual_shares(self.totals[0], count, *self.shares.seat(rank)) for own in planned]
        return match(local, full, [tuple(i if i == PADDING else section[i] for section, part in zip(
            self.sections.values(), share) for i in part) for share in zip(*planned)])

    def part_of(self, label: int) -> str | None:
        """The part in which an item is."""
        return next((part for part, section in self.sections.items() if label in section), None)

    def split(self) -> Split:
        """Find the cut, rank by rank."""
        parts, widths, sentences, wrong = [], [None] * self.sources.world_size, [], []

        def ask(at: str) -> dict[int, Indices | None]:
            found = {}
            for source in self.sources.of(at + self.name)[:1]:
                for rank in self.sources.complete(source):
                    if (rows := self.sources.rows(source, rank, FEW)) is not None:
                        widths[rank] = rows.shape[1]
                        x = self.evidence.input_of(source, at + self.before, rank)
                        found[rank] = None if x is None else self.labels(rows, x, at, rank)
            return found
        usual_order = f"[{'|'.join(self.parts)}]"
        for rank, labels in enumerate(self.shares.polled(ask)):
            part, usual = labels and self._by_label(labels), self.by_size(widths[rank], rank)
            own = f"columns of {self.name} on rank {rank} in an order of their own"
            if part and sum(part.values(), []) == sorted(sum(part.values(), [])):
                pass
            elif part and self._follows(rank):
                sentences.append(f"{own}, which what follows confirms; ")
            elif part and usual and any(c[-1] - c[0] >= len(c) for c in part.values()) and not self._made_of(
                    rank, usual):
                sentences.append(f"{own}; what follows was not made of {usual_order}; ")
            elif part := usual:
                sentences.append(f"cut as {usual_order} by size on rank {rank}; ")
            elif widths[rank] is not None:
                wrong.append(f"{widths[rank]} columns on rank {rank}")
            parts.append(part)
        if wrong:
            self.sources.contradictions.append(Contradiction(
                f"{self.name} has {' and '.join(wrong)}; no cut into {usual_order} fits",
                about=GROUPS[self.groups[0]].behind))
        return Split(parts, widths, "".join(dict.fromkeys(sentences)))

    def _by_label(self, labels: Indices) -> dict[str, list[int]] | None:
        """The columns of each part, each head or column known by its values. Padding belongs to the part before."""
        parts: dict[str, list[int]] = {part: [] for part in self.parts}
        part = self.parts[0]
        for at, label in enumerate(labels):
            part = self.part_of(label) or part
            parts[part] += range(at * self.dim, (at + 1) * self.dim)
        return parts if all(parts.values()) else None

    def by_size(self, width: int | None, rank: int) -> dict[str, list[int]] | None:
        """The cut of ``[q|k|v]`` that the plan's rule gives, or that of all heads; of two alike, equal halves."""
        sizes = [[(width or 0) // 2] * 2] if len(self.parts) == 2 else [
            [len(self.shares.planned[group][rank]) * self.dim for group in self.groups],
            [total * self.dim for total in self.totals]]
        for cut in sizes:
            if sum(cut) == width:
                return dict(zip(self.parts, (part.tolist() for part in torch.arange(width).split(cut))))
        return None

    def _behind(self, rank: int) -> Iterator[tuple[str, Source, torch.Tensor, torch.Tensor]]:
        """Layer by layer, the sampled rows of the fused output on a rank, and of the point that is made of it."""
        for at in self.shares.sampled:
            for source, made in zip(self.sources.of(at + self.name)[:1], self.sources.of(at + self.after)[:1]):
                if rank in self.sources.complete(source) and rank in self.sources.complete(made):
                    rows = self.sources.rows(source, rank, FEW)
                    seen = self.shares.read(made, at + self.after, None, rank, FEW)
                    if rows is not None and seen is not None:
                        yield at + self.after, source, rows, seen

    def _follows(self, rank: int) -> bool:
        """Whether the point behind is right, so that the engine must have cut as the values say."""
        for name, source, _, made in self._behind(rank):
            full = self.evidence.reference(name) if self.name == "qkv" else self.evidence.own(name, source, rank)
            if full is not None and match(made, full):
                return True
        return False

    def _made_of(self, rank: int, parts: dict[str, list[int]]) -> bool:
        """Whether the engine went on with these columns, or nothing tells: of gate and up, what the activation gives;
        of q, k and v, the attention of first tokens, which are their values, whatever rotation, scale and mask are."""
        first, told = [row for row, (_, at) in enumerate(self.sources.places[:SAMPLE]) if at == 0], []
        for _, _, rows, made in self._behind(rank):
            if self.name == "gate_up":
                gate, up = (rows[:, parts[part]].float() for part in self.parts)
                told.append(near(made, activation(self.shares.config.hidden_act)(gate) * up))
            elif first:
                values = rows[first][:, parts["v"]].unflatten(1, (-1, self.dim))
                told.append(match(made[first], values) is not None)
        return any(told) or not told

"""Where a fused output is cut into q, k and v, or into gate and up.

The plan's order, ``[q|k|v]`` of the rank's heads, is the rule. Where the values stand in another order, that counts if
what follows was computed right with it, or if the parts lie in turns and what follows was not made of the usual order:
then a bug is behind it. Otherwise the engine wrote one order and read another, a bug here.
"""

from dataclasses import dataclass

import torch

from tplab.align.arithmetic import activation
from tplab.align.check.layouts import PADDING, Indices, agreed, candidates, fit, near
from tplab.align.check.sources import FEW, SAMPLE


@dataclass(frozen=True)
class Split:
    """Per rank, ``{"q": columns, "k": columns, "v": columns}`` of the fused output (``gate`` and ``up``), and its
    ``widths``; None for a rank where nothing fits."""

    parts: list[dict[str, list[int]] | None]
    widths: list[int]
    sentence: str = ""
    contradiction: str | None = None


class Fused:
    """One kind of fused output: ``parts`` of items of ``dim`` columns, computed from the point ``before``, needed for
    the point ``after``. An item's label is its number in all parts laid one behind the other."""

    def __init__(self, shares, name: str, parts: tuple[str, ...], dim: int, before: str, after: str):
        self.shares, self.name, self.dim, self.before, self.after = shares, name, dim, before, after
        self.groups = {part: part if part in ("q", "k", "v") else "mlp" for part in parts}
        sizes = [shares.totals[group] for group in self.groups.values()]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.sections = {part: range(start, start + size) for part, start, size in zip(parts, starts, sizes)}

    def labels(self, rows: torch.Tensor, x: torch.Tensor, layer: int, rank: int) -> Indices | None:
        """Which items a rank's output ``[rows, columns]`` of the input ``x`` consists of; None if of none."""
        if rows.shape[1] % self.dim:
            return None
        whole = torch.cat([self.shares.evidence.of(layer, part, x).flatten(1) for part in self.sections], 1)
        local, full = (tensor.unflatten(1, (-1, self.dim)) for tensor in (rows, whole))
        return fit(local, full, self._usual(rank, local.shape[1]))

    def _usual(self, rank: int, count: int) -> list[Indices]:
        """The plan's share of every part; of two alike, also the usual shares of another engine."""
        planned = {part: [self.shares.planned[group][rank]] for part, group in self.groups.items()}
        if len(planned) == 2:
            for part, group in self.groups.items():
                planned[part] += candidates(self.shares.totals[group], count // 2, *self.shares.seat(rank))
        return [tuple(i if i == PADDING else section[i] for section, part in zip(self.sections.values(), share)
                      for i in part) for share in zip(*planned.values())]


def heads_in(shares) -> Fused:
    """What there is to know about ``qkv``."""
    return Fused(shares, "qkv", ("q", "k", "v"), shares.config.head_dim, "input_norm", "attn")


def columns_in(shares) -> Fused:
    """What there is to know about ``gate_up``."""
    return Fused(shares, "gate_up", ("gate", "up"), 1, "post_norm", "mlp_act")


def split(shares, fused: Fused) -> Split:
    """Find the cut of a fused output, rank by rank."""
    widths, votes, seen = [None] * shares.sources.world_size, [], None
    for at in shares.sampled:
        vote = [None] * shares.sources.world_size
        for source in shares.sources.of(at + fused.name)[:1]:
            for rank in shares.sources.complete(source):
                rows = shares.sources.rows(source, rank, FEW)
                if rows is not None:
                    seen, widths[rank] = source, rows.shape[1]
                    x = shares.own_input(source, at + fused.before, rank)
                    vote[rank] = None if x is None else fused.labels(rows, x, int(at.split(".")[1]), rank)
        votes.append(vote)
    if seen is None:
        return Split([None] * shares.sources.world_size, widths)
    found = agreed(votes)
    parts: list[dict | None] = []
    sentences, wrong = [], []
    for rank, width in enumerate(widths):
        if width is None:
            parts.append(None)
            continue
        labels = found[rank]
        part, usual = labels and _by_label(labels, fused), _by_size(width, fused, rank)
        names, own = "|".join(fused.sections), f"columns of {fused.name} on rank {rank} in an order of their own"
        if part and _in_order(part):
            pass
        elif part and _follows(fused, rank):
            sentences.append(f"{own}, which what follows confirms; ")
        elif part and usual and _in_turns(part) and not _made_of(fused, rank, usual):
            sentences.append(f"{own}; what follows was not made of [{names}]; ")
        else:
            part = usual
            if part:
                sentences.append(f"cut as [{names}] by size on rank {rank}; ")
            else:
                wrong.append(f"{width} columns on rank {rank}")
        parts.append(part)
    contradiction = f"{seen.pattern[0]} gives {' and '.join(wrong)}; no cut into [{'|'.join(fused.sections)}] fits"
    return Split(parts, widths, "".join(dict.fromkeys(sentences)), contradiction if wrong else None)


def _by_label(labels: Indices, fused: Fused) -> dict[str, list[int]] | None:
    """The columns of each part, each head or column known by its values. Padding belongs to the part before."""
    parts: dict[str, list[int]] = {part: [] for part in fused.sections}
    part = next(iter(parts))
    for at, label in enumerate(labels):
        part = next((which for which, section in fused.sections.items() if label in section), part)
        parts[part] += range(at * fused.dim, (at + 1) * fused.dim)
    return parts if all(parts.values()) else None


def _by_size(width: int, fused: Fused, rank: int) -> dict[str, list[int]] | None:
    """The cut of ``[q|k|v]`` that the plan's rule gives, or that of all heads; of two alike, equal halves."""
    sizes = [[width // 2] * 2] if len(fused.sections) == 2 else [
        [len(fused.shares.planned[group][rank]) * fused.dim for group in fused.groups.values()],
        [len(section) * fused.dim for section in fused.sections.values()]]
    for cut in sizes:
        if sum(cut) == width:
            starts = [sum(cut[:i]) for i in range(len(cut))]
            return {part: list(range(start, start + size)) for part, start, size in zip(fused.sections, starts, cut)}
    return None


def _in_order(parts: dict[str, list[int]]) -> bool:
    columns = [column for part in parts.values() for column in part]
    return columns == sorted(columns)


def _in_turns(parts: dict[str, list[int]]) -> bool:
    return any(columns[-1] - columns[0] >= len(columns) for columns in parts.values())


def _made_of(fused: Fused, rank: int, parts: dict[str, list[int]]) -> bool:
    """Whether the engine went on with these columns, or nothing tells: of gate and up, what the activation gives; of
    q, k and v, the attention of first tokens, which are their values, whatever rotation, scale and mask are."""
    shares, sources, told = fused.shares, fused.shares.sources, False
    first = [row for row, (_, position) in enumerate(sources.places[:SAMPLE]) if position == 0]
    for at in shares.sampled:
        for source, after in zip(sources.of(at + fused.name)[:1], sources.of(at + fused.after)[:1]):
            complete = rank in sources.complete(source) and rank in sources.complete(after)
            rows = sources.rows(source, rank, FEW) if complete else None
            if rows is None:
                continue
            if fused.after == "mlp_act":
                gate, up = (rows[:, parts[part]].float() for part in ("gate", "up"))
                made = sources.rows(after, rank, FEW)
                told = told or made is not None
                made_of = made is not None and near(made, activation(shares.config.hidden_act)(gate) * up)
            else:
                made = next(iter(sources.heads(after, rank, FEW).values()), None)
                told = told or made is not None and bool(first)
                values = rows[first][:, parts["v"]].unflatten(1, (-1, fused.dim))
                made_of = made is not None and bool(first) and fit(made[first], values, []) is not None
            if made_of:
                return True
    return not told


def _follows(fused: Fused, rank: int) -> bool:
    """Whether the point behind the fused one is right, so that the engine must have cut as the values say."""
    shares = fused.shares
    for at in shares.sampled:
        for source in shares.sources.of(at + fused.after)[:1]:
            if rank not in shares.sources.complete(source):
                continue
            if fused.after == "mlp_act":
                local = shares.sources.rows(source, rank, FEW)
                x = shares.own_input(shares.sources.of(at + fused.name)[0], at + fused.before, rank)
                full = None if x is None else shares.evidence.of(int(at.split(".")[1]), "mlp_act", x)
            else:
                local = next(iter(shares.sources.heads(source, rank, FEW).values()), None)
                full = shares.reference.point(at + fused.after)
            if local is not None and full is not None and fit(local, full, []) is not None:
                return True
    return False

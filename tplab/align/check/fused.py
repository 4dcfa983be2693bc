"""Where a fused output is cut into q, k and v, or into gate and up.

The plan's order, ``[q|k|v]`` of the rank's heads, is the rule. Where the values stand in another order, that counts
only if what follows was computed right with it: otherwise the engine wrote one order and read another, a bug.
"""

from dataclasses import dataclass

import torch

from tplab.align.check.layouts import PADDING, agreed, candidates, fit


@dataclass(frozen=True)
class Split:
    """Per rank, ``{"q": columns, "k": columns, "v": columns}`` of the fused output (``gate`` and ``up``), and its
    ``widths``; None for a rank where nothing fits."""

    parts: list[dict[str, list[int]] | None]
    widths: list[int]
    sentence: str = ""
    contradiction: str | None = None


def split_heads(shares) -> Split:
    """The cut of ``qkv``."""
    dim, q, kv = shares.config.head_dim, shares.totals["q"], shares.totals["k"]
    sections = {"q": range(q), "k": range(q, q + kv), "v": range(q + kv, q + 2 * kv)}

    def expected(layer: int, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([shares.evidence.heads(layer, which, x) for which in "qkv"], 1)

    def shifted(rank: int, count: int) -> list[tuple[int, ...]]:
        return [tuple(section[head] for which, section in sections.items() for head in shares.planned[which][rank])]

    return _split(shares, "qkv", dim, sections, "input_norm", expected, shifted, "attn")


def split_columns(shares) -> Split:
    """The cut of ``gate_up``."""
    inter = shares.totals["mlp"]
    sections = {"gate": range(inter), "up": range(inter, 2 * inter)}

    def expected(layer: int, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([shares.evidence.columns(layer, which, x) for which in ("gate", "up")], 1)[..., None]

    def shifted(rank: int, count: int) -> list[tuple[int, ...]]:
        halves = [shares.planned["mlp"][rank], *candidates(inter, count // 2, rank, shares.size)]
        return [(*half, *(i if i == PADDING else i + inter for i in half)) for half in halves]

    return _split(shares, "gate_up", 1, sections, "post_norm", expected, shifted, "mlp_act")


def _split(shares, fused: str, dim: int, sections: dict[str, range], before: str, expected, shifted, after: str
           ) -> Split:
    widths, votes, seen = [None] * shares.size, [], None
    for at in shares.sampled:
        vote = [None] * shares.size
        for source in shares.sources.of(at + fused)[:1]:
            for rank in shares.sources.complete(source):
                rows = shares.sources.rows(source, rank, True)
                if rows is None:
                    continue
                seen, widths[rank] = source, rows.shape[1]
                x = shares.own_input(source, at + before, rank)
                if x is not None and rows.shape[1] % dim == 0:
                    local = rows.unflatten(1, (-1, dim))
                    vote[rank] = fit(local, expected(int(at.split(".")[1]), x), shifted(rank, local.shape[1]))
        votes.append(vote)
    if seen is None:
        return Split([None] * shares.size, widths)
    found = agreed(votes)
    parts: list[dict | None] = []
    sentences, wrong = [], []
    for rank, width in enumerate(widths):
        if width is None:
            parts.append(None)
            continue
        labels = found[rank]
        part = labels and _by_label(labels, sections, dim)
        names = "|".join(sections)
        if part and (_in_order(part) or _follows(shares, part, fused, after, rank)):
            if not _in_order(part):
                sentences.append(f"columns of {fused} on rank {rank} in an order of their own, which what follows "
                                 "confirms; ")
        else:
            part = _by_size(shares, width, sections, dim, rank)
            if part:
                sentences.append(f"cut as [{names}] by size on rank {rank}; ")
            else:
                wrong.append(f"{width} columns on rank {rank}")
        parts.append(part)
    contradiction = f"{seen.pattern[0]} gives {' and '.join(wrong)}; no cut into [{'|'.join(sections)}] fits"
    return Split(parts, widths, "".join(dict.fromkeys(sentences)), contradiction if wrong else None)


def _by_label(labels: tuple[int, ...], sections: dict[str, range], dim: int) -> dict[str, list[int]] | None:
    """The columns of each part, each head or column known by its values. Padding belongs to the part before."""
    parts: dict[str, list[int]] = {which: [] for which in sections}
    part = next(iter(sections))
    for at, label in enumerate(labels):
        part = next((which for which, section in sections.items() if label in section), part)
        parts[part] += range(at * dim, (at + 1) * dim)
    return parts if all(parts.values()) else None


def _by_size(shares, width: int, sections: dict[str, range], dim: int, rank: int) -> dict[str, list[int]] | None:
    """The cut of ``[q|k|v]`` that the plan's rule gives, or that of all heads, or two equal halves."""
    sizes = [[len(shares.planned[which if which in "qkv" else "mlp"][rank]) * dim for which in sections],
             [len(section) * dim for section in sections.values()]]
    if len(sections) == 2 and width % 2 == 0:
        sizes.append([width // 2] * 2)
    for cut in sizes:
        if sum(cut) == width:
            starts = [sum(cut[:i]) for i in range(len(cut))]
            return {which: list(range(start, start + size)) for which, start, size in zip(sections, starts, cut)}
    return None


def _in_order(parts: dict[str, list[int]]) -> bool:
    columns = [column for part in parts.values() for column in part]
    return columns == sorted(columns)


def _follows(shares, part: dict[str, list[int]], fused: str, after: str, rank: int) -> bool:
    """Whether the point behind the fused one is right, so that the engine must have cut as the values say."""
    for at in shares.sampled:
        for source in shares.sources.of(at + after)[:1]:
            if rank not in shares.sources.complete(source):
                continue
            if fused == "gate_up":
                local = shares.sources.rows(source, rank, True)
                x = next((shares.own_input(s, at + "post_norm", rank) for s in shares.sources.of(at + fused)), None)
                full = None if x is None else shares.evidence.columns(int(at.split(".")[1]), "mlp_act", x)
            else:
                local = next(iter(shares.sources.heads(source, rank, True).values()), None)
                full = shares.reference.point(at + after)
            if local is not None and full is not None and fit(local, full, []) is not None:
                return True
    return False

"""How NaN spreads: token by token, point by point, rank by rank."""

from collections.abc import Mapping, Sequence

import matplotlib
import matplotlib.colors
import matplotlib.patches

from tplab.show.figures.style import FAINT, INK, NOTHING, ORANGE, Picture, picture, styled


@styled
def nan_map(tokens: Sequence[str], ranks: Sequence[Mapping], layers: int = 2, title: str | None = None) -> Picture:
    """Where numbers are NaN: one panel per rank, tokens down.

    Across: the trace points of the first layers, the final norm and the logits, in the order of the computation.
    A cell is empty, orange (some of the token's numbers are NaN) or black (all of them are).

    ``tokens``: their texts; few are easier to see. ``ranks``: for each rank ``{trace point: [tokens] shares}`` of
    numbers that are NaN. ``layers``: how many are shown.

        >>> figures.nan_map(*figures.trace_nan(model, prompt, [fault("nan_mask")]))
    """
    kept = [name for name in ranks[0] if not name.startswith("layers.") or int(name.split(".")[1]) < layers]
    figure = _draw([{name: of_rank[name] for name in kept} for of_rank in ranks], tokens)
    return figure.finished(title or _finding(ranks), (
        "numbers lost to NaN, token by token, along the forward pass. "
        + "; ".join(f"rank {rank}: {_describe(of_rank)}" for rank, of_rank in enumerate(ranks)) + "."))


def _draw(lost, tokens) -> Picture:
    import torch

    names, ranks = list(lost[0]), len(lost)
    labelled = len(tokens) <= 16
    figure, axes = picture(9.0, 1.5 + ranks * (0.17 * len(tokens) + 0.4 if labelled else 2.2), nrows=ranks, sharex=True,
                           squeeze=False)
    shades = matplotlib.colors.ListedColormap([NOTHING, ORANGE, INK])
    for rank, (ax, of_rank) in enumerate(zip(axes[:, 0], lost)):
        share = torch.stack([of_rank[name] for name in names], 1)
        ax.imshow(((share > 0).int() + (share == 1).int()).numpy(), cmap=shades, vmin=0, vmax=2, aspect="auto")
        ax.set_ylabel(f"rank {rank}")
        if labelled:
            ax.set_yticks(range(len(tokens)), tokens, fontsize=8)
        ax.set_xticks([x - 0.5 for x in range(1, len(names))], minor=True)
        ax.set_yticks([y - 0.5 for y in range(1, len(tokens))], minor=True)
        ax.grid(which="minor", color="white", lw=0.8)
        ax.tick_params(which="minor", length=0)
        for x in _borders(names):
            ax.axvline(x - 0.5, color=FAINT, lw=1.4)
        ax.spines[:].set(visible=True, color=FAINT)
    _name_points(axes[0, 0], axes[-1, 0], names)
    figure.legend(handles=[matplotlib.patches.Patch(color=ORANGE, label="some of the token's numbers are NaN"),
                           matplotlib.patches.Patch(color=INK, label="all of them are")],
                  loc="outside lower left", ncols=2)
    return figure


def _borders(names) -> list[int]:
    homes = [name.rpartition(".")[0] for name in names]
    return [x for x in range(1, len(names)) if homes[x] != homes[x - 1]]


def _name_points(top, bottom, names) -> None:
    bottom.set_xticks(range(len(names)), [name.rpartition(".")[2] for name in names], rotation=90, fontsize=9)
    starts = [0, *_borders(names), len(names)]
    for start, stop in zip(starts, starts[1:]):
        if names[start].startswith("layers."):
            top.annotate(f"layer {names[start].split('.')[1]}", ((start + stop - 1) / 2, 1), (0, 4), ha="center",
                         xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=10)


def _first(of_rank) -> tuple[str, int] | None:  # the first point with NaN, and in how many tokens
    return next(((name, int((share > 0).sum())) for name, share in of_rank.items() if share.any()), None)


def _everywhere(of_rank) -> str | None:  # the first point at which every token has lost all its numbers
    return next((name for name, share in of_rank.items() if (share == 1).all()), None)


def _describe(of_rank) -> str:
    first, everywhere = _first(of_rank), _everywhere(of_rank)
    if first is None:
        return "none"
    count = len(next(iter(of_rank.values())))
    return (f"first at {first[0]}, in {first[1]} of {count} tokens, "
            + (f"everything from {everywhere} on" if everywhere else "never everything"))


def _finding(lost) -> str:
    firsts = [first for of_rank in lost if (first := _first(of_rank))]
    if not firsts:
        return "No NaN on any rank"
    names = list(lost[0])
    begin = min((name for name, _ in firsts), key=names.index)
    ends = [_everywhere(of_rank) for of_rank in lost]
    end = "" if None in ends else f", and nothing is left from {max(ends, key=names.index)} on"
    return f"NaN begins at {begin}{end}"

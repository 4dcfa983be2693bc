"""Figures of notebook 01: what a mask does to the scores, and how NaN spreads."""

from collections.abc import Mapping, Sequence

import matplotlib
import matplotlib.colors
import matplotlib.lines
import matplotlib.patches

from tplab.align.gather import trace_on_rank
from tplab.align.run import check_prompts
from tplab.checkpoint import open_checkpoint
from tplab.errors import TplabError
from tplab.faults import as_patches
from tplab.model.dtypes import parse_dtype
from tplab.patch import applied
from tplab.pool import shared_pool
from tplab.shard import ShardPlan
from tplab.show.figures.style import FAINT, INK, NOTHING, ORANGE, RED, Picture, picture, styled


@styled
def mask_figure(tables: Mapping, tokens=None, title: str | None = None, what: str = "score") -> Picture:
    """Scores (or softmax weights) of one head, one panel per entry: numbers as shades, the rest as marks.

    A hidden entry (-inf) is hatched grey, NaN is a red cross on white, +inf an arrow. All panels share one scale.
    ``tables``: ``{label: tensor}``, each ``[queries, keys]``. ``tokens``: the keys' texts, written along the axes where
    there are at most 16. ``what``: what the numbers are, ``"score"`` or ``"weight"``.

        >>> mask_figure({"times -inf": scores + torch.triu(ones) * -inf, "masked_fill": mask_scores(scores, mask)})
    """
    import torch

    tables = {label: torch.as_tensor(table).detach().double() for label, table in tables.items()}
    if not tables or any(table.dim() != 2 for table in tables.values()):
        shapes = ", ".join(f"{label}: {list(table.shape)}" for label, table in tables.items()) or "nothing"
        raise TplabError(f"a heat map needs tensors [queries, keys], one head each; there is {shapes}")
    finite = torch.cat([table[torch.isfinite(table)] for table in tables.values()])
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)
    figure, axes = picture(9.0 if len(tables) > 1 else 6.0, 4.4, ncols=len(tables), squeeze=False)
    for ax, (label, table) in zip(axes[0], tables.items()):
        shades = _draw_scores(ax, table, low, high, tokens)
        ax.set_title(label, fontsize=11, fontweight="normal")
    axes[0][0].set_ylabel("query")
    if finite.numel():
        figure.colorbar(shades, ax=axes, shrink=0.75, label=what)
    figure.legend(handles=_legend(tables), loc="outside lower left", ncols=3)
    return figure.finished(title or _finding_scores(tables), (
        f"attention {what}s, queries down, keys across. " + " ".join(
        f"{label}: {_describe_scores(table)}." for label, table in tables.items())))


def _draw_scores(ax, table, low, high, tokens):
    import torch

    queries, keys = table.shape
    shades = ax.imshow(torch.where(torch.isfinite(table), table, torch.nan).numpy(), cmap="cividis", vmin=low,
                       vmax=high)
    for q, k in torch.isneginf(table).nonzero().tolist():
        ax.add_patch(matplotlib.patches.Rectangle((k - 0.5, q - 0.5), 1, 1, facecolor="#e8e8e8", edgecolor="#b5b5b5",
                                                  hatch="//", lw=0))
    size = min(110.0, (190 / max(queries, keys)) ** 2 / 3)
    for lost, marker in ((torch.isnan(table), "x"), (torch.isposinf(table), "^")):
        rows, columns = lost.nonzero(as_tuple=True)
        ax.scatter(columns.numpy(), rows.numpy(), marker=marker, s=size, color=RED, lw=1.6)
    ax.set_xlabel("key")
    if tokens is not None and len(tokens) == keys <= 16:
        ax.set_xticks(range(keys), tokens, rotation=45, ha="right", rotation_mode="anchor", fontsize=9)
        ax.set_yticks(range(queries), tokens[-queries:], fontsize=9)
    else:
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.yaxis.get_major_locator().set_params(integer=True)
    ax.spines[:].set(visible=True, color=FAINT)
    return shades


def _kinds(table) -> dict:
    """Where a table holds what."""
    import torch

    return {"numbers": torch.isfinite(table), "hidden (-inf)": torch.isneginf(table), "NaN": torch.isnan(table),
            "+inf": torch.isposinf(table)}


def _legend(tables) -> list:
    handles = {"hidden (-inf)": matplotlib.patches.Patch(facecolor="#e8e8e8", edgecolor="#b5b5b5", hatch="///"),
               "NaN": matplotlib.lines.Line2D([], [], color=RED, marker="x", lw=0, mew=1.6, ms=8),
               "+inf": matplotlib.lines.Line2D([], [], color=RED, marker="^", lw=0, ms=8)}
    for what, handle in handles.items():
        handle.set_label(what)
    return [handle for what, handle in handles.items() if any(_kinds(table)[what].any() for table in tables.values())]


def _describe_scores(table) -> str:
    details = [f"{int(entries.sum())} {what}" for what, entries in _kinds(table).items() if entries.any()]
    return f"of {table.numel()} entries, " + ", ".join(details)


def _finding_scores(tables) -> str:
    lost = {label: int(_kinds(table)["NaN"].sum()) for label, table in tables.items()}
    bad = [f"“{label}” turns {count} of {tables[label].numel()} entries into NaN"
           for label, count in lost.items() if count]
    return "; ".join(bad) or "No NaN: what is not hidden is a number"


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


def trace_nan(model, prompt, patches=(), *, tensor_parallel_size: int = 2, dtype: str = "float32"):
    """Run the model over one prompt on the ranks, with the arguments of :func:`tplab.align.align`; returns the tokens'
    texts, and for each rank ``{trace point: [tokens] shares}`` of numbers that are NaN."""
    ckpt = open_checkpoint(model)
    (ids,) = check_prompts(ckpt, [prompt])
    plan = ShardPlan.from_config(ckpt.config, tensor_parallel_size)
    with applied(*as_patches(patches)):
        lost = shared_pool(tensor_parallel_size).run(_lost_on_rank, ckpt, plan, parse_dtype(dtype), ids)
    return [ckpt.tokenizer().decode([token]) for token in ids], lost


def _lost_on_rank(ckpt, plan, dtype, ids) -> dict:
    points = trace_on_rank(ckpt, plan, dtype, [ids])[0]
    return {name: tensor.isnan().flatten(1).double().mean(1) for name, tensor in points.items()}

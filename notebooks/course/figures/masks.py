"""Attention scores or weights as a heat map in which hidden, infinite and lost entries cannot be mistaken."""

from collections.abc import Mapping

import matplotlib
import matplotlib.lines
import matplotlib.patches

from tplab.show.figures.style import FAINT, RED, Picture, picture, styled
from tplab.show.phrases import ShowError


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
        raise ShowError(f"a heat map needs tensors [queries, keys], one head each; there is {shapes}")
    finite = torch.cat([table[torch.isfinite(table)] for table in tables.values()])
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)
    figure, axes = picture(9.0 if len(tables) > 1 else 6.0, 4.4, ncols=len(tables), squeeze=False)
    for ax, (label, table) in zip(axes[0], tables.items()):
        shades = _draw(ax, table, low, high, tokens)
        ax.set_title(label, fontsize=11, fontweight="normal")
    axes[0][0].set_ylabel("query")
    if finite.numel():
        figure.colorbar(shades, ax=axes, shrink=0.75, label=what)
    figure.legend(handles=_legend(tables), loc="outside lower left", ncols=3)
    return figure.finished(title or _finding(tables), (
        f"attention {what}s, queries down, keys across. " + " ".join(
        f"{label}: {_describe(table)}." for label, table in tables.items())))


def _draw(ax, table, low, high, tokens):
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


def _describe(table) -> str:
    details = [f"{int(entries.sum())} {what}" for what, entries in _kinds(table).items() if entries.any()]
    return f"of {table.numel()} entries, " + ", ".join(details)


def _finding(tables) -> str:
    lost = {label: int(_kinds(table)["NaN"].sum()) for label, table in tables.items()}
    bad = [f"“{label}” turns {count} of {tables[label].numel()} entries into NaN"
           for label, count in lost.items() if count]
    return "; ".join(bad) or "No NaN: what is not hidden is a number"

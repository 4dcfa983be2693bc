"""Figures of notebook 01: what a mask does to the scores, and how NaN spreads."""

from collections.abc import Mapping, Sequence

import torch
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

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

HIDDEN = "#dddddd"


@styled
def mask_figure(tables: Mapping, tokens: Sequence[str], title: str | None = None) -> Picture:
    """Scores of one head, one panel per entry: numbers as shades, the rest as marks, on one scale.

    A hidden entry (-inf) is grey, NaN is a red cross on white, +inf an arrow. ``tables``: ``{label: tensor}``, each
    ``[queries, keys]``. ``tokens``: the keys' texts.

        >>> mask_figure({"times -inf": scores + mask * -inf, "masked_fill": mask_scores(scores, mask)}, words)
    """
    tables = {label: torch.as_tensor(table).detach().double() for label, table in tables.items()}
    if not tables or any(table.dim() != 2 for table in tables.values()):
        shapes = ", ".join(f"{label}: {list(table.shape)}" for label, table in tables.items()) or "nothing"
        raise TplabError(f"a heat map needs tensors [queries, keys], one head each; there is {shapes}")
    finite = torch.cat([table[torch.isfinite(table)] for table in tables.values()])
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (0.0, 1.0)
    figure, axes = picture(9.0 if len(tables) > 1 else 6.0, 4.4, ncols=len(tables), squeeze=False)
    legend = {"hidden (-inf)": Patch(color=HIDDEN)}
    for ax, (label, table) in zip(axes[0], tables.items()):
        ax.imshow(torch.isneginf(table).numpy(), cmap=ListedColormap(["white", HIDDEN]), vmin=0, vmax=1)
        shades = ax.imshow(torch.where(torch.isfinite(table), table, torch.nan).numpy(), cmap="cividis", vmin=low,
                           vmax=high)
        for what, marker in (("NaN", "x"), ("+inf", "^")):
            rows, columns = _kinds(table)[what].nonzero(as_tuple=True)
            if len(rows):
                legend[what] = ax.scatter(columns.numpy(), rows.numpy(), marker=marker, s=80, color=RED, lw=1.6)
        ax.set_title(label, fontsize=11, fontweight="normal")
        ax.set_xticks(range(table.shape[1]), tokens, rotation=45, ha="right", rotation_mode="anchor", fontsize=9)
        ax.set_yticks(range(table.shape[0]), tokens[-table.shape[0]:], fontsize=9)
        ax.set_xlabel("key")
        ax.spines[:].set(visible=True, color=FAINT)
    axes[0][0].set_ylabel("query")
    if finite.numel():
        figure.colorbar(shades, ax=axes, shrink=0.75, label="score")
    figure.legend(legend.values(), legend, loc="outside lower left", ncols=3)
    bad = [f"“{label}” turns {count} of {table.numel()} entries into NaN"
           for label, table in tables.items() if (count := int(torch.isnan(table).sum()))]
    details = {label: ", ".join(f"{int(entries.sum())} {what}" for what, entries in _kinds(table).items()
                                if entries.any()) for label, table in tables.items()}
    return figure.finished(title or "; ".join(bad) or "No NaN: what is not hidden is a number", (
        "attention scores, queries down, keys across. " + " ".join(
            f"{label}: of {tables[label].numel()} entries, {said}." for label, said in details.items())))


def _kinds(table: torch.Tensor) -> dict[str, torch.Tensor]:
    """Where a table holds what."""
    return {"numbers": torch.isfinite(table), "hidden (-inf)": torch.isneginf(table), "NaN": torch.isnan(table),
            "+inf": torch.isposinf(table)}


@styled
def nan_map(tokens: Sequence[str], ranks: Sequence[Mapping], layers: int = 2) -> Picture:
    """Where numbers are NaN: one panel per rank, tokens down.

    Across: the trace points of the first layers, the final norm and the logits, in the order of the computation.
    A cell is empty, orange (some of the token's numbers are NaN) or black (all of them are).

    ``tokens``: their texts; few are easier to see. ``ranks``: for each rank ``{trace point: [tokens] shares}`` of
    numbers that are NaN. ``layers``: how many are shown.

        >>> figures.nan_map(*figures.trace_nan(model, prompt, [fault("nan_mask")]))
    """
    names = [name for name in ranks[0] if not name.startswith("layers.") or int(name.split(".")[1]) < layers]
    figure, axes = picture(9.0, 2.1 + len(ranks) * (0.17 * len(tokens) + 0.4), nrows=len(ranks), sharex=True,
                           squeeze=False)
    shades = ListedColormap([NOTHING, ORANGE, INK])
    for rank, (ax, of_rank) in enumerate(zip(axes[:, 0], ranks)):
        share = torch.stack([of_rank[name] for name in names], 1)
        ax.pcolormesh(((share > 0).int() + (share == 1).int()).numpy(), cmap=shades, vmin=0, vmax=2, edgecolor="white",
                      lw=0.8)
        ax.invert_yaxis()
        ax.set_ylabel(f"rank {rank}")
        ax.set_yticks([row + 0.5 for row in range(len(tokens))], tokens, fontsize=8)
    axes[-1, 0].set_xticks([column + 0.5 for column in range(len(names))], [
        name.replace("layers.", "layer ").replace(".", ": ") for name in names], rotation=90, fontsize=8)
    figure.legend(handles=[Patch(color=ORANGE, label="some of the token's numbers are NaN"),
                           Patch(color=INK, label="all of them are")], loc="outside lower left", ncols=2)
    firsts, ends = ([_first(of_rank, test) for of_rank in ranks]
                    for test in (lambda share: share.any(), lambda share: (share == 1).all()))
    began, order = [name for name in firsts if name], list(ranks[0])
    title = f"NaN begins at {min(began, key=order.index)}" if began else "No NaN on any rank"
    if began and None not in ends:
        title += f", and nothing is left from {max(ends, key=order.index)} on"
    details = [f"rank {rank}: " + ("none" if first is None else (
        f"first at {first}, in {int((ranks[rank][first] > 0).sum())} of {len(tokens)} tokens, "
        + (f"everything from {end} on" if end else "never everything")))
        for rank, (first, end) in enumerate(zip(firsts, ends))]
    return figure.finished(title, (
        f"numbers lost to NaN, token by token, along the forward pass. {'; '.join(details)}."))


def _first(of_rank: Mapping, test) -> str | None:
    """The first trace point whose shares pass."""
    return next((name for name, share in of_rank.items() if test(share)), None)


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

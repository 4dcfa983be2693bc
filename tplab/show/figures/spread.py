"""How NaN spreads: token by token, point by point, rank by rank."""

import matplotlib
import matplotlib.colors
import matplotlib.patches

from tplab.show.figures.style import FAINT, INK, NOTHING, ORANGE, RC, Picture, entitle, picture


def nan_map(model, prompt, patches=(), *, tensor_parallel_size: int = 2, dtype: str = "float32", layers: int = 2,
            title: str | None = None) -> Picture:
    """Run the model on the ranks and draw where its numbers are lost to NaN: one panel per rank, tokens down.

    Across stand the trace points of the first layers, the final norm and the logits, in the order of the computation.
    A cell is empty, orange (some of the token's numbers are NaN) or black (all of them are).

    Args:
        model: a model's name or an opened checkpoint.
        prompt: a text or a list of token ids; few tokens are easier to see.
        patches: what to break, as for :func:`tplab.align.align`.
        tensor_parallel_size, dtype: as there.
        layers: how many layers to show.
        title: the finding; written from the numbers if not given.

        >>> show.nan_map(model, prompt, [fault("nan_mask")])
    """
    from tplab.align.run import check_prompts
    from tplab.checkpoint import open_checkpoint
    from tplab.model.dtypes import parse_dtype
    from tplab.patch import applied, as_patches
    from tplab.pool import shared_pool
    from tplab.shard import ShardPlan

    ckpt = open_checkpoint(model) if isinstance(model, str) else model
    tokenizer = ckpt.tokenizer()
    (ids,) = check_prompts(ckpt, [prompt])
    plan = ShardPlan.from_config(ckpt.config, tensor_parallel_size)
    with applied(*as_patches(patches)):
        lost = shared_pool(tensor_parallel_size).run(_lost_on_rank, ckpt, plan, parse_dtype(dtype), ids)
    kept = [name for name in lost[0] if not name.startswith("layers.") or int(name.split(".")[1]) < layers]
    figure = _draw([{name: of_rank[name] for name in kept} for of_rank in lost], [tokenizer.decode([t]) for t in ids])
    with matplotlib.rc_context(RC):
        entitle(figure, title or _finding(lost))
    figure.words = ("Figure: numbers lost to NaN, token by token, along the forward pass. "
                    + "; ".join(f"rank {rank}: {_words(of_rank)}" for rank, of_rank in enumerate(lost)) + ".")
    return figure


def _lost_on_rank(ckpt, plan, dtype, ids) -> dict:
    """Runs on every rank: for each trace point, ``[tokens]``, the share of the token's numbers that are NaN."""
    import torch

    from tplab.align.gather import trace_on_rank

    points = trace_on_rank(ckpt, plan, dtype, [ids])[0]
    return {name: torch.isnan(tensor).flatten(1).double().mean(1) for name, tensor in points.items()}


def _draw(lost, tokens) -> Picture:
    import torch

    names, ranks = list(lost[0]), len(lost)
    labelled = len(tokens) <= 16
    figure, axes = picture(9.0, 1.5 + ranks * (0.17 * len(tokens) + 0.4 if labelled else 2.2), nrows=ranks, sharex=True,
                           squeeze=False)
    shades = matplotlib.colors.ListedColormap([NOTHING, ORANGE, INK])
    with matplotlib.rc_context(RC):
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
    """Where a layer begins or ends."""
    homes = [name.rpartition(".")[0] for name in names]
    return [x for x in range(1, len(names)) if homes[x] != homes[x - 1]]


def _name_points(top, bottom, names) -> None:
    bottom.set_xticks(range(len(names)), [name.rpartition(".")[2] for name in names], rotation=90, fontsize=9)
    starts = [0, *_borders(names), len(names)]
    for start, stop in zip(starts, starts[1:]):
        if names[start].startswith("layers."):
            top.annotate(f"layer {names[start].split('.')[1]}", ((start + stop - 1) / 2, 1), (0, 4), ha="center",
                         xycoords=("data", "axes fraction"), textcoords="offset points", fontsize=10)


def _first(of_rank) -> tuple[str, int] | None:
    """The first point with NaN, and in how many tokens."""
    return next(((name, int((share > 0).sum())) for name, share in of_rank.items() if share.any()), None)


def _everywhere(of_rank) -> str | None:
    """The first point at which every token has lost all its numbers."""
    return next((name for name, share in of_rank.items() if (share == 1).all()), None)


def _words(of_rank) -> str:
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

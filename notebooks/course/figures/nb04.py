"""Figures of notebook 04: which head a rank holds."""

from collections.abc import Mapping, Sequence

from tplab.errors import TplabError
from tplab.show.drawings.svg import colour
from tplab.show.figures.style import RED, Picture, picture, styled

ALIKE = 1e-3  # relative to the whole's largest number


@styled
def heads_figure(whole, held: Mapping[str, Sequence], title: str | None = None) -> Picture:
    """Hugging Face's heads, and what each rank holds: tokens across, a head's numbers down.

    ``whole``: ``[tokens, heads, head_dim]``. ``held``: ``{label: [a rank's [tokens, heads here, head_dim], …]}``. Each
    picture has the frame of the head that it equals.

        >>> figures.heads_figure(keys, {"right": per_rank, "modulo": others})
    """
    if whole.dim() != 3 or not held or any(x.dim() != 3 for ranks in held.values() for x in ranks):
        raise TplabError("a figure of heads needs tensors [tokens, heads, head_dim]")
    columns = {"Hugging Face": [("", head, whole[:, head]) for head in range(whole.shape[1])]}
    columns |= {label: [(f"rank {rank}: ", _same(x[:, here], whole), x[:, here]) for rank, x in enumerate(ranks)
                        for here in range(x.shape[1])] for label, ranks in held.items()}
    rows, low, high = max(map(len, columns.values())), whole.min().item(), whole.max().item()
    figure, axes = picture(2.4 * len(columns), 1.15 * rows + 0.9, nrows=rows, ncols=len(columns), squeeze=False)
    for column, (label, pictures) in enumerate(columns.items()):
        for row in range(rows):
            ax = axes[row][column]
            if row >= len(pictures):
                ax.set_axis_off()
                continue
            who, head, numbers = pictures[row]
            ax.imshow(numbers.T.float().numpy(), cmap="cividis", vmin=low, vmax=high, aspect="auto")
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set(visible=True, lw=4, color=RED if head is None else colour(head)[0])
            above = "" if row else f"{label}\n"
            ax.set_title(above + who + _named(head), fontsize=10, fontweight="normal", pad=5)
    return figure.finished(title or "What each rank holds, in the colour of the head that it is", (
        "what each rank holds of the KV heads. " + "; ".join(
        f"{label}: " + ", ".join(who.replace(":", "") + _named(head) for who, head, _ in pictures)
        for label, pictures in columns.items()) + "."))


def _same(x, whole) -> int | None:
    """The head that has these numbers; None if no head has them."""
    gaps = [(x - whole[:, head]).abs().max().item() for head in range(whole.shape[1])]
    return gaps.index(min(gaps)) if min(gaps) <= ALIKE * whole.abs().max().item() else None


def _named(head: int | None) -> str:
    return "no head's numbers" if head is None else f"head {head}"

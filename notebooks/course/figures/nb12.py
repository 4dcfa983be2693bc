"""Notebook 12: which experts tokens go to."""

import math
from collections.abc import Mapping, Sequence

from tplab.errors import TplabError
from tplab.show.figures.style import Picture, picture, styled


@styled
def routes_figure(routes: Mapping[str, tuple], words: Sequence[str], num_experts: int, title: str) -> Picture:
    """A panel for each router: experts from top to bottom, tokens from left to right, the darker the heavier. What is
    not chosen is white.

    ``routes``: ``{label: (weights, ids)}``, both ``[tokens, top_k]``. ``words``: the tokens' texts.

        >>> figures.routes_figure({"layer 0": (weights[0], ids[0])}, words, 8, "Two experts do nearly all of the work")
    """
    if not routes or any(ids.shape[0] != len(words) for _, ids in routes.values()):
        raise TplabError("give {label: (weights, ids)}, with a row for each word")
    figure, axes = picture(9.6, 0.9 + len(routes) * (0.5 + 0.17 * num_experts), nrows=len(routes), sharex=True,
                           squeeze=False)
    counts = []
    for ax, (label, (weights, ids)) in zip(axes.flat, routes.items()):
        table = weights.new_full((len(words), num_experts), math.nan).scatter(1, ids, weights).T
        ax.imshow(table.numpy(), cmap="Blues", vmin=-0.3, vmax=1, aspect="auto")
        ax.set_yticks(range(num_experts), range(num_experts), fontsize=8)
        ax.set_ylabel(f"{label}\nexpert", fontsize=9)
        ax.set_xticks(range(len(words)), [word.strip() or "␣" for word in words], rotation=90, fontsize=8)
        ax.set_yticks([row - 0.5 for row in range(1, num_experts)], minor=True)
        ax.grid(axis="y", which="minor")
        ax.tick_params(which="both", length=0)
        counts.append(f"{label}: " + ", ".join(f"{int((~table[row].isnan()).sum())}" for row in range(num_experts)))
    return figure.finished(title, (
        f"the experts of {len(words)} tokens, darker where the weight is larger. Tokens of "
        f"experts 0 to {num_experts - 1} in {'; '.join(counts)}."))

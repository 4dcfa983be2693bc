"""Figures of notebook 14: two answers to one prompt, how near the tie was, one sum in many orders."""

import math
from collections.abc import Mapping, Sequence

import torch
from matplotlib.ticker import MaxNLocator, NullLocator

from course.figures.texts import draw_texts
from tplab.checks import counted
from tplab.errors import TplabError
from tplab.show.figures.style import INK, RED, Picture, looks, picture, styled


@styled
def texts_figure(texts: Mapping[str, Sequence[str]], title: str) -> Picture:
    """Texts below each other, ``{label: its tokens}``; what follows the first difference is in another colour.

        >>> figures.texts_figure({"one rank": ["the", " fox"], "two ranks": ["the", " dog"]}, "Two answers")
    """
    if not texts or not all(texts.values()):
        raise TplabError("texts_figure takes {label: the tokens of a text}")
    first, drawn = next(iter(texts.values())), {}
    for label, tokens in texts.items():
        same = next((at for at, pair in enumerate(zip(first, tokens)) if pair[0] != pair[1]), len(tokens))
        drawn[label] = [(token, INK if at < same else RED) for at, token in enumerate(tokens)]
    return draw_texts(drawn).finished(title, (
        f"a text for each of {', '.join(texts)}; what follows the first token that differs from "
        "the first text is in another colour. The texts are this machine's."))


@styled
def margins_figure(runs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], title: str) -> Picture:
    """For each token its margin in a run, against how much another run changed the margin, on log axes.

    ``runs``: ``{dtype: (logits, the other run's)}``, both ``[tokens, vocabulary]``. The margin of a token is its logit
    minus that of the second run's choice, or minus the second largest if both runs chose the token. Tokens that change
    are on or above the diagonal.

        >>> figures.margins_figure({"bfloat16": (one.tp_logits, other.tp_logits)}, "Only near ties change")
    """
    figure, ax = picture(9.0, 5.0)
    points = {name: _margins(*(logits.double() for logits in pair)) for name, pair in runs.items()}
    values = torch.cat([torch.cat(found[:2]) for found in points.values()])
    low, high = values[values > 0].min().item() / 4, values.max().item() * 2  # exact zeros are drawn at the edge
    for (name, (margin, moved, flips)), (ink, marker) in zip(points.items(), looks(points).values()):
        at = margin.clamp(min=low), moved.clamp(min=low)
        ax.plot(*(one[~flips] for one in at), ls="", marker=marker, color=ink, ms=4.5, alpha=0.55, label=name)
        if flips.any():
            ax.plot(*(one[flips] for one in at), ls="", marker="X", color=RED, ms=9, mec="white",
                    label=f"{name}: another token")
    ax.plot([low, high], [low, high], color=INK, lw=1, ls="--", zorder=0)
    ax.set(xscale="log", yscale="log", xlim=(low / 1.5, high), ylim=(low / 1.5, high),
           xlabel="margin in the first run: its choice's logit minus its rival's",
           ylabel="how much the second run changed it")
    for axis in (ax.xaxis, ax.yaxis):
        ticks = [10.0 ** n for n in range(-12, 4) if low * 3 < 10.0 ** n < high]
        axis.set_ticks([low, *ticks], ["0", *(f"$10^{{{round(math.log10(tick))}}}$" for tick in ticks)])
        axis.set_minor_locator(NullLocator())
    ax.grid()
    return figure.finished(title, (
        "for every token its margin in the first run (its choice's logit minus its rival's) and how much the second "
        f"run changed it, on log axes; points for {', '.join(runs)}; on or above the diagonal the second run can "
        "choose another token. The points are this machine's."), columns=4)


def _margins(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    own, theirs = one.argmax(-1), other.argmax(-1)
    second = one.scatter(-1, own[:, None], float("-inf")).argmax(-1)
    rival = torch.where(theirs == own, second, theirs)
    margin, there = ((x.gather(-1, own[:, None]) - x.gather(-1, rival[:, None]))[:, 0] for x in (one, other))
    return margin, (margin - there).abs(), theirs != own


@styled
def orders_figure(sums: Mapping[str, torch.Tensor], exact: float, title: str) -> Picture:
    """A panel for each dtype: the results of a sum in some orders, as distances from the ``exact`` sum (dashed).

    ``sums``: ``{dtype: results}``, each ``[orders]``. A bar is as high as its result came out often.

        >>> figures.orders_figure({"bfloat16": results}, 12.5, "Every order rounds in another way")
    """
    figure, axes = picture(9.0, 3.6, ncols=len(sums), squeeze=False)
    for ax, (name, look) in zip(axes[0], looks(sums).items()):
        values, often = (sums[name].double() - exact).unique(return_counts=True)
        ax.vlines(values.tolist(), 0, often.tolist(), color=look.color, lw=3)
        ax.axvline(0, color=INK, lw=1.2, ls="--")
        ax.set_title(f"{name}\n{counted(len(values), 'result')}\nlargest − smallest: {values[-1] - values[0]:.1g}",
                     fontsize=10.5)
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_locator(MaxNLocator(2))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.margins(x=0.1)
        ax.set_xlabel("result − exact sum")
    axes[0][0].set_ylabel("orders")
    counts = "; ".join(f"{name}: {len(results.unique())} different in {len(results)} orders"
                       for name, results in sums.items())
    return figure.finished(title, f"what a sum of the same numbers is in many orders. {counts}.")

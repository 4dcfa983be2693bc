"""Figures of notebook 12: which part of which expert a rank holds, and which experts tokens go to."""

import math
from collections.abc import Mapping, Sequence

from tplab.errors import TplabError
from tplab.shard import ShardPlan
from tplab.show.drawings.svg import INK, Drawing, Svg, box, colour, write
from tplab.show.figures.style import Picture, picture, styled

_LEFT, _HIGH, _ROW = 128.0, 56.0, 100.0  # where the first expert begins; an expert's height, and that of a plan's row


def experts_figure(plans: Mapping[str, ShardPlan]) -> Drawing:
    """A row of experts for each plan, from the first column on top to the last, in the colours of the ranks.

        >>> figures.experts_figure({"expert parallel": ShardPlan.from_config(config, 3, enable_expert_parallel=True)})
    """
    if not plans or not all(plan.num_experts for plan in plans.values()):
        raise TplabError("experts_figure takes {title: ShardPlan}, of plans with experts")
    body, details, most = "", [], max(plan.num_experts for plan in plans.values())
    wide = min(70.0, 760 / most)
    for number, (title, plan) in enumerate(plans.items()):
        y = 30 + _ROW * number
        body += write(8, y + _HIGH / 2, title, bold=True)
        for expert in range(plan.num_experts):
            body += write(_LEFT + (expert + 0.5) * wide, y - 12, f"{expert}", size=11, anchor="middle")
        for shard in plan.ranks:
            fill, ink = colour(shard.rank)
            part, unit = shard.expert_mlp, _HIGH / plan.expert_intermediate_size
            for expert in shard.experts:
                x, top, high = _LEFT + expert * wide, y + part.start * unit, len(part) * unit
                body += box(x, top, wide - 4, high, fill)
                if high > 12 and wide > 20:
                    body += write(x + wide / 2 - 2, top + high / 2, f"{shard.rank}", size=11, anchor="middle", ink=ink)
        details.append(f"{title}: " + "; ".join(f"rank {shard.rank} {plan.experts_of(shard).removesuffix(', ')}"
                                                for shard in plan.ranks))
    body += write(_LEFT - 8, 18, "expert", size=11, anchor="end", ink=INK)
    return Drawing(Svg(_LEFT + most * wide + 10, _ROW * len(plans), body).text(),
                   f"Figure: which rank holds which part of which expert. {'. '.join(details)}.")


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

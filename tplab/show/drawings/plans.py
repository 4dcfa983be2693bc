"""Several plans, or several ways to cut a weight, next to each other."""

from collections.abc import Mapping

from tplab.shard import ShardPlan
from tplab.show.drawings.shards import ShardedWeight, beside, plan_drawing
from tplab.show.figures.style import show_with_words
from tplab.show.phrases import ShowError


class Drawing:
    """An SVG picture that shows itself in a notebook together with its words (the line ``Figure: …``)."""

    def __init__(self, svg: str, words: str):
        self.svg, self.words = svg, words

    def _ipython_display_(self):
        show_with_words(self, {"image/svg+xml": self.svg})


def plan_figure(plans) -> Drawing:
    """Who holds which heads, for one plan or for several side by side.

    Args:
        plans: a ``ShardPlan`` (drawn with its MLP columns and vocabulary rows), or ``{title: ShardPlan}``.

        >>> show.plan_figure({"Qwen2.5-0.5B": ShardPlan.from_config(qwen, 2), "SmolLM2": ShardPlan.from_config(smol,
        2)})
    """
    single = isinstance(plans, ShardPlan)
    plans = {"": plans} if single else plans
    if not isinstance(plans, Mapping) or not plans:
        raise ShowError("plan_figure takes a ShardPlan or {title: ShardPlan}")
    svg = beside([plan_drawing(plan, title, ends=single) for title, plan in plans.items()]).text()
    told = ". ".join(f"{title}: {_plan_words(plan)}".removeprefix(": ") for title, plan in plans.items())
    return Drawing(svg, f"Figure: who holds which heads. {told}.")


def _plan_words(plan: ShardPlan) -> str:
    held = "; ".join(f"rank {s.rank} query heads {_span(s.q_heads)}, KV heads {_span(s.kv_heads)}" for s in plan.ranks)
    return f"{plan.num_heads} query and {plan.num_kv_heads} KV heads, {plan.kind}: {held}"


def _span(heads: range) -> str:
    return f"{heads[0]}" if len(heads) == 1 else f"{heads[0]}–{heads[-1]}"


def weight_figure(weights) -> Drawing:
    """A ``[out, in]`` weight with each rank's part in its colour, or several ways to cut it side by side.

    Args:
        weights: a ``ShardedWeight`` (from :mod:`tplab.show.drawings.shards`), or ``{title: ShardedWeight}``.

        >>> right = ShardedWeight.of(plan, "q_proj")
        >>> wrong = ShardedWeight("q_proj", (128, 128), dim=1, parts=[[range(64)], [range(64, 128)]])
        >>> show.weight_figure({"dim 0: output features": right, "dim 1: input features": wrong})
    """
    weights = {weights.name: weights} if isinstance(weights, ShardedWeight) else weights
    if not isinstance(weights, Mapping) or not weights:
        raise ShowError("weight_figure takes a ShardedWeight or {title: ShardedWeight}")
    svg = beside([weight.drawing(title) for title, weight in weights.items()]).text()
    return Drawing(svg, "Figure: what each rank holds of a weight. "
                   + ". ".join(f"{title}: {weight}" for title, weight in weights.items()) + ".")

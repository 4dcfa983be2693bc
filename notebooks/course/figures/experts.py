"""Which part of which expert a rank holds."""

from collections.abc import Mapping

from tplab.shard import ShardPlan
from tplab.show.drawings.svg import INK, Drawing, Svg, box, colour, write
from tplab.show.phrases import ShowError

_LEFT, _HIGH, _ROW = 128.0, 56.0, 100.0  # where the first expert begins; an expert's height, and that of a plan's row


def experts_figure(plans: Mapping[str, ShardPlan]) -> Drawing:
    """A row of experts for each plan, from the first column on top to the last, in the colours of the ranks.

        >>> figures.experts_figure({"expert parallel": ShardPlan.from_config(config, 3, enable_expert_parallel=True)})
    """
    if not plans or not all(plan.num_experts for plan in plans.values()):
        raise ShowError("experts_figure takes {title: ShardPlan}, of plans with experts")
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
                body += box(x, top, wide - 4, high, fill, about=f"rank {shard.rank}")
                if high > 12 and wide > 20:
                    body += write(x + wide / 2 - 2, top + high / 2, f"{shard.rank}", size=11, anchor="middle", ink=ink)
        details.append(f"{title}: " + "; ".join(f"rank {shard.rank} {plan.experts_of(shard).removesuffix(', ')}"
                                                for shard in plan.ranks))
    body += write(_LEFT - 8, 18, "expert", size=11, anchor="end", ink=INK)
    return Drawing(Svg(_LEFT + most * wide + 10, _ROW * len(plans), body).text(),
                   f"Figure: which rank holds which part of which expert. {'. '.join(details)}.")

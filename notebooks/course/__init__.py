"""The course that stands on ``tplab``: what only a learner of the notebooks needs.

From the ground up: ``fable`` (how the embedded models were made), ``cost`` (what a step costs; the race beside peers),
``figures`` (those of the notebooks), ``judge`` (what looks at a learner's answer), ``exercises`` (data, one file a
notebook), ``cases`` (the sealed cases of notebook 11), ``lab`` (what ``launch`` runs). A room imports only from rooms
before it. ``lesson`` has the names that cells call.
"""

import sys


def draw_plans() -> None:
    """Have a notebook show a ShardPlan as a drawing: the formatter is registered by name, so nothing is imported."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        html = shell.display_formatter.formatters["text/html"]
        html.for_type_by_name("tplab.shard.plan", "ShardPlan", _plan_html)


def _plan_html(plan) -> str:
    from tplab.show import plan_html

    return plan_html(plan)


draw_plans()

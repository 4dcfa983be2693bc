"""What a notebook shows: figures with a text alternative, drawings, tables. Pure functions from data to a picture.

Stored text is deterministic: differences are given as orders of magnitude, and whatever rounding explains is called
"inside the floor".
"""

from tplab import lazy

_HOMES = {name: home for home, names in {
    ".figures.style": "STAGES", ".figures.spread": "nan_map", ".nan_trace": "trace_nan",
    ".figures.diffs": "diff_figure staircase", ".figures.points": "points_figure",
    ".figures.positions": "position_figure", ".figures.tokens_per_step": "tokens_per_step_figure",
    ".figures.bars": "bars_figure", ".figures.masks": "mask_figure", ".figures.heads": "heads_figure",
    ".figures.confusion": "confusion_figure", ".figures.oplogs": "op_logs",
    ".figures.collective_cost": "collective_cost_figure threads_figure format_bytes",
    ".figures.roofline": "roofline_figure", ".figures.routes": "routes_figure",
    ".figures.partings": "texts_figure margins_figure", ".figures.orders": "orders_figure",
    ".figures.curves": "curves_figure", ".drawings.shards": "plan_figure plan_html weight_figure ShardedWeight",
    ".drawings.experts": "experts_figure", ".drawings.linears": "column_row_figure",
    ".drawings.blocks": "slots_figure blocks_figure block_stepper", ".drawings.timeline": "timeline_figure",
    ".drawings.token_grid": "token_grid_figure", ".tables": "layer_table rank_shapes table top_tokens",
    ".recording": "record", ".phrases": "describe say magnitude ShowError"}.items() for name in names.split()}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)


def __dir__():
    return __all__

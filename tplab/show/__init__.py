"""What a notebook shows: figures with a text alternative, drawings, tables. Pure functions from data to a picture.

Stored text is deterministic: differences are given as orders of magnitude, and whatever rounding explains is called
"inside the floor".
"""

from tplab import lazy

_HOMES = {"STAGES": ".figures.style", "nan_map": ".figures.spread", "trace_nan": ".nan_trace",
          "diff_figure": ".figures.diffs",
          "staircase": ".figures.diffs", "points_figure": ".figures.points", "position_figure": ".figures.positions",
          "tokens_per_step_figure": ".figures.tokens_per_step", "bars_figure": ".figures.bars",
          "mask_figure": ".figures.masks", "heads_figure": ".figures.heads", "confusion_figure": ".figures.confusion",
          "op_logs": ".figures.oplogs",
          "collective_cost_figure": ".figures.collective_cost", "threads_figure": ".figures.collective_cost",
          "format_bytes": ".figures.collective_cost", "roofline_figure": ".figures.roofline",
          "routes_figure": ".figures.routes",
          "texts_figure": ".figures.partings", "margins_figure": ".figures.partings",
          "orders_figure": ".figures.orders", "curves_figure": ".figures.curves",
          "plan_figure": ".drawings.shards", "experts_figure": ".drawings.experts",
          "plan_html": ".drawings.shards", "weight_figure": ".drawings.shards", "ShardedWeight": ".drawings.shards",
          "column_row_figure": ".drawings.linears",
          "slots_figure": ".drawings.blocks", "blocks_figure": ".drawings.blocks", "block_stepper": ".drawings.blocks",
          "timeline_figure": ".drawings.timeline", "token_grid_figure": ".drawings.token_grid",
          "layer_table": ".tables", "rank_shapes": ".tables", "table": ".tables", "folded": ".tables",
          "top_tokens": ".tables", "record": ".recording",
          "describe": ".phrases", "say": ".phrases", "magnitude": ".phrases",
          "ShowError": ".phrases"}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)


def __dir__():
    return __all__

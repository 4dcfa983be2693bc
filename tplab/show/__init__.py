"""What a notebook shows: figures with a text alternative, drawings, tables. Pure functions from data to a picture.

Stored text is deterministic: differences are given as orders of magnitude, and whatever rounding explains is called
"inside the floor".
"""

from tplab import lazy

_HOMES = {name: home for home, names in {
    ".figures.style": "STAGES", ".figures.diffs": "diff_figure staircase", ".figures.points": "points_figure",
    ".drawings.shards": "plan_figure plan_html weight_figure ShardedWeight",
    ".drawings.blocks": "slots_figure blocks_figure",
    ".tables": "layer_table rank_shapes table top_tokens", ".steps": "engine_steps",
    ".phrases": "describe say magnitude"}.items() for name in names.split()}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)


def __dir__():
    return __all__

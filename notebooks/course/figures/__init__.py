"""Figures that only notebooks use: pure functions from data to a picture with a text alternative.

Those of one notebook are in the file of its name.
"""

from tplab import lazy

_HOMES = {name: home for home, names in {
    ".bars": "bars_figure", ".code": "side_by_side", ".positions": "position_figure",
    ".nb01": "mask_figure nan_map trace_nan",
    ".nb04": "equal_heads", ".nb05": "timeline_figure token_grid_figure",
    ".nb08": "op_logs",
    ".nb10": "roofline_figure", ".nb12": "experts_figure routes_figure",
    ".nb13": "overlap_figure ring_figure regions_figure",
    ".nb14": "texts_figure margins_figure orders_figure"}.items() for name in names.split()}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)

"""Figures that only notebooks use: pure functions from data to a picture with a text alternative."""

from tplab import lazy

_HOMES = {name: home for home, names in {
    ".spread": "nan_map", ".nan_trace": "trace_nan", ".positions": "position_figure",
    ".tokens_per_step": "tokens_per_step_figure", ".bars": "bars_figure", ".masks": "mask_figure",
    ".heads": "heads_figure", ".oplogs": "op_logs",
    ".collective_cost": "collective_cost_figure threads_figure format_bytes",
    ".roofline": "roofline_figure", ".routes": "routes_figure", ".partings": "texts_figure margins_figure",
    ".orders": "orders_figure", ".curves": "curves_figure", ".experts": "experts_figure",
    ".linears": "column_row_figure", ".timeline": "timeline_figure", ".token_grid": "token_grid_figure",
    ".code": "side_by_side", ".nb13": "overlap_figure ring_figure regions_figure"}.items() for name in names.split()}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)


def __dir__():
    return __all__

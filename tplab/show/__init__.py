"""What a notebook shows: figures with their words, tables, the panel, and the small helpers around an exercise.

Everything here is loaded on first use, so ``from tplab import show`` costs nothing. Stored text is deterministic:
differences are given as orders of magnitude, and whatever rounding explains is called "inside the floor".
"""

from importlib import import_module

_HOMES = {
    "ask": "talk", "default_question": "talk", "judge": "judging", "check_mask": "mask_exercise", "nan_map": "spread",
    "check": "lesson", "shown_error": "lesson", "side_by_side": "lesson", "default_prompt": "lesson",
    "environment": "series", "map_of_series": "series",
    "diff_figure": "diffs", "staircase": "diffs", "points_figure": "points", "position_figure": "positions", "work_figure": "work", "bars_figure": "bars",
    "mask_figure": "masks", "plan_figure": "drawings", "weight_figure": "drawings",
    "layer_table": "tables", "rank_shapes": "tables", "table": "tables", "top_tokens": "tables",
    "panel": "panel",
    "op_logs": "oplogs", "Incidents": "incidents", "caught": "incidents", "told": "incidents", "price_figure": "price", "threads_figure": "price",
    "bytes_words": "price", "cores": "price",
    "record": "recording", "slots_figure": "blocks", "blocks_figure": "blocks", "block_stepper": "blocks",
    "timeline_figure": "timeline", "where_figure": "where", "check_slots": "slots_exercise",
    "describe": "words", "magnitude": "words", "ShowError": "words",
    "STAGES": "style",
}
__all__ = list(_HOMES)


def __getattr__(name):
    if name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value  # `show.panel` must stay the function once the module of that name is loaded
        return value
    raise AttributeError(f"module 'tplab.show' has no attribute {name!r}; there are {', '.join(__all__)}")


def __dir__():
    return sorted([*globals(), *__all__])

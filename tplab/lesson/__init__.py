"""What an exercise needs: checks that say what is wrong, the panel of faults, failures on purpose."""

from importlib import import_module

_HOMES = {"ask": "answers", "default_question": "answers", "judge": "judging", "check_mask": "mask_exercise",
          "check": "exercise", "shown_error": "exercise", "side_by_side": "exercise", "default_prompt": "exercise",
          "panel": "fault_panel", "Incidents": "incidents", "caught": "incidents", "error_text": "incidents",
          "check_slots": "slots_exercise", "trace_nan": "nan_trace", "available_cores": "exercise",
          "ContiguousKVCache": "contiguous_cache"}
__all__ = list(_HOMES)


def __getattr__(name):
    # Lazy: `from tplab import lesson` costs nothing.
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"tplab.lesson.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'tplab.lesson' has no attribute {name!r}")

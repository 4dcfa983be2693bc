"""What ``launch`` runs: the batch and its report, the doctor, the series as a whole."""

from importlib import import_module

_HOMES = {"environment": "series", "map_of_series": "series"}
__all__ = list(_HOMES)


def __getattr__(name):
    # Lazy: `from tplab import lab` costs nothing.
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"tplab.lab.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'tplab.lab' has no attribute {name!r}")

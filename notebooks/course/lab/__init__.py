"""What ``launch`` runs: the batch and its report, the doctor, the series as a whole."""

from tplab import lazy

_HOMES = {"FOLDER": ".batch", "cheat_sheet": ".sheet", "environment": ".series", "map_of_series": ".series"}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)

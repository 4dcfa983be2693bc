"""What ``launch`` runs: the batch and its report, the doctor; and the tables of the cheat sheet."""

from tplab import lazy

_HOMES = {"FOLDER": ".batch", "environment": ".doctor", "held_by_ranks": ".sheet", "suspects": ".sheet"}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)

"""What a step costs, counted, predicted and measured; and tplab beside its peers: ``python -m course bench``."""

from tplab import lazy

_HOMES = {name: f"course.cost.{home}" for home, names in {
    "amounts": "step_amount", "cost": "step_cost", "links": "BYTES_PER_SECOND LINKS link_rows",
    "machine": "measure_machine reduce_seconds", "shapes": "shape_config",
    "steps": "busy_process step_kinds time_steps",
}.items() for name in names.split()}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)

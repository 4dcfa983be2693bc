"""The museum of bugs: each one a small patch on the clean engine."""

from tplab.faults.fault import Fault
from tplab.faults.museum import MUSEUM, SEED, STEPS, WING, applied, as_patches, fault
from tplab.faults.scenarios import scenario
from tplab.faults.sizing import Sizing, multiplied_then_divided, sizing, sizing_table

__all__ = ["MUSEUM", "SEED", "STEPS", "WING", "Fault", "Sizing", "applied", "as_patches",
           "fault", "multiplied_then_divided", "scenario", "sizing", "sizing_table"]

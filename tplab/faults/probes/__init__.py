"""Probes: bugs beside the museum's, which only have a name."""

from tplab.faults.probes import attention, ends, mlp, norms, rope, stream, sums, weights  # noqa: F401  (each adds some)
from tplab.faults.probes.probe import Probe, probes

__all__ = ["Probe", "probes"]

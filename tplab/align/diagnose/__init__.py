"""Which bug explains the first divergence? One file of hypotheses for each theme; see :mod:`registry` for a new one."""

from tplab.align.diagnose.case import Diagnosis
from tplab.align.diagnose.diagnose import diagnose, diagnose_all

__all__ = ["Diagnosis", "diagnose", "diagnose_all"]

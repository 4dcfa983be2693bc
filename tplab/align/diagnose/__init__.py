"""Which bug explains the first divergence? :mod:`mistakes` holds the table of all that are known."""

from tplab.align.diagnose.case import Diagnosis
from tplab.align.diagnose.diagnose import diagnose, diagnose_all

__all__ = ["Diagnosis", "diagnose", "diagnose_all"]

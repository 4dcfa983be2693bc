"""``python -m tplab bench``: tplab and its peers, alternately, in one run; medians and ratios.

On a busy machine, milliseconds say little and ratios say something. So in every round all contestants run one after the
other, each in processes of its own, which are stopped while the others run.
"""

from course.cost.run import BenchError, bench

__all__ = ["BenchError", "bench"]

"""``python -m tplab bench``: tplab and its peers, alternately, in one run; medians and ratios.

A benchmark of a busy machine says little about milliseconds and something about ratios: in every round all contestants
run one after the other, each in processes of its own that sleep while the others run.
"""

from tplab.bench.run import BenchError, bench

__all__ = ["BenchError", "bench"]

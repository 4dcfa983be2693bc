"""Loaded by the fork server before anything that brings numpy: a rank computes on one thread, in numpy's BLAS too.

torch has a function for that (``torch.set_num_threads``); OpenBLAS reads the environment once, when it is loaded.
"""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"

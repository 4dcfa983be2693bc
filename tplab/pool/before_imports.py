"""Loaded by the fork server before anything that takes long to import or brings numpy.

numpy's BLAS computes on one thread in a rank, torch on its share of the cores: torch has a function for that
(``torch.set_num_threads``), OpenBLAS reads the environment once, when it is loaded. And what the imports make stays, so
nobody looks for garbage meanwhile: that alone takes a fifth of their time. `tplab.pool.preload`, loaded last, ends it.
"""

import gc
import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"
gc.disable()

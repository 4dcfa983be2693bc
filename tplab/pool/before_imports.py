"""Loaded by the fork server before anything that takes long to import or brings numpy.

numpy's BLAS computes on one thread in a rank, torch on its share of the cores: torch has a function for that
(``torch.set_num_threads``), OpenBLAS reads the environment once, when it is loaded. And what the imports make stays, so
nobody looks for garbage meanwhile: that alone takes a fifth of their time. `tplab.pool.preload`, loaded last, ends it.

A rank's threads meet at the end of each product. GNU's OpenMP spins there for milliseconds: if one more process wants a
core, whoever spins keeps the one that he waits for from running. With a thousand looks, then sleep, SmolLM2 decodes at
28 tokens/s beside a busy process instead of 1.5 (one rank of two threads on two cores), and as quickly as before
without one. `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY` in the environment say it otherwise.
"""

import gc
import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
gc.disable()

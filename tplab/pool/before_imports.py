"""The first module that the fork server imports, before numpy and before anything that takes long to import.

- OpenBLAS, numpy's library, gets one thread. It reads the environment once, when it is loaded. (The number of torch's
  threads is set later, by ``torch.set_num_threads``.)
- Ctrl-C, which reaches the whole process group, is ignored during the imports: the notebook's process decides what
  ends.
- Garbage collection is off during the imports: nothing that they make is garbage, and the search takes a fifth of their
  time. `tplab.pool.preload`, the last module, ends both.
- Threads of GNU's OpenMP spin a thousand times at the end of a product, then sleep. By default they spin for
  milliseconds, and beside another busy process the spinning threads keep the last one from its core: SmolLM2 then
  decoded at 1.5 tokens/s, and at 28 with this setting (one rank of two threads on two cores). Without another process
  the setting costs nothing. `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY` in the environment have precedence.
"""

import gc
import os
import signal

PARENT = os.getppid()  # the notebook's process; asked now, for it may end during the imports
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher blocks it until here
os.environ["OPENBLAS_NUM_THREADS"] = "1"
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
gc.disable()

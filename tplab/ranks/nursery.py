"""Loaded by the fork server before it forks ranks, and by nobody else: what every rank should already have.

The modules below take seconds to import. Here that happens once, and each rank, also one that takes the place of a
dead one, starts in some tens of milliseconds with all of them.
"""

import os
import sys

import cloudpickle
import torch.distributed
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2

import tplab.ranks.worker

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    # Out of the notebook's process group: a kernel that is shut down the hard way has its whole group killed, and the
    # ranks could then not remove the pool's folder.
    os.setsid()

"""What code on a rank sees: which rank it is, the collectives, and their op log.

    all_reduce(torch.ones(4))      # on each of two ranks: a tensor of 2.

The same functions work on the ranks of a pool (`tplab.pool`), on `logical_ranks` (threads of one process, for wide
sweeps), under torchrun (`join_torchrun`), and alone, where they do nothing but note the call.
"""

from tplab import lazy

_HOMES = {"RankError": ".errors", "CollectiveMismatch": ".errors", "OpRecord": ".oplog",
          "rank": ".context", "world_size": ".context", "state": ".context",
          "all_reduce": ".comm", "all_gather": ".comm", "broadcast": ".comm", "barrier": ".comm", "op_log": ".comm",
          "logical_ranks": ".logical", "join_torchrun": ".torchrun", "under_torchrun": ".torchrun"}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)  # a process loads only the kind of ranks that it uses

"""What code on a rank sees: which rank it is, the collectives, and their op log.

    all_reduce(torch.ones(4))      # on each of two ranks: a tensor of 2.

The same functions work on the ranks of a pool (`tplab.pool`), on `logical_ranks` (threads of one process, for tests of
many settings), under torchrun (`join_torchrun`), and outside of any rank, where they only enter the call in the op log.
"""

from tplab import lazy

_HOMES = {"RankError": ".errors", "CollectiveMismatch": ".errors", "OpRecord": ".oplog",
          "rank": ".context", "world_size": ".context", "state": ".context",
          "all_reduce": ".comm", "reduce_scatter": ".comm", "all_gather": ".comm", "broadcast": ".comm",
          "barrier": ".comm", "op_log": ".comm",
          "logical_ranks": ".logical", "join_torchrun": ".torchrun", "under_torchrun": ".torchrun"}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)  # a process loads only the kind of ranks that it uses

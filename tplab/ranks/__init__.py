"""What code on a rank sees: which rank it is, the collectives, and their op log.

    all_reduce(torch.ones(4))      # on each of two ranks: a tensor of 2.

The same functions work on the ranks of a pool (`tplab.pool`), on `logical_ranks` (threads of one process, for wide
sweeps), under torchrun (`join_torchrun`), and alone, where they do nothing but note the call.
"""

from importlib import import_module

_HOMES = {
    "RankError": "errors", "CollectiveMismatch": "errors",
    "rank": "context", "world_size": "context", "state": "context",
    "all_reduce": "comm", "all_gather": "comm", "broadcast": "comm", "barrier": "comm", "op_log": "comm",
    "OpRecord": "oplog", "logical_ranks": "logical", "join_torchrun": "torchrun", "under_torchrun": "torchrun",
}
__all__ = list(_HOMES)


def __getattr__(name):
    # Lazy: a rank, which only needs the collectives, does not load the pool, nor the parent the torchrun group.
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"tplab.ranks.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'tplab.ranks' has no attribute {name!r}")

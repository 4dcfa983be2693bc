"""The processes: `RankPool`, and all that starts, watches and ends its ranks.

    pool = RankPool(2)
    pool.run(lambda: all_reduce(torch.ones(4)))     # [tensor of 2., tensor of 2.]
"""

from importlib import import_module

_HOMES = {"RankPool": "pool", "shared_pool": "pool", "latest_pool": "pool"}
__all__ = list(_HOMES)


def __getattr__(name):
    # Lazy: a rank, which is made of `worker`, does not load the parent's side.
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(f"tplab.pool.{_HOMES[name]}"), name)
        return value
    raise AttributeError(f"module 'tplab.pool' has no attribute {name!r}")

"""The processes: `RankPool`, and all that starts, watches and ends its ranks.

    pool = RankPool(2)
    pool.run(lambda: all_reduce(torch.ones(4)))     # [tensor of 2., tensor of 2.]
"""

from tplab import lazy

_HOMES = {"RankPool": ".pool", "shared_pool": ".pool", "latest_pool": ".pool",
          "available_cores": ".waiting"}
__all__ = list(_HOMES)
__getattr__ = lazy(__name__, _HOMES)  # a rank, which is made of `worker`, does not load the parent's side

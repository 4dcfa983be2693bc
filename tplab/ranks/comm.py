"""The collectives, as the running code calls them: each goes to the group that this code belongs to."""

import torch

from tplab.ranks.context import current
from tplab.ranks.oplog import OpRecord, caller


def all_reduce(t: torch.Tensor) -> torch.Tensor:
    """Sum `t` over all ranks, in place, in rank order; every rank has the same bits afterwards. Returns `t`.

    Same shape and dtype on all ranks, else `CollectiveMismatch`. With one rank `t` stays as it is.
    """
    return current().all_reduce(t, caller())


def all_gather(t: torch.Tensor, dim: int = -1, sizes=None) -> torch.Tensor:
    """The tensors of all ranks joined along `dim` in rank order.

    `sizes` gives the length of each rank's tensor along `dim` where they are not all equal.
    """
    return current().all_gather(t, dim, sizes, caller())


def broadcast(t: torch.Tensor, src: int = 0) -> torch.Tensor:
    """Overwrite `t` on every rank with rank `src`'s, in place. Returns `t`. Same shape and dtype on all ranks."""
    return current().broadcast(t, src, caller())


def barrier() -> None:
    """Wait until every rank is here."""
    current().barrier(caller())


def op_log() -> list[OpRecord]:
    """The collectives of this rank so far, oldest first (the last 1024)."""
    return current().log.records()

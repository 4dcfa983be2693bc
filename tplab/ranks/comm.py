"""The collectives that code on a rank calls; each uses the group to which the running code belongs."""

import torch

from tplab.ranks.context import current
from tplab.ranks.oplog import OpRecord, caller


def all_reduce(t: torch.Tensor) -> torch.Tensor:
    """Sum `t` over all ranks, in place and in rank order, so that every rank has the same bits. Returns `t`.

    Raises `CollectiveMismatch` if shape or dtype differ between ranks. With one rank `t` stays as it is.
    """
    return current().all_reduce(t, caller())


def all_gather(t: torch.Tensor, dim: int = -1, sizes=None) -> torch.Tensor:
    """The tensors of all ranks, concatenated along `dim` in rank order.

    `sizes`: the length of each rank's tensor along `dim`, if they are not all equal.
    """
    return current().all_gather(t, dim, sizes, caller())


def broadcast(t: torch.Tensor, src: int = 0) -> torch.Tensor:
    """Copy rank `src`'s `t` into every rank's `t`, of the same shape and dtype. Returns `t`."""
    return current().broadcast(t, src, caller())


def barrier() -> None:
    """Wait until every rank is here."""
    current().barrier(caller())


def op_log() -> list[OpRecord]:
    """The last 1024 collectives of this rank, oldest first."""
    return current().log.records()

"""The collectives that code on a rank calls; each uses the group to which the running code belongs."""

import torch

from tplab.ranks.context import current
from tplab.ranks.group import Work
from tplab.ranks.oplog import OpRecord, caller


def all_reduce(t: torch.Tensor, *, async_op: bool = False) -> torch.Tensor | Work:
    """Sum `t` over all ranks, in place and in rank order, so that every rank has the same bits. Returns `t`.

    With ``async_op=True`` it returns a `Work` at once; the sum is in `t` after its ``wait()``, and until then `t` must
    be neither read nor written. A run that ends without that wait is a `RankError`.

    Raises `CollectiveMismatch` if shape or dtype differ between ranks. With one rank `t` stays as it is.
    """
    return current().start_all_reduce(t, caller()) if async_op else current().all_reduce(t, caller())


def reduce_scatter(t: torch.Tensor, dim: int = 0, sizes=None) -> torch.Tensor:
    """This rank's part of the sum of `t` over all ranks, with the bits that `all_reduce` gives it.

    `sizes`: how much of `dim` goes to each rank; if not given, all get as much.
    """
    return current().reduce_scatter(t, dim, sizes, caller())


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

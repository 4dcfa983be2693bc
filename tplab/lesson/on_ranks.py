"""A learner's function on ranks: called with copies on each, its collectives and its work noted."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from tplab.lesson.mine import Mine, NotYet, changed, guarded
from tplab.pool import shared_pool
from tplab.ranks import OpRecord, logical_ranks, op_log, rank


class Each(tuple):
    """An argument of its own for each rank, in rank order."""


class Answer(NamedTuple):
    """What the learner's function gave on one rank."""

    value: object
    ops: list[OpRecord]  # the collectives that it asked for, in order
    multiplications: int  # by matrices


def on_ranks(mine: Mine, size: int, *args, real: bool = False) -> list[Answer]:
    """The learner's function on ``size`` logical ranks, or ``real`` ones; the answers in rank order.

    An argument is the same for all ranks, or an :class:`Each`. Raises :class:`NotYet` in the learner's terms if a rank
    raises, if ranks wait for each other, or if one writes into an argument that is not its own to write.
    """
    run = shared_pool(size).run if real else lambda *call: logical_ranks(size, *call)
    answers, written = zip(*guarded(run, _call, mine.function, args, mine.takes))
    for number, names in enumerate(written):
        if unasked := [name for name in names if name not in mine.writes]:
            raise NotYet(f"on rank {number} it changes its argument {unasked[0]}, which its caller still needs: work "
                         "on a copy")
    return list(answers)


def _call(function: Callable, args: tuple, takes: Sequence[str]) -> tuple[Answer, list[str]]:
    args = [arg[rank()] if isinstance(arg, Each) else arg for arg in args]
    given, before = copy.deepcopy(args), max((record.seq for record in op_log()), default=0)
    with _Multiplications() as work:
        value = function(*given)
    ops = [record for record in op_log() if record.seq > before]
    return Answer(value, ops, work.count), changed(takes, args, given)


class _Multiplications(TorchDispatchMode):
    """Counts multiplications by matrices."""

    _INPUT = {"mm": 0, "bmm": 0, "mv": 0, "matmul": 0, "linear": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, at = func(*args, **(kwargs or {})), self._INPUT.get(func.overloadpacket.__name__)
        if at is not None:
            self.count += result.numel() * args[at].shape[-1]
        return result


def ranks_in_words(ranks: Sequence[int], size: int) -> str:
    """``"rank 1"``, ``"ranks 1 and 2"``, ``"every rank"``."""
    if len(ranks) == size > 1:
        return "every rank"
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
